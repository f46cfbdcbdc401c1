"""Evaluating a model on this machine, judging kept replies again, evaluating by a foreign harness.

Everything is checked before the model is loaded: the tasks' examples, the settings, and what is in the
folders already. The same command again goes on where a killed one stopped; where nothing is left to
generate, no model is loaded at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path

from strop.errors import ConfigError, StoreError
from strop.evaluate import (
    EvalResult,
    EvalSettings,
    PlannedCanary,
    PlannedEvaluation,
    Rescored,
    ShardFolder,
    plan_canary,
    plan_evaluation,
    read_result,
    require_baseline,
    rescore,
    result_name,
    run_evaluation,
    write_result,
)
from strop.evaluate.accuracy import refuse_trained
from strop.evaluate.harness import (
    LM_EVAL,
    HarnessJob,
    HarnessResult,
    find_protocol,
    refuse_small_model,
    refuse_unconfirmed_code,
    run_harness,
)
from strop.evaluate.shards import read_all_shards, read_plan, read_task_settings, refuse_other_plan
from strop.hardware import describe_machine
from strop.hardware.number_format import compute_device, settle_format
from strop.policy.footprint import read_model_size
from strop.record import RunDir
from strop.record.files import list_shards
from strop.rollout import Split
from strop.run.inference import (
    Asking,
    OpenedModel,
    hold_judge,
    read_asking,
    read_askings,
    read_trained_ids,
    serve_model,
)
from strop.spec import RunSpec, load_spec
from strop.spec.display import dotted, format_value, walk_values
from strop.spec.eval_file import EvalFile, read_eval_file
from strop.spec.sources import parse_override
from strop.spec.task import TaskSpec
from strop.store.python_environment import ensure_environment
from strop.tasks import build_task
from strop.tokenizer import Tokenizer

EVALS_ROOT = Path("evals")
"""Default folder of results and replies; names there hold the plan's digest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalWish:
    """What is wanted of an evaluation, beside task and sampling; as in `EvalSettings`."""

    num_examples: int | None = None
    num_samples: int | None = None
    pass_at: tuple[int, ...] = ()
    pass_threshold: float | None = None
    out_dir: Path | None = None
    """Folder of the results. None: `EVALS_ROOT`."""
    canary: Path | None = None
    """A result of this model that must come out again before anything is evaluated."""
    name: str | None = None
    """Of the evaluation, where a file describes it: the names of its results begin with it and a dot."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredResult:
    """A result and its file."""

    result: EvalResult
    path: Path


@dataclass(kw_only=True, slots=True)
class _Prepared:
    """An evaluation that was checked and whose folder is held."""

    asking: Asking
    planned: PlannedEvaluation
    folder: ShardFolder
    result_path: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class _Canary:
    """A baseline to repeat, and how it is asked."""

    asking: Asking
    planned: PlannedCanary


def evaluate_here(
    askings: Sequence[Asking], model: OpenedModel, wish: EvalWish, *, say: Callable[[str], None]
) -> list[StoredResult]:
    """Evaluate a model on tasks, one after another; each result is written when it is there.

    `say` gets a line for what is read from before and where results are.
    Raises: CheckRefused if examples called held-out were trained on, a folder holds another evaluation,
        or the canary does not come out as it was; ConfigError for settings that a task or the model
        cannot follow.
    """
    with ExitStack() as held:
        prepared = _prepare(askings, model, wish, held)
        canary = None if wish.canary is None else _prepare_canary(wish.canary, askings, model)
        return asyncio.run(_evaluate(prepared, canary, model, say))


def _prepare_canary(path: Path, askings: Sequence[Asking], model: OpenedModel) -> _Canary:
    """Plan to repeat a result, with the settings kept beside it or those that are asked for now."""
    baseline = read_result(path)
    kept = path.with_suffix("")
    if list_shards(kept):
        asking = read_kept_asking(kept)
    else:
        same = [asking for asking in askings if asking.spec.task.name == baseline.task]
        asking = (same or list(askings))[0]
    planned = plan_canary(
        baseline,
        task=build_task(asking.spec.task),
        tokenizer=Tokenizer.load(model.path),
        model_digest=model.digest,
        max_positions=read_model_size(model.path).max_positions,
    )
    return _Canary(asking=asking, planned=planned)


def _prepare(
    askings: Sequence[Asking], model: OpenedModel, wish: EvalWish, held: ExitStack
) -> list[_Prepared]:
    tokenizer = Tokenizer.load(model.path)
    max_positions = read_model_size(model.path).max_positions
    trained_ids = read_trained_ids(model.run_path)
    prepared = []
    for asking in askings:
        spec = asking.spec
        planned = plan_evaluation(
            task=build_task(spec.task),
            tokenizer=tokenizer,
            settings=EvalSettings(
                run_seed=spec.seed,
                step=model.step,
                split=asking.split,
                prompt_format=spec.model.prompt_format,
                num_examples=wish.num_examples,
                num_samples=wish.num_samples,
                sampling=asking.sampling,
                pass_at=wish.pass_at,
                pass_threshold=wish.pass_threshold,
                dtype=spec.model.dtype,
                dtype_reason=asking.dtype_reason,
            ),
            model_digest=model.digest,
            trained_ids=trained_ids,
            max_positions=max_positions,
        )
        name = result_name(planned.plan)
        if wish.name is not None:
            name = f"{wish.name}.{name}"
        if wish.out_dir is not None:
            result_path = wish.out_dir / name
        else:
            # In a folder that all evaluations share, the digest tells plans apart.
            result_path = EVALS_ROOT / f"{name.removesuffix('.json')}-{planned.plan.digest[:8]}.json"
        if result_path.exists():
            refuse_other_plan(result_path, read_result(result_path), planned.plan)
        # Beside the result and named like it, without '.json'.
        folder = ShardFolder(result_path.with_suffix(""), planned.plan, spec.task.model_dump(mode="json"))
        held.enter_context(folder)
        prepared.append(_Prepared(asking=asking, planned=planned, folder=folder, result_path=result_path))
    return prepared


def read_file_asking(file: EvalFile, run: RunSpec | None) -> Asking:
    """Return how a model is asked by an evaluation's file. `run`: whose model it is.

    Raises: ConfigError like `read_asking`, naming the file, and if the file is for another model.
    """
    words = file.words_for(run)
    try:
        return read_asking(file.task, words, Split.HELD_OUT)
    except ConfigError as error:
        raise ConfigError(f"{file.origin}: {error}") from error


def evaluate_by_file(
    path: Path, model: OpenedModel, *, out_dir: Path | None, say: Callable[[str], None]
) -> StoredResult:
    """Evaluate a model on held-out examples as a file says. Raises: like `evaluate_here`."""
    file = read_eval_file(path)
    run = None
    if model.run_path is not None:
        machine = describe_machine()
        facts = RunDir.open(model.run_path).state.facts
        run = load_spec(model.run_path / "spec.toml").spec
        # In the number format that it is trained in.
        run, _ = settle_format(run, machine, compute_device(machine), facts=facts)
    counts = file.counts
    wish = EvalWish(
        num_examples=counts.num_examples, num_samples=counts.num_samples, out_dir=out_dir, name=file.name
    )
    return evaluate_here([read_file_asking(file, run)], model, wish, say=say)[0]


async def _evaluate(
    prepared: Sequence[_Prepared], canary: _Canary | None, model: OpenedModel, say: Callable[[str], None]
) -> list[StoredResult]:
    stored = []
    async with AsyncExitStack() as stack:
        engine = None
        if any(one.folder.num_kept < one.planned.plan.num_examples for one in prepared):
            engine, _ = await stack.enter_async_context(serve_model(prepared[0].asking.spec, model))
        tokenizer = Tokenizer.load(model.path)
        if canary is not None and engine is None:
            say("the canary is not asked: every reply is kept from before, and nothing is generated")
        elif canary is not None and engine is not None:
            # Nothing is evaluated by an engine that does not repeat the baseline.
            task, expected = canary.planned.planned.task, canary.planned.baseline.greedy
            async with hold_judge(canary.asking.spec, task) as judge:
                measured = await require_baseline(canary.planned, engine, tokenizer, judge=judge)
            say(
                f"the canary came out: greedy accuracy of {task.name} is {measured.estimate:.1%}, within"
                f" {expected.low:.1%} to {expected.high:.1%}"
            )
        for one in prepared:
            plan, num_kept = one.planned.plan, one.folder.num_kept
            if num_kept:
                say(
                    f"{plan.full_name}: the replies to {num_kept} of {plan.num_examples} examples are kept"
                    f" from before in {one.folder.path}"
                )
            async with hold_judge(one.asking.spec, one.planned.task) as judge:
                result = await run_evaluation(one.planned, engine, tokenizer, judge=judge, folder=one.folder)
            write_result(result, one.result_path)
            say(f"{plan.full_name}: {one.result_path}")
            stored.append(StoredResult(result=result, path=one.result_path))
    return stored


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredRescored:
    """Replies judged anew, and the file of the new result."""

    rescored: Rescored
    path: Path


def find_kept(place: Path) -> list[Path]:
    """Return the folders of replies that a path means: a result, a shard, or a folder around them.

    Raises: StoreError if there is none.
    """
    if place.is_file():
        folder = place.with_suffix("") if place.suffix == ".json" else place.parent
        folders = [folder] if list_shards(folder) else []
    elif place.is_dir():
        candidates = [place, *(path for path in place.rglob("*") if path.is_dir())]
        folders = sorted(path for path in candidates if list_shards(path))
    else:
        folders = []
    if not folders:
        raise StoreError(
            f"{place} holds no replies of an evaluation",
            allowed="a result that `strop eval` wrote with its folder beside it, or a folder of such",
            next_step="evaluate a model with `strop eval`, whose replies are kept",
        )
    return folders


def rescore_kept(folder: Path, words: Sequence[str]) -> StoredRescored:
    """Judge the replies in a folder with the task that they answer, some of its settings changed.

    The result is written beside the old one, under a name with the new version of the task.
    Raises: StoreError if replies are missing; CorruptRecord if they are damaged; ConfigError for
        settings that the task lacks; CheckRefused if the examples are not the task's any more.
    """
    plan, rollouts = read_all_shards(folder)
    asking = read_kept_asking(folder, words)
    task = build_task(asking.spec.task)
    old_path = folder.with_name(f"{folder.name}.json")
    pass_at = tuple(read_result(old_path).pass_at_k) if old_path.exists() else ()

    async def judge_all() -> Rescored:
        async with hold_judge(asking.spec, task) as judge:
            return await rescore(plan, rollouts, task, judge=judge, pass_at=pass_at)

    rescored = asyncio.run(judge_all())
    path = folder.with_name(f"{folder.name}-rescored-{task.version[:8]}.json")
    write_result(rescored.result, path)
    return StoredRescored(rescored=rescored, path=path)


def read_kept_asking(folder: Path, words: Sequence[str] = ()) -> Asking:
    """Return how the replies in a folder were asked for, some settings of the task changed.

    Raises: CorruptRecord if the first shard is damaged; ConfigError for settings that the task lacks.
    """
    shard = list_shards(folder)[0]
    plan = read_plan(shard)
    settings = read_task_settings(shard)
    # Of a task of the user's the settings say where it is; the plan has the name of its class.
    name = str(settings.get("name", plan.task))
    changed = [word if word.startswith("task.") else f"task.{word}" for word in words]
    replaced = [parse_override(word)[0] for word in changed]
    kept = [
        f"{dotted(path)}={format_value(value)}"
        for path, value in walk_values(settings, ("task",))
        if path != ("task", "name") and not any(path[: len(new)] == new for new in replaced)
    ]
    return read_asking(name, kept + changed, Split(plan.split))


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

    `words` are settings of our tasks behind them, as `read_askings` takes them. `may_run_code`: the user
    accepts that the harness runs what the model wrote in no sandbox.
    Raises: ConfigError for what the pinned protocol does not take, and for code that was not confirmed;
        CheckRefused if the examples were trained on, or the model is too small; StoreError if the
        environment cannot be made; EngineError if the harness fails.
    """
    if split is not Split.HELD_OUT or wish.num_samples or wish.pass_at or wish.pass_threshold is not None:
        raise ConfigError(
            "--harness lm-eval with samples, pass@k, a threshold or the training split",
            allowed="its pinned protocol: greedy replies to held-out examples",
            next_step="leave them out, or leave --harness out",
        )
    if len(set(names)) < len(names):
        raise ConfigError(
            f"a task is named twice in {','.join(names)}",
            allowed="each task once",
            next_step="name it once: its result is one file",
        )
    protocols = [find_protocol(name) for name in names]
    for protocol in protocols:
        refuse_unconfirmed_code(protocol, is_confirmed=may_run_code)
    own_tasks = list(dict.fromkeys(protocol.own_task for protocol in protocols))
    askings = dict(zip(own_tasks, read_askings(own_tasks, words, split), strict=True))
    jobs = []
    trained_ids = read_trained_ids(model.run_path)
    for protocol in protocols:
        asking = askings[protocol.own_task]
        _refuse_prompting(asking.spec.task)
        task = build_task(asking.spec.task.model_copy(update=dict(protocol.own_settings)))
        refuse_trained(task, split, task.examples(split), trained_ids)
        jobs.append(
            HarnessJob(
                protocol=protocol,
                task=task,
                model_path=model.path,
                model_digest=model.digest,
                step=model.step,
                dtype=asking.spec.model.dtype,
                max_positions=read_model_size(model.path).max_positions,
                num_examples=wish.num_examples,
            )
        )
    for job in jobs:
        refuse_small_model(job)
    python = ensure_environment(LM_EVAL, say=say)
    out_dir = wish.out_dir or EVALS_ROOT / f"lm-eval-{model.digest[:8]}"
    return [run_harness(job, Path(out_dir), python=python) for job in jobs]


def _refuse_prompting(task: TaskSpec) -> None:
    """Refuse settings that the harness, which asks in its own words, would not hear of."""
    if task.prompting:
        raise ConfigError(
            f"--harness lm-eval with {' and '.join(f'task.{name}' for name in task.prompting)}",
            allowed="its pinned protocol, which has prompts and stop strings of its own",
            next_step="leave the settings out, or leave --harness out",
        )
