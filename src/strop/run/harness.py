"""Evaluating a model by lm-eval: what is asked of whom, checked before anything is started."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.errors import ConfigError
from strop.evaluate.accuracy import refuse_trained
from strop.evaluate.harness import (
    LM_EVAL,
    PROTOCOLS,
    FreeJob,
    HarnessJob,
    HarnessProtocol,
    HarnessResult,
    change_protocol,
    choose_engine,
    refuse_small_model,
    refuse_unconfirmed_code,
    run_harness,
)
from strop.policy.footprint import read_model_size
from strop.rollout import Sampling, Split
from strop.run.evaluation import EVALS_ROOT, EvalWish
from strop.run.inference import Asking, OpenedModel, read_asking, read_askings, read_trained_ids
from strop.spec import EngineSpec, ModelSpec, PlacementSpec, SamplingSpec, load_spec
from strop.spec.display import dotted, show_value
from strop.spec.harness import HarnessSpec
from strop.spec.sources import parse_override
from strop.spec.task import TaskSpec
from strop.store.python_environment import ensure_environment
from strop.tasks import build_task

_OF_DATA = frozenset(
    {
        *("name", "source", "num_held_out", "num_train", "min_level", "max_level", "subject"),
        *("min_isolation", "sandbox", "order_file", "min_solved_frac", "max_solved_frac"),
        "max_unmatched_ids",
    }
)
"""Settings of our tasks that choose examples: the harness asks these. All others say how strop asks."""
_OF_ASKING = {"model": {"uri", "dtype"}, "engine": {"kind", "python"}, "placement": {"threads"}}
"""Settings of these sections that the harness follows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HarnessAsking:
    """How lm-eval is asked, checked as far as that needs neither a model nor lm-eval."""

    settings: HarnessSpec
    shared: Asking
    """What holds for all of its tasks."""
    askings: Mapping[str, Asking]
    """By our task, whose examples are asked."""


def read_harness_asking(
    names: Sequence[str], words: Sequence[str], split: Split, wish: EvalWish, *, may_run_code: bool
) -> HarnessAsking:
    """Read how lm-eval is asked; the arguments are those of `evaluate_by_harness`.

    Raises: ConfigError for what would not take effect, and for code that was not confirmed.
    """
    if split is not Split.HELD_OUT or wish.num_samples or wish.pass_at or wish.pass_threshold is not None:
        raise ConfigError(
            "--harness lm-eval with samples, pass@k, a threshold or the training split",
            allowed="its protocols: one reply to each held-out example",
            next_step="leave them out, or leave --harness out",
        )
    if len(set(names)) < len(names):
        raise ConfigError(
            f"a task is named twice in {','.join(names)}",
            allowed="each task once",
            next_step="name it once: its result is one file",
        )
    if odd := [name for name in names if re.fullmatch(r"[\w./-]+", name) is None]:
        raise ConfigError(
            f"--harness lm-eval with task {odd[0]!r}",
            allowed=f"lm-eval's names of tasks, groups and tags; {', '.join(PROTOCOLS)} have protocols here",
            next_step="correct it",
        )
    of_harness = [word for word in words if parse_override(word)[0][0] == "harness"]
    settings = load_spec(None, ["name=asked", "task.name=arithmetic", *of_harness]).spec.harness
    words = [word for word in words if word not in of_harness]
    pinned = [PROTOCOLS[name] for name in names if name in PROTOCOLS]
    for protocol in pinned:
        refuse_unconfirmed_code(protocol, is_confirmed=may_run_code)
    own_tasks = list(dict.fromkeys(protocol.own_task for protocol in pinned))
    askings = dict(zip(own_tasks, read_askings(own_tasks, words, split), strict=True))
    if len(pinned) == len(names):
        shared = next(iter(askings.values()))
    else:
        # Any task stands in: of its settings none is asked.
        shared = read_asking("arithmetic", [word for word in words if _is_shared(word, own_tasks)], split)
    for asking in [shared, *askings.values()]:
        _refuse_unheard(asking)
    for protocol in pinned:
        change_protocol(protocol, _read_settings(settings, askings[protocol.own_task].spec.task, protocol))
    return HarnessAsking(settings=settings, shared=shared, askings=askings)


def evaluate_by_harness(
    names: Sequence[str],
    words: Sequence[str],
    split: Split,
    model: OpenedModel,
    wish: EvalWish,
    *,
    may_run_code: bool = False,
    say: Callable[[str], None],
) -> list[HarnessResult]:
    """Run lm-eval on tasks by the harness's names; its environment is made on first use.

    `words` are settings of our tasks behind them, as `read_askings` takes them, and those of the section
    harness. `may_run_code`: the user accepts that the harness runs what the model wrote in no sandbox.
    Returns nothing for a part that is not the first.
    Raises: ConfigError for what would not take effect, and for code that was not confirmed; CheckRefused if
        the examples were trained on, or the model is too small; StoreError if the environment cannot be
        made; EngineError if the harness fails.
    """
    asked = read_harness_asking(names, words, split, wish, may_run_code=may_run_code)
    if model.url is not None:
        _refuse_own([word for word in words if parse_override(word)[0][0] != "harness"])
    jobs = _plan_jobs(names, asked, model, wish, may_run_code=may_run_code)
    for job in jobs:
        if isinstance(job, HarnessJob):
            refuse_small_model(job)
    ensure_environment(LM_EVAL, say=say)
    out_dir = Path(wish.out_dir or EVALS_ROOT / f"lm-eval-{model.digest[:8]}")
    part, num_parts = wish.part
    found = []
    for job in jobs:
        say(f"{job.name}: by {job.engine.kind}, {job.engine.python}")
        is_shared = wish.out_dir is None
        result = run_harness(job, out_dir, part=part, num_parts=num_parts, is_shared=is_shared, say=say)
        found += [] if result is None else [result]
    return found


def _is_shared(word: str, own_tasks: Sequence[str]) -> bool:
    """Whether a word is for all tasks; what no task of ours takes is refused by `read_asking`."""
    head = word.partition("=")[0].partition(".")[0]
    return head not in own_tasks and (not own_tasks or head in {"seed", "model", "engine", "placement"})


def _plan_jobs(
    names: Sequence[str], asked: HarnessAsking, model: OpenedModel, wish: EvalWish, *, may_run_code: bool
) -> list[HarnessJob | FreeJob]:
    trained_ids = read_trained_ids(model.run_path)
    wanted, spec = asked.settings, asked.shared.spec
    if spec.engine.kind == "vllm":
        # The word that training has for it; only with it may an interpreter be named.
        if wanted.engine == "hf":
            raise ConfigError(
                "engine.kind='vllm' with harness.engine='hf'",
                allowed="one of them",
                next_step="remove one: the harness asks, and harness.engine says by whom",
            )
        wanted = wanted.model_copy(update={"engine": "vllm"} if model.url is None else {})
    engine = choose_engine(wanted, spec.engine.python, url=model.url, served_name=model.served_name)
    max_positions = read_model_size(model.path).max_positions
    max_positions = min(wanted.max_model_tokens or max_positions, max_positions)
    if model.url is not None:
        # lm-eval leaves one place of a server free.
        max_positions = min(max_positions, engine.served_tokens or max_positions) - 1
    given: dict[str, Any] = {
        "model_path": model.path,
        "model_digest": model.digest,
        "step": model.step,
        "dtype": spec.model.dtype if model.url is None else None,
        "max_positions": max_positions,
        "num_examples": wish.num_examples,
        "engine": engine,
        "threads": spec.placement.threads,
        "file_name": wish.name,
    }
    jobs: list[HarnessJob | FreeJob] = []
    for name in names:
        if name not in PROTOCOLS:
            jobs.append(FreeJob(name=name, may_run_code=may_run_code, settings=wanted, **given))
            continue
        section = asked.askings[PROTOCOLS[name].own_task].spec.task
        settings = _read_settings(wanted, section, PROTOCOLS[name])
        protocol = change_protocol(PROTOCOLS[name], settings)
        # Without settings that say how strop would ask.
        unset = {one: None if one == "max_reply_tokens" else 0 for one in _shown_settings(section)}
        task = build_task(section.model_copy(update={**unset, **protocol.own_settings}))
        refuse_trained(task, Split.HELD_OUT, task.examples(Split.HELD_OUT), trained_ids)
        jobs.append(HarnessJob(protocol=protocol, task=task, settings=settings, **given))
    return jobs


def _refuse_own(words: Sequence[str]) -> None:
    """Refuse settings of a model that is run here, where a server runs it."""
    places = [dotted(parse_override(word)[0]) for word in words]
    if own := sorted(
        {f"{section}.{name}" for section, names in _OF_ASKING.items() for name in names} & {*places}
    ):
        raise ConfigError(
            f"{', '.join(own)} with a running server",
            allowed="what the server was started with",
            next_step="leave it out, or start the server so",
        )


def _shown_settings(task: TaskSpec) -> dict[str, int]:
    """Return what our task's settings say of shots and budget, where they say it."""
    values = {name: getattr(task, name, None) for name in ("num_few_shot", "max_reply_tokens")}
    return {name: value for name, value in values.items() if value}


def _read_settings(settings: HarnessSpec, task: TaskSpec, protocol: HarnessProtocol) -> HarnessSpec:
    """Return the harness's settings with the shots and the budget that were written as our task's.

    Raises: ConfigError if both are given and differ, and for a setting that would not take effect.
    """
    fields = type(task).model_fields
    heard = {*_OF_DATA, "num_few_shot", "max_reply_tokens"} - set(protocol.own_settings)
    changed = [
        name
        for name in task.model_fields_set
        if name not in heard
        and getattr(task, name) != fields[name].get_default(call_default_factory=True)
        and str(getattr(task, name)) != protocol.own_settings.get(name)
    ]
    if changed:
        raise ConfigError(
            f"--harness lm-eval with {' and '.join(f'task.{name}' for name in sorted(changed))}",
            allowed="settings that choose examples, and those of the section harness: lm-eval has prompts,"
            " stop strings and filters of its own",
            next_step="leave them out, or leave --harness out",
        )
    found = _shown_settings(task)
    for name, value in found.items():
        named = getattr(settings, name)
        if named not in (None, value):
            raise ConfigError(
                f"task.{name}={value} and harness.{name}={named} with --harness lm-eval",
                allowed="one of them",
                next_step=f"remove task.{name}: the harness asks",
            )
    return settings.model_copy(update=found)


def _refuse_unheard(asking: Asking) -> None:
    """Refuse settings that the harness would not hear of."""
    spec = asking.spec
    sections = {"model": ModelSpec(), "engine": EngineSpec(), "placement": PlacementSpec()}
    changed = {
        f"{section}.{name}": getattr(getattr(spec, section), name)
        for section, default in sections.items()
        for name in type(default).model_fields
        if name not in _OF_ASKING[section] and getattr(getattr(spec, section), name) != getattr(default, name)
    }
    default_sampling = Sampling(**SamplingSpec().model_dump())
    changed |= {
        f"sampling.{name}": getattr(asking.sampling, name)
        for name in SamplingSpec.model_fields
        if getattr(asking.sampling, name) != getattr(default_sampling, name)
    }
    changed |= {"seed": spec.seed} if spec.seed else {}
    if spec.model.prompt_format == "base":
        # What lm-eval does by itself; with its chat template it is told otherwise.
        changed.pop("model.prompt_format", None)
    if changed:
        raise ConfigError(
            f"--harness lm-eval with {' and '.join(f'{k}={show_value(v)}' for k, v in changed.items())}",
            allowed="model.dtype, engine.python, placement.threads and the section harness, which has seed,"
            " gen_kwargs, chat_template and more",
            next_step="say it there, or leave --harness out",
        )
