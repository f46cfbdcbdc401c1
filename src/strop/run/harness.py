"""Evaluate a model by lm-eval: its tasks, examples and engine are checked before a process is started."""

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
from strop.run.evaluation import EVALS_ROOT, EvalRequest
from strop.run.inference import OpenedModel, SamplingSetup, read_setup, read_setups, read_trained_ids
from strop.spec import EngineSpec, ModelSpec, PlacementSpec, SamplingSpec
from strop.spec.display import dotted, show_value
from strop.spec.harness import HarnessSpec
from strop.spec.reader import load_section
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
"""Task settings that choose examples, which hold for lm-eval too; the others say how strop prompts."""
_OF_SETUP = {"model": {"uri", "dtype"}, "engine": {"kind", "python"}, "placement": {"threads"}}
"""Settings of these sections that apply to lm-eval."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HarnessSetup:
    """The settings of an evaluation by lm-eval, checked without a model and without lm-eval."""

    settings: HarnessSpec
    shared: SamplingSetup
    """Model, engine and placement, the same for all tasks."""
    setups: Mapping[str, SamplingSetup]
    """By the name of strop's task that has the examples."""


def read_harness_setup(
    names: Sequence[str], words: Sequence[str], split: Split, request: EvalRequest, *, may_run_code: bool
) -> HarnessSetup:
    """Read the settings of an evaluation by lm-eval; the arguments are those of `evaluate_by_harness`.

    Raises: ConfigError for a setting without effect, and for code that was not confirmed.
    """
    if (
        split is not Split.HELD_OUT
        or request.num_samples
        or request.pass_at
        or request.pass_threshold is not None
    ):
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
    settings = load_section("harness", HarnessSpec, of_harness)
    words = [word for word in words if word not in of_harness]
    pinned = [PROTOCOLS[name] for name in names if name in PROTOCOLS]
    for protocol in pinned:
        refuse_unconfirmed_code(protocol, is_confirmed=may_run_code)
    own_tasks = list(dict.fromkeys(protocol.own_task for protocol in pinned))
    setups = dict(zip(own_tasks, read_setups(own_tasks, words, split), strict=True))
    if len(pinned) == len(names):
        shared = next(iter(setups.values()))
    else:
        # A placeholder task: none of its settings is used.
        shared = read_setup("arithmetic", [word for word in words if _is_shared(word, own_tasks)], split)
    for setup in [shared, *setups.values()]:
        _refuse_unused(setup)
    for protocol in pinned:
        change_protocol(protocol, _read_settings(settings, setups[protocol.own_task].spec.task, protocol))
    return HarnessSetup(settings=settings, shared=shared, setups=setups)


def evaluate_by_harness(
    names: Sequence[str],
    words: Sequence[str],
    split: Split,
    model: OpenedModel,
    request: EvalRequest,
    *,
    may_run_code: bool = False,
    say: Callable[[str], None],
) -> list[HarnessResult]:
    """Run lm-eval on tasks by its names for them; its Python environment is made on first use.

    `words` are settings of strop's tasks, as `read_setups` takes them, and of the section harness.
    `may_run_code`: the user accepts that lm-eval runs the model's code outside any sandbox.
    Returns no result for a part that is not the first.
    Raises: ConfigError for a setting without effect, and for code that was not confirmed; CheckRefused if
        the examples were trained on, or the model is too small; StoreError if the environment cannot be
        made; EngineError if lm-eval fails.
    """
    setup = read_harness_setup(names, words, split, request, may_run_code=may_run_code)
    served = {f"{section}.{name}" for section, names_of in _OF_SETUP.items() for name in names_of}
    own = sorted(served & {dotted(parse_override(word)[0]) for word in words})
    if own and model.url is not None:
        raise ConfigError(
            f"{', '.join(own)} with a running server",
            allowed="what the server was started with",
            next_step="leave it out, or start the server so",
        )
    jobs = _plan_jobs(names, setup, model, request, may_run_code=may_run_code)
    for job in jobs:
        if isinstance(job, HarnessJob):
            refuse_small_model(job)
    ensure_environment(LM_EVAL, say=say)
    out_dir = Path(request.out_dir or EVALS_ROOT / f"lm-eval-{model.digest[:8]}")
    part, num_parts = request.part
    results = []
    for job in jobs:
        say(f"{job.name}: by {job.engine.kind}, {job.engine.python}")
        is_shared = request.out_dir is None
        result = run_harness(job, out_dir, part=part, num_parts=num_parts, is_shared=is_shared, say=say)
        results += [] if result is None else [result]
    return results


def _is_shared(word: str, own_tasks: Sequence[str]) -> bool:
    """Whether a word is for all tasks; `read_setup` refuses one that is for no task of strop's."""
    head = word.partition("=")[0].partition(".")[0]
    return head not in own_tasks and (not own_tasks or head in {"seed", "model", "engine", "placement"})


def _plan_jobs(
    names: Sequence[str], setup: HarnessSetup, model: OpenedModel, request: EvalRequest, *, may_run_code: bool
) -> list[HarnessJob | FreeJob]:
    trained_ids = read_trained_ids(model.run_path)
    harness, spec = setup.settings, setup.shared.spec
    if spec.engine.kind == "vllm":
        # engine.python needs engine.kind = 'vllm', so both settings may name the engine.
        if harness.engine == "hf":
            raise ConfigError(
                "engine.kind='vllm' with harness.engine='hf'",
                allowed="one of them",
                next_step="remove one: the harness asks, and harness.engine says by whom",
            )
        harness = harness.model_copy(update={"engine": "vllm"} if model.url is None else {})
    engine = choose_engine(harness, spec.engine.python, url=model.url, served_name=model.served_name)
    max_positions = read_model_size(model.path).max_positions
    max_positions = min(harness.max_model_tokens or max_positions, max_positions)
    if model.url is not None:
        # lm-eval leaves one position of a server unused.
        max_positions = min(max_positions, engine.served_tokens or max_positions) - 1
    common: dict[str, Any] = {
        "model_path": model.path,
        "model_digest": model.digest,
        "step": model.step,
        "dtype": spec.model.dtype if model.url is None else None,
        "max_positions": max_positions,
        "num_examples": request.num_examples,
        "engine": engine,
        "threads": spec.placement.threads,
        "file_name": request.name,
    }
    jobs: list[HarnessJob | FreeJob] = []
    for name in names:
        if name not in PROTOCOLS:
            jobs.append(FreeJob(name=name, may_run_code=may_run_code, settings=harness, **common))
            continue
        section = setup.setups[PROTOCOLS[name].own_task].spec.task
        settings = _read_settings(harness, section, PROTOCOLS[name])
        protocol = change_protocol(PROTOCOLS[name], settings)
        # lm-eval builds the prompts, so strop's shots and budget are reset.
        unset = {key: None if key == "max_reply_tokens" else 0 for key in _shown_settings(section)}
        task = build_task(section.model_copy(update={**unset, **protocol.own_settings}))
        refuse_trained(task, Split.HELD_OUT, task.examples(Split.HELD_OUT), trained_ids)
        jobs.append(HarnessJob(protocol=protocol, task=task, settings=settings, **common))
    return jobs


def _shown_settings(task: TaskSpec) -> dict[str, int]:
    """Return the number of shots and the reply limit, as far as a task's settings have them."""
    values = {name: getattr(task, name, None) for name in ("num_few_shot", "max_reply_tokens")}
    return {name: value for name, value in values.items() if value}


def _read_settings(settings: HarnessSpec, task: TaskSpec, protocol: HarnessProtocol) -> HarnessSpec:
    """Return the section harness with the shots and the reply limit that were set in section task.

    Raises: ConfigError if both sections set one and differ, and for a setting without effect.
    """
    fields = type(task).model_fields
    used = {*_OF_DATA, "num_few_shot", "max_reply_tokens"} - set(protocol.own_settings)
    changed = [
        name
        for name in task.model_fields_set
        if name not in used
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
    shown = _shown_settings(task)
    for name, value in shown.items():
        other = getattr(settings, name)
        if other not in (None, value):
            raise ConfigError(
                f"task.{name}={value} and harness.{name}={other} with --harness lm-eval",
                allowed="one of them",
                next_step=f"remove task.{name}: the harness asks",
            )
    return settings.model_copy(update=shown)


def _refuse_unused(setup: SamplingSetup) -> None:
    """Refuse settings that have no effect on lm-eval."""
    spec = setup.spec
    sections = {"model": ModelSpec(), "engine": EngineSpec(), "placement": PlacementSpec()}
    changed = {
        f"{section}.{name}": getattr(getattr(spec, section), name)
        for section, default in sections.items()
        for name in type(default).model_fields
        if name not in _OF_SETUP[section] and getattr(getattr(spec, section), name) != getattr(default, name)
    }
    default_sampling = Sampling(**SamplingSpec().model_dump())
    changed |= {
        f"sampling.{name}": getattr(setup.sampling, name)
        for name in SamplingSpec.model_fields
        if getattr(setup.sampling, name) != getattr(default_sampling, name)
    }
    changed |= {"seed": spec.seed} if spec.seed else {}
    if spec.model.prompt_format == "base":
        # lm-eval's default; harness.chat_template changes it.
        changed.pop("model.prompt_format", None)
    if changed:
        raise ConfigError(
            f"--harness lm-eval with {' and '.join(f'{k}={show_value(v)}' for k, v in changed.items())}",
            allowed="model.dtype, engine.python, placement.threads and the section harness, which has seed,"
            " gen_kwargs, chat_template and more",
            next_step="say it there, or leave --harness out",
        )
