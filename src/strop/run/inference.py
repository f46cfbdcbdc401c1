"""Find a model, serve it, and sample its replies.

The model is a run or a checkpoint, or anything that `strop.store.get_model` takes. `placement.kind` says
whether its engine is in this process or another one; a running server can be used too. The examples that a
run trained on are read from the run itself, so that they cannot be evaluated as held out (EVA-1).
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from strop.engine import Completion, GenerationRequest
from strop.engine.loading import EngineSettings, load_engine
from strop.engine.openai import KEY_VARIABLE, OpenAiEngine
from strop.environments import RolloutPlan, choose_environment, run_rollout
from strop.errors import ConfigError, DataError
from strop.hardware import describe_machine
from strop.hardware.number_format import compute_device, settle_format
from strop.io import verify_directory
from strop.io.notices import tell
from strop.plan.known import find_checkpoint
from strop.record import RunDir
from strop.record.run_dir import WEIGHTS_FACT
from strop.rollout import Message, Rollout, Sampling, Split
from strop.run.training import set_threads
from strop.sandbox.choose import RAY, make_backend
from strop.spec import RunSpec, SamplingSpec, load_spec
from strop.spec.display import dotted
from strop.spec.parts import needs_ray
from strop.spec.reader import load_section
from strop.spec.sources import parse_override
from strop.spec.task import TaskSection
from strop.store import follow_store, get_model
from strop.tasks import Task, build_task, render_prompt, task_builder
from strop.tasks.judging import Judge
from strop.tasks.task import list_names
from strop.tokenizer import Tokenizer

if TYPE_CHECKING:
    from strop.engine.contract import Engine

MAX_PROMPT_REPLY_TOKENS = 256
"""For a user's prompt, where no task limits the reply."""
SETUP_SECTIONS = ("task", "sampling", "model", "engine", "placement")
"""Sections of a run file that matter for sampling from a model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenedModel:
    """A model that is on this disk and verified."""

    path: Path
    digest: str
    step: int
    """Training steps of a checkpoint; 0 for another model."""
    run_path: Path | None
    """The run that trained it; None for another model."""
    url: str | None = None
    """The running server that has the model. None: strop serves it."""
    served_name: str = ""
    """A name that the server may have for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptReply:
    """A model's reply to a user's prompt."""

    prompt: str
    """Rendered, as the model read it."""
    completion: Completion


def open_model(name: str) -> OpenedModel:
    """Find or fetch a model: a run, a checkpoint, or any name that `get_model` takes.

    `http://host:port/v1#NAME` is a running server of OpenAI's completions API; tokenizer and sizes are those
    of the model NAME, as `get_model` takes it.
    Raises: ConfigError for an unknown name; StoreError or CorruptRecord if its bytes are missing or damaged.
    """
    if name.startswith(("http://", "https://")):
        return _open_served(name)
    place = Path(os.path.expanduser(name))
    checkpoint = find_checkpoint(place) if place.exists() else None
    if checkpoint is None:
        handle = get_model(name)
        return OpenedModel(path=handle.path, digest=handle.digest, step=0, run_path=None)
    manifest = verify_directory(checkpoint.path, can_trust_mtime=True)
    handle = get_model(str(checkpoint.model_path))
    return OpenedModel(
        path=handle.path,
        # The digest that the run's evaluations record; checkpoints without the fact have that of their files.
        digest=str(manifest.facts.get(WEIGHTS_FACT, handle.digest)),
        step=checkpoint.step,
        run_path=checkpoint.run_path,
    )


def _open_served(address: str) -> OpenedModel:
    """Return the model of a running server, with the files of the model named after #."""
    url, _, name = address.partition("#")
    if not name:
        raise ConfigError(
            f"{address} names a server and no model",
            allowed="http://host:port/v1#NAME, where NAME is a model whose tokenizer writes the prompts",
            next_step="add # and the model's folder or id",
        )
    parts = urlsplit(url)
    if parts.username is not None or parts.password is not None or parts.query:
        raise ConfigError(
            f"the address of the server {parts.scheme}://{parts.hostname} has a name, a password or a query",
            allowed=f"http://host:port/v1#NAME, with the key of the server in {KEY_VARIABLE}",
            next_step="take it out: an address stands in command lines, logs and results",
        )
    handle = get_model(name)
    tell(f"{url} speaks for {name}; strop cannot verify its weights")
    return OpenedModel(
        path=handle.path,
        # The digest of the address, because strop cannot see the server's weights.
        digest=hashlib.sha256(address.encode()).hexdigest(),
        step=0,
        run_path=None,
        url=url,
        served_name=name,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingSetup:
    """The settings of sampling from a model. Sampling has fewer limits than in a run that trains."""

    spec: RunSpec
    """Only task, seed, model, engine and placement are used."""
    sampling: Sampling
    split: Split


def read_setup(task: str, words: Sequence[str], split: Split) -> SamplingSetup:
    """Read the settings for `evaluate_here` and `sample_task` from `key=value` words.

    A key without a dot is a setting of the task, except for `seed`; others are written in full:
    `sampling.temperature=0.6`, `model.prompt_format=base`.
    Raises: ConfigError as for a run file, and for settings that do not matter for sampling.
    """
    settings = [_complete(word) for word in words]
    sampling = [word for word in settings if word.startswith("sampling.")]
    # One prompt per step, so that a task too small to train on is accepted.
    fixed = ["name=asked", f"task.name={task}", "train.prompts_per_step=1"]
    spec = load_spec(None, [*fixed, *(word for word in settings if word not in sampling)]).spec
    machine = describe_machine()
    spec, _ = settle_format(spec, machine, compute_device(machine))
    # Read by itself: without the limits that training sets on it.
    section = load_section("sampling", SamplingSpec, sampling)
    return SamplingSetup(
        spec=spec,
        sampling=Sampling(**section.model_dump()),
        split=split,
    )


def take_num(words: Sequence[str], default: int) -> tuple[int, list[str]]:
    """Return the number of examples of a word `num=N`, and the other words.

    Raises: ConfigError if N is no positive number.
    """
    numbers = [word.removeprefix("num=") for word in words if word.startswith("num=")]
    for text in numbers:
        if not text.isdecimal() or not int(text):
            raise ConfigError(
                f"'num={text}' is no number of examples",
                allowed="1 or more",
                next_step="write for example num=32",
            )
    return int(numbers[-1]) if numbers else default, [word for word in words if not word.startswith("num=")]


def read_setups(tasks: Sequence[str], words: Sequence[str], split: Split) -> list[SamplingSetup]:
    """Read the settings of several tasks, which differ in the task only.

    A task's settings are written `task_name.key=value`; for a single task also `key=value` as for
    `read_setup`.
    Raises: ConfigError like `read_setup`, for a task named twice, and for a setting without its task.
    """
    if len(set(tasks)) < len(tasks):
        raise ConfigError(
            f"a task is named twice in {','.join(tasks)}",
            allowed="each task once per call",
            next_step="evaluate the second one with a call of its own",
        )
    return [
        read_setup(task, [own for word in words if (own := _pick(word, task, tasks)) is not None], split)
        for task in tasks
    ]


def _pick(word: str, task: str, tasks: Sequence[str]) -> str | None:
    """Return a word for one of the tasks as `read_setup` takes it; None for a word of another task."""
    path, _ = parse_override(word)
    if len(path) > 1 and path[0] in tasks:
        if path[0] != task:
            return None
        return f"task.{dotted(path[1:])}={word.partition('=')[2]}"
    if len(tasks) > 1 and path[0] not in {"seed", *SETUP_SECTIONS} - {"task"}:
        raise ConfigError(
            f"{word} does not say which of the {len(tasks)} tasks it is for",
            allowed=f"{' or '.join(f'{name}.{dotted(path)}=...' for name in tasks)}; seed, and the"
            f" sections {', '.join(SETUP_SECTIONS[1:])}",
            next_step="put the task's name before it",
        )
    return word


def read_prompt_setup(words: Sequence[str]) -> SamplingSetup:
    """Read the settings for `sample_prompt`. Of the task's settings only `max_reply_tokens` is allowed.

    Raises: ConfigError like `read_setup`.
    """
    for word in map(_complete, words):
        if word.startswith("task.") and not word.startswith("task.max_reply_tokens="):
            raise _ignored(
                word, "max_reply_tokens, seed, and the sections sampling, model, engine, placement"
            )
    # A placeholder task, which is never built.
    return read_setup("arithmetic", words, Split.TRAIN)


def _complete(word: str) -> str:
    """Return a word with its full key. Raises: ConfigError for one that would be ignored."""
    path, _ = parse_override(word)
    # A key that is no section of a run file is a table of the task, such as the parts of a mixture.
    if len(path) == 1 or path[0] not in RunSpec.model_fields:
        return word if path == ("seed",) else f"task.{word}"
    if path[0] not in SETUP_SECTIONS or path == ("model", "uri"):
        raise _ignored(word, f"settings of the task, seed, and the sections {', '.join(SETUP_SECTIONS)}")
    return word


def _ignored(word: str, allowed: str) -> ConfigError:
    return ConfigError(f"{word} plays no part in asking a model", allowed=allowed, next_step="remove it")


def read_trained_ids(run_path: Path | None) -> frozenset[str]:
    """Return the ids and problems of the examples that a run may have trained on; empty without a run.

    The splits of another version of its task may have been different, so a run that began with one also
    counts the examples of its rollouts.
    """
    if run_path is None:
        return frozenset()
    spec = load_spec(run_path / "spec.toml").spec
    with follow_store(spec.store):
        task = build_task(spec.task)
        known = list_names(task, task.examples(Split.TRAIN))
        run = RunDir.open(run_path)
        if run.state.facts.get("task_version") == task.version:
            return known
    # Here, because pyarrow is heavy.
    from strop.record.rollouts import read_examples

    names = set(known)
    for path in run.rollouts_files():
        for example in read_examples(path):
            names.add(example.example_id)
            # A task that no longer has the example cannot name its problem.
            with suppress(DataError):
                names.add(task.problem_of(example) or example.example_id)
    return frozenset(names)


def sample_task(setup: SamplingSetup, model: OpenedModel, num_examples: int) -> list[Rollout]:
    """Attempt the first examples of a split once each, and judge the replies.

    Raises: ConfigError if the split has fewer examples.
    """
    spec, task = setup.spec, build_task(setup.spec.task)
    examples = task.examples(setup.split)
    if not 1 <= num_examples <= len(examples):
        raise ConfigError(
            f"{num_examples} examples of the {setup.split.value} split of task {task.name}",
            allowed=f"1 to {len(examples)}",
            next_step="correct the number",
        )

    async def sample() -> list[Rollout]:
        async with serve_model(spec, model) as (engine, tokenizer), hold_judge(spec.task, task) as judge:
            attempt = partial(run_rollout, engine=engine, tokenizer=tokenizer)
            make_environment = choose_environment(task, judge)
            plans = [
                RolloutPlan(
                    example=example,
                    step=model.step,
                    sample_index=0,
                    run_seed=spec.seed,
                    sampling=setup.sampling,
                    max_reply_tokens=task.limits_of(example).max_reply_tokens,
                    prompt_format=spec.model.prompt_format,
                )
                for example in examples[:num_examples]
            ]
            return list(await asyncio.gather(*(attempt(make_environment(), plan=plan) for plan in plans)))

    return asyncio.run(sample())


def sample_prompt(setup: SamplingSetup, model: OpenedModel, prompt: str) -> PromptReply:
    """Return a model's reply to a user's prompt; no task is involved."""
    spec = setup.spec
    max_reply_tokens = spec.task.max_reply_tokens or MAX_PROMPT_REPLY_TOKENS

    async def ask() -> PromptReply:
        async with serve_model(spec, model) as (engine, tokenizer):
            message = Message(role="user", content=prompt)
            text, prompt_ids = render_prompt(tokenizer, [message], spec.model.prompt_format)
            completion = await engine.generate(
                GenerationRequest(
                    prompt_ids=prompt_ids,
                    seed=spec.seed,
                    sampling=setup.sampling,
                    max_tokens=max_reply_tokens,
                    stop_token_ids=tokenizer.stop_token_ids,
                )
            )
            return PromptReply(prompt=text, completion=completion)

    return asyncio.run(ask())


@asynccontextmanager
async def hold_judge(section: TaskSection, task: Task) -> AsyncIterator[Judge]:
    """Open the judge of a task for the block. Raises: ConfigError if its sandboxes are a training run's."""
    if needs_ray(section):
        make_backend(RAY)
    judge = Judge(task, task_builder(section))
    try:
        yield judge
    finally:
        await judge.close()


@asynccontextmanager
async def serve_model(spec: RunSpec, model: OpenedModel) -> AsyncIterator[tuple[Engine, Tokenizer]]:
    """Load a model into the engine that the spec names, for the block."""
    set_threads(spec.placement.threads)
    tokenizer = Tokenizer.load(model.path)
    engine: Engine
    async with AsyncExitStack() as stack:
        if model.url is not None:
            engine = OpenAiEngine(
                model.url,
                tokenizer,
                model=model.served_name,
                version=model.step,
                max_num_seqs=spec.engine.max_num_seqs,
            )
            stack.push_async_callback(engine.close)
        elif spec.placement.kind == "ray" or spec.engine.kind == "vllm":
            from strop.cluster.ray.placement import serve_engine

            engine = await stack.enter_async_context(serve_engine(spec, model.path, version=model.step))
        else:
            engine, _ = await load_engine(EngineSettings.of(spec), model.path, version=model.step)
            stack.push_async_callback(engine.close)
        yield engine, tokenizer
