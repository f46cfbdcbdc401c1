"""Evaluate a model on this machine, and judge kept replies again.

Examples, settings and existing folders are checked before the model is loaded. The same command run again
continues a killed evaluation; if every reply is kept, no model is loaded.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from strop.engine import Engine
from strop.errors import ConfigError, StoreError
from strop.evaluate import (
    EvalResult,
    EvalSettings,
    PlannedEvaluation,
    ShardFolder,
    attempt_share,
    plan_evaluation,
    read_result,
    rescore,
    result_name,
    run_evaluation,
    write_result,
)
from strop.evaluate.shards import read_all_shards, read_plan, refuse_other_plan
from strop.hardware import describe_machine
from strop.hardware.number_format import compute_device, settle_format
from strop.policy.footprint import read_model_size
from strop.record import RunDir
from strop.record.files import list_shards
from strop.rollout import Rollout, Split
from strop.run.inference import (
    OpenedModel,
    SamplingSetup,
    hold_judge,
    read_setup,
    read_trained_ids,
    serve_model,
)
from strop.run.resuming import DATE_FACT
from strop.spec import RunSpec, load_spec
from strop.spec.display import dotted, format_value, walk_values
from strop.spec.eval_file import EvalFile
from strop.spec.sources import parse_override
from strop.tasks import build_task
from strop.tokenizer import Tokenizer, dated

TELL_EVERY_S = 10.0
EVALS_ROOT = Path("evals")
"""Default folder of results and replies; names there hold the plan's digest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalRequest:
    """The options of an evaluation beside task and sampling; see `EvalSettings`."""

    num_examples: int | None = None
    num_samples: int | None = None
    pass_at: tuple[int, ...] = ()
    out_dir: Path | None = None
    """Folder of the results. None: `EVALS_ROOT`."""
    part: tuple[int, int] = (0, 1)
    """Index of the share of the examples to attempt, and the number of shares."""
    name: str | None = None
    """Name of an evaluation by a file: the names of its results begin with it and a dot."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredResult:
    """A result and its file."""

    result: EvalResult
    path: Path


@dataclass(kw_only=True, slots=True)
class _Prepared:
    """A checked evaluation, with its folder locked."""

    setup: SamplingSetup
    planned: PlannedEvaluation
    folder: ShardFolder
    result_path: Path


def evaluate_here(
    setups: Sequence[SamplingSetup], model: OpenedModel, request: EvalRequest, *, say: Callable[[str], None]
) -> list[StoredResult]:
    """Evaluate a model on tasks, one after another; each result is written as soon as it is known.

    One of several parts keeps the replies to its share and returns no result; when all parts are done, the
    same call without a part makes the results. `say` gets lines about kept replies and written results.
    Raises: CheckRefused if held-out examples were trained on, or a folder holds another evaluation;
        ConfigError for settings that a task or the model does not support.
    """
    with ExitStack() as held:
        prepared = _prepare(setups, model, request, held)
        return asyncio.run(_evaluate(prepared, model, say, request.part))


def _prepare(
    setups: Sequence[SamplingSetup], model: OpenedModel, request: EvalRequest, held: ExitStack
) -> list[_Prepared]:
    tokenizer = Tokenizer.load(model.path)
    max_positions = read_model_size(model.path).max_positions
    trained_ids = read_trained_ids(model.run_path)
    facts = {} if model.run_path is None else RunDir.open(model.run_path).state.facts
    run_date = facts.get(DATE_FACT)
    prepared = []
    for setup in setups:
        spec = setup.spec
        plan = partial(
            plan_evaluation,
            task=build_task(spec.task),
            tokenizer=tokenizer,
            settings=EvalSettings(
                run_seed=spec.seed,
                step=model.step,
                split=setup.split,
                prompt_format=spec.model.prompt_format,
                num_examples=request.num_examples,
                num_samples=request.num_samples,
                sampling=setup.sampling,
                pass_at=request.pass_at,
                dtype=spec.model.dtype,
            ),
            model_digest=model.digest,
            trained_ids=trained_ids,
            max_positions=max_positions,
        )
        with dated(run_date):
            planned = plan()
        name = result_name(planned.plan)
        if request.name is not None:
            name = f"{request.name}.{name}"
        if request.out_dir is not None:
            result_path = request.out_dir / name
        else:
            # The digest tells plans apart in the folder that all evaluations share.
            result_path = EVALS_ROOT / f"{name.removesuffix('.json')}-{planned.plan.digest[:8]}.json"
        # One date for the life of an evaluation: that of what was begun.
        shards = list_shards(result_path.with_suffix(""))
        begun = read_plan(shards[0])[0] if shards else planned.plan
        old = read_result(result_path) if result_path.exists() else None
        if (date := (old or begun).date) not in (None, planned.plan.date):
            with dated(date):
                planned = plan()
        if old is not None:
            refuse_other_plan(result_path, old, planned.plan)
        # Beside the result and named like it, without '.json'.
        settings = spec.task.model_dump(mode="json")
        folder = ShardFolder(result_path.with_suffix(""), planned.plan, settings, part=request.part)
        held.enter_context(folder)
        prepared.append(_Prepared(setup=setup, planned=planned, folder=folder, result_path=result_path))
    return prepared


def read_file_setup(file: EvalFile, run: RunSpec | None, task: str = "") -> SamplingSetup:
    """Return the settings of one task of an evaluation's file; the first task by default.

    `run`: the run that trained the model.
    Raises: ConfigError like `read_setup`, naming the file, and if the file is for another model.
    """
    if file.is_by_harness:
        raise ConfigError(
            f"{file.origin} with harness.tasks, where a run's checkpoints are evaluated as they appear",
            allowed="strop's own tasks there; lm-eval of a checkpoint, or as a job of its own",
            next_step="`strop submit` the file with model.uri = the run, once it is there",
        )
    task = task or file.tasks[0]
    words = file.words_for(run, task)
    try:
        return read_setup(task, words, Split.HELD_OUT)
    except ConfigError as error:
        raise ConfigError(f"{file.origin}: {error}") from error


def read_run_of(model: OpenedModel) -> RunSpec | None:
    """Return the run that trained a model, in the number format of the training; None without a run."""
    if model.run_path is None:
        return None
    machine = describe_machine()
    facts = RunDir.open(model.run_path).state.facts
    run = load_spec(model.run_path / "spec.toml").spec
    run, _ = settle_format(run, machine, compute_device(machine), facts=facts)
    return run


async def _evaluate(
    prepared: Sequence[_Prepared],
    model: OpenedModel,
    say: Callable[[str], None],
    part: tuple[int, int],
) -> list[StoredResult]:
    stored = []
    async with AsyncExitStack() as stack:
        engine = None
        if part != (0, 1) or any(item.folder.num_kept < item.planned.plan.num_examples for item in prepared):
            engine, _ = await stack.enter_async_context(serve_model(prepared[0].setup.spec, model))
        tokenizer = Tokenizer.load(model.path)
        for item in prepared:
            result = await _attempt(item, engine, tokenizer, say, part)
            if result is not None:
                write_result(result, item.result_path)
                say(f"{item.planned.plan.full_name}: {item.result_path}")
                stored.append(StoredResult(result=result, path=item.result_path))
    return stored


async def _attempt(
    prepared: _Prepared,
    engine: Engine | None,
    tokenizer: Tokenizer,
    say: Callable[[str], None],
    part: tuple[int, int],
) -> EvalResult | None:
    """Attempt the missing examples of one evaluation; return its result, None for a share."""
    planned, folder = prepared.planned, prepared.folder
    plan, num_kept = planned.plan, folder.num_kept
    if num_kept:
        say(
            f"{plan.full_name}: the replies to {num_kept} of {plan.num_examples} examples are kept"
            f" from before in {folder.path}"
        )
    tell = tell_progress(plan.full_name, plan.num_examples - num_kept, say)
    async with hold_judge(prepared.setup.spec.task, planned.task) as judge:
        with dated(plan.date):
            if part == (0, 1):
                return await run_evaluation(
                    planned, engine, tokenizer, judge=judge, folder=folder, on_example=tell
                )
            await attempt_share(
                planned, engine, tokenizer, judge=judge, folder=folder, part=part, on_example=tell
            )
    return None


def tell_progress(name: str, num_left: int, say: Callable[[str], None]) -> Callable[[], None]:
    """Return a callback for each finished example, which reports the progress every `TELL_EVERY_S`.

    The lines in a job's log also keep schedulers from ending it as stalled.
    """
    done, told_at = 0, time.monotonic()

    def tell() -> None:
        nonlocal done, told_at
        done += 1
        if time.monotonic() - told_at >= TELL_EVERY_S:
            told_at = time.monotonic()
            say(f"{name}: {done} examples are asked here, of {num_left} that were left")

    return tell


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredRescored:
    """A result from judging kept replies again, its file, and the rollouts whose verdict changed."""

    result: EvalResult
    changed: Sequence[tuple[Rollout, Rollout]]
    path: Path


def find_kept(place: Path) -> list[Path]:
    """Return the folders of kept replies for a path: a result, a shard, or a folder that contains them.

    Raises: StoreError if there is none.
    """
    candidates: list[Path] = []
    if place.is_file():
        candidates = [place.with_suffix("") if place.suffix == ".json" else place.parent]
    elif place.is_dir():
        candidates = [place, *(path for path in place.rglob("*") if path.is_dir())]
    folders = sorted(path for path in candidates if list_shards(path))
    if not folders:
        raise StoreError(
            f"{place} holds no replies of an evaluation",
            allowed="a result that `strop eval` wrote with its folder beside it, or a folder of such",
            next_step="evaluate a model with `strop eval`, whose replies are kept",
        )
    return folders


def rescore_kept(folder: Path, words: Sequence[str]) -> StoredRescored:
    """Judge the kept replies of a folder again by their task; `words` change some of its settings.

    The result is written beside the old one; its name contains the new version of the task.
    Raises: StoreError if replies are missing; CorruptRecord if they are damaged; ConfigError for
        settings that the task lacks; CheckRefused if the task no longer has these examples.
    """
    plan, rollouts = read_all_shards(folder)
    setup = read_kept_setup(folder, words)
    task = build_task(setup.spec.task)
    old_path = folder.with_name(f"{folder.name}.json")
    pass_at = tuple(read_result(old_path).pass_at_k) if old_path.exists() else ()

    async def judge_all() -> tuple[EvalResult, list[tuple[Rollout, Rollout]]]:
        async with hold_judge(setup.spec.task, task) as judge:
            return await rescore(plan, rollouts, task, judge=judge, pass_at=pass_at)

    result, changed = asyncio.run(judge_all())
    path = folder.with_name(f"{folder.name}-rescored-{task.version[:8]}.json")
    write_result(result, path)
    return StoredRescored(result=result, changed=changed, path=path)


def read_kept_setup(folder: Path, words: Sequence[str] = ()) -> SamplingSetup:
    """Return the settings that the replies of a folder were sampled with; `words` change some of the task's.

    Raises: CorruptRecord if the first shard is damaged; ConfigError for settings that the task lacks.
    """
    plan, settings = read_plan(list_shards(folder)[0])
    # For a user's task the settings have its FILE.py:NAME; the plan has the name of its class only.
    name = str(settings.get("name", plan.task))
    changed = [word if word.startswith("task.") else f"task.{word}" for word in words]
    replaced = [parse_override(word)[0] for word in changed]
    kept = [
        f"{dotted(path)}={format_value(value)}"
        for path, value in walk_values(settings, ("task",))
        if path != ("task", "name") and not any(path[: len(prefix)] == prefix for prefix in replaced)
    ]
    return read_setup(name, kept + changed, Split(plan.split))
