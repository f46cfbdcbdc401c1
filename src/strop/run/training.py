"""Running a run file on this machine: find or make its directory, compose its parts, train.

The same command again continues a run that did not finish: same name, same spec, newest first.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from strop.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    RunStopped,
    StropError,
)
from strop.evaluate import (
    EvalResult,
    EvalSettings,
    compare_results,
    plan_evaluation,
    read_result,
    run_evaluation,
    write_result,
)
from strop.evaluate.shards import ShardFolder
from strop.hardware import describe_machine, importing, read_calibration, require_writable, tune_process
from strop.hardware.number_format import (
    AUTO,
    DTYPE_FACT,
    REASON_FACT,
    NumberFormat,
    compute_device,
    settle_format,
)
from strop.hardware.ports import count_nodes
from strop.io import write_bytes_atomically
from strop.io.notices import listen
from strop.io.variables import log_from, log_level_of
from strop.kernels import kernel_status
from strop.plan.planning import predict_run
from strop.plan.roles import split_memory
from strop.policy.footprint import read_model_size
from strop.record import Event, EventKind, RunDir
from strop.record.parts import PARTS_FACT, list_changes
from strop.record.prediction import Prediction, write_prediction
from strop.record.run_dir import TOKENIZER_NAME
from strop.rollout import Sampling, Split
from strop.run.changes import Changes, find_changes
from strop.run.claim import claim_machine, list_parts, open_run
from strop.run.mirroring import Mirroring, probe_mirror
from strop.spec import ResolvedSpec, RunSpec
from strop.spec.judge import role_judges
from strop.spec.layout import EVAL, settle_layout
from strop.store import ModelHandle, follow_store, get_model
from strop.tasks import Task, build_task, task_builder
from strop.tasks.failures import add_traces
from strop.tasks.judging import Judge, open_judge
from strop.tasks.traits import list_names, require_written
from strop.train.data.offline import read_demonstrations
from strop.train.observer import EvalSummary, Observer

if TYPE_CHECKING:
    from strop.cluster import ModelSource, Roles
    from strop.train.data.offline import Demonstrations
    from strop.train.data.preferences import Preferences


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainOutcome:
    """How a run ended."""

    run_path: Path
    before: EvalResult | None
    after: EvalResult | None
    changes: Changes | None = None
    """What became of single examples; None without two evaluations that can be compared."""


def train_here(
    resolved: ResolvedSpec,
    observer: Observer,
    *,
    is_new: bool = False,
    on_run: Callable[[RunDir], None],
    on_trained: Callable[[TrainOutcome], None] = lambda outcome: None,
) -> TrainOutcome:
    """Train a run on this machine, from its last checkpoint if it has one.

    `is_new` starts a new run even where an unfinished one could go on. `on_run` gets the run
    directory once it is locked, before anything heavy happens; `on_trained` the outcome, while what it
    writes there still reaches the run's mirror.

    Raises: CheckRefused if the directory is in use, finished or not writable, if others have the GPUs,
        or the gate refuses;
        Interrupted after a signal; StropError for everything else that strop refuses.
    """
    # Inherited by every child: one that hangs can be asked where.
    os.environ.setdefault("PYTHONFAULTHANDLER", "1")
    spec = resolved.spec
    # Before a model is fetched: that may take an hour.
    require_writable(Path(spec.output.dir or spec.output.root), "the run's directory")
    with follow_store(spec.store):
        probe_mirror(spec.store)
        return _train_resolved(resolved, observer, is_new=is_new, on_run=on_run, on_trained=on_trained)


def _train_resolved(
    resolved: ResolvedSpec,
    observer: Observer,
    *,
    is_new: bool,
    on_run: Callable[[RunDir], None],
    on_trained: Callable[[TrainOutcome], None],
) -> TrainOutcome:
    log_from(log_level_of(resolved.spec.output.log_level, "train"))
    threads = set_threads(resolved.spec.placement.threads)
    # A Ray cluster that is running has nodes that are not this job's.
    is_attached = resolved.spec.ray.address is not None
    laid_out = settle_layout(resolved.spec, None if is_attached else count_nodes(os.environ))
    told: list[str] = []
    with listen(told.append):
        model = get_model(resolved.spec.model.uri)
        spec, number_format = _settle(laid_out)
        task = build_task(spec.task)
        require_written(task)
        demonstrations = read_demonstrations(spec, task, model.path)
        preferences = _read_preferences(spec, task, model)
        # Before anything is started: a reference or teacher may have to be fetched, too.
        frozen = {role: get_model(named) for role, named in spec.frozen_models.items() if named is not None}
        judges = {one.judge_model: get_model(one.judge_model) for one in role_judges(spec.task)}
        task_version = task.version
    facts: dict[str, object] = {
        "model_uri": spec.model.uri,
        "model_digest": model.digest,
        "model_source": model.source,
        "task": task.name,
        "task_version": task_version,
        "num_threads": threads,
        DTYPE_FACT: number_format.dtype,
        REASON_FACT: number_format.reason,
    }
    given = {"demonstrations": demonstrations, "preferences": preferences}
    found = {name: data for name, data in given.items() if data is not None}
    models = {"model": model, **frozen, **{f"judge {name}": one for name, one in judges.items()}}
    facts[PARTS_FACT] = list_parts(spec, task, models, {name: data.digest for name, data in found.items()})
    run_dir = open_run(resolved, facts, is_new=is_new)
    with run_dir:
        on_run(run_dir)
        if run_dir.state.num_attempts:
            spec, number_format = _settle(laid_out, run_dir.state.facts)
        attempt = str(run_dir.state.num_attempts + 1)
        gpus = {part: n for part, n in spec.layout.nodes[0].gpus.items() if part != EVAL}
        with (
            claim_machine(
                run_dir.path,
                attempt,
                need_bytes=_estimate_need(spec, task, model, frozen | judges),
                wanted={"train": 0} if is_attached else gpus,
            ) as claim,
            Mirroring(spec.store, run_dir, observer) as mirroring,
        ):
            with _note_attempt(run_dir, mirroring, claim.devices):
                mirroring.begin()
                notices = (*claim.notices, *told, *filter(None, [_kernel_notice()]))
                notices += (*(data.describe() for data in found.values()), *_list_software_changes(run_dir))
                if resolved.spec.model.dtype == AUTO or number_format.cost is not None:
                    notices += (f"model.dtype: {number_format}",)
                for notice in (*resolved.notices, *notices):
                    event = Event(kind=EventKind.NOTICE, step=0, cause="notice", detail=notice)
                    run_dir.events.append(event)
                    observer.on_event(event)
                prediction = predict_run(spec, task, model.path, demonstrations or preferences)
                if prediction is not None:
                    write_prediction(run_dir.path, prediction)
                outcome = asyncio.run(
                    _train(spec, task, (demonstrations, preferences), model, run_dir, mirroring, prediction)
                )
            on_trained(outcome)
            return outcome


def _read_preferences(spec: RunSpec, task: Task, model: ModelHandle) -> Preferences | None:
    """Read the run's pairs, None where it has none."""
    if spec.train.terms != "dpo":
        return None
    # Here: packing them takes torch, whose threads are fixed by now.
    from strop.train.data.preferences import read_preferences

    return read_preferences(spec, task, model.path)


def _estimate_need(spec: RunSpec, task: Task, model: ModelHandle, frozen: Mapping[str, ModelHandle]) -> int:
    """Return the bytes that learner and engine hold at their peak, as the plan counts them."""
    parts = split_memory(
        spec,
        read_model_size(model.path),
        task.limits.max_reply_tokens,
        frozen={role: read_model_size(one.path) for role, one in frozen.items()},
    )
    return int(sum(part.amount for part in parts))


@contextmanager
def _note_attempt(run_dir: RunDir, observer: Observer, devices: Mapping[str, object]) -> Iterator[None]:
    """Begin an attempt, and note its end with the cause, whatever ends it."""
    kernels = kernel_status().describe()
    attempt = run_dir.begin_attempt(
        {"machine": describe_machine().cpu_name, "kernels": kernels, "devices": devices}
    )

    def note_end(kind: object, error: BaseException | None, traceback: object) -> None:
        cause = "done" if error is None else type(error).__name__
        exit_code = error.exit_code if isinstance(error, StropError) else EXIT_FAILED
        steps = [int(line["step"]) for line in run_dir.metrics.read()]
        run_dir.end_attempt(
            attempt,
            cause=cause,
            exit_code=EXIT_DONE if error is None else exit_code,
            step=max(steps, default=0),
        )
        observer.on_end(cause=cause)

    with ExitStack() as stack:
        stack.push(note_end)
        yield


def _settle(spec: RunSpec, facts: Mapping[str, object] | None = None) -> tuple[RunSpec, NumberFormat]:
    """Choose the number format for this process's device; `facts` are those of a run that goes on."""
    machine = describe_machine()
    return settle_format(spec, machine, compute_device(machine), calibration=read_calibration(), facts=facts)


def _kernel_notice() -> str | None:
    """Say that the C kernels are missing, where a run would use them."""
    status = kernel_status()
    if status.path is not None or describe_machine().gpus:
        return None
    return f"the kernels are {status.describe()}; install one and make sure `cc` or $CC finds it"


def _list_software_changes(run_dir: RunDir) -> list[str]:
    """Say with which other software a run goes on: allowed, since a fix may need it, and announced."""
    try:
        changes = list_changes((run_dir.path / "env.txt").read_text())
    except OSError:
        return []
    return [f"the run goes on with other software, which may round otherwise: {one}" for one in changes]


def set_threads(wanted: int | None) -> int:
    """Fix the number of compute threads, and how memory is kept. Returns the number.

    None means the physical cores that this process may use.
    """
    tune_process()  # Before torch is imported.
    with importing():
        import torch

    threads = wanted or max(describe_machine().num_physical_cores, 1)
    torch.set_num_threads(threads)
    return threads


async def _train(
    spec: RunSpec,
    task: Task,
    given: tuple[Demonstrations | None, Preferences | None],
    model: ModelHandle,
    run_dir: RunDir,
    observer: Observer,
    prediction: Prediction | None,
) -> TrainOutcome:
    """Start the roles, train, and stop them whatever happens."""
    with importing():
        from strop.cluster import ModelSource
        from strop.cluster.build import build_placement, with_frozen
        from strop.cluster.servers import JudgeRoles, RuntimeRole
        from strop.environments.printed import forget_prints, keep_prints
        from strop.train.loop import TrainInput, TrainLoop

    source = ModelSource(path=model.path, digest=model.digest, uri=model.uri)
    # What was sampled can be read token by token where the model is not.
    kept, tokenizer = run_dir.path / TOKENIZER_NAME, model.path / TOKENIZER_NAME
    if tokenizer.is_file() and not kept.exists():
        write_bytes_atomically(kept, tokenizer.read_bytes())
    named = {one.judge_model: _fetch(one.judge_model) for one in role_judges(spec.task)}
    servers_dir = run_dir.path / "roles" / "servers"
    judges = JudgeRoles(spec, source, named, servers_dir)
    runtime = RuntimeRole(spec.runtime, run_dir.path, servers_dir)
    placement = build_placement(spec, source, run_dir.path / "roles")
    judge = open_judge(task, task_builder(spec.task))
    keep_prints(run_dir.path / "latest" / "environments.log")
    try:
        # First: the judging processes inherit the addresses.
        await runtime.start()
        await judges.start()
        roles = await with_frozen(await placement.start(), spec, source, _fetch)
        evaluator = Evaluation(spec, task, judge, roles, model.digest, run_dir)
        loop = TrainLoop(
            TrainInput(
                spec=spec,
                task=task,
                roles=roles,
                run_dir=run_dir,
                model_dir=model.path,
                observer=observer,
                evaluate=evaluator,
                judge=judge,
                demonstrations=given[0],
                preferences=given[1],
                prediction=prediction,
            )
        )
        await runtime.guard(judges.guard(loop.run()))
    finally:
        await placement.stop()
        await judge.close()
        await judges.stop()
        await runtime.stop()
        forget_prints()
    # From the record: an earlier attempt may have made them.
    paths = [run_dir.eval_path(task.name, step) for step in (0, spec.train.steps)]
    before, after = map(_find_result, paths)
    changes = None
    if before is not None and after is not None:
        changes = find_changes(task, before, after, (kept_at(paths[0]), kept_at(paths[1])))
    return TrainOutcome(run_path=run_dir.path, before=before, after=after, changes=changes)


def _fetch(uri: str) -> ModelSource:
    """Fetch a reference or a teacher like the run's own model."""
    from strop.cluster import ModelSource

    model = get_model(uri)
    return ModelSource(path=model.path, digest=model.digest, uri=uri)


def kept_at(result_path: Path) -> Path:
    """Return where the replies behind a result are kept: beside it, named like it."""
    return result_path.with_suffix("")


def _find_result(path: Path) -> EvalResult | None:
    return read_result(path) if path.exists() else None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Evaluates a run's policy on the held-out examples and records the result."""

    spec: RunSpec
    task: Task
    judge: Judge
    roles: Roles
    model_digest: str
    run_dir: RunDir

    async def __call__(self, step: int, on_progress: Callable[[], None]) -> EvalSummary:
        """Evaluate the weights after `step` steps."""
        spec = self.spec
        settings = EvalSettings(
            run_seed=spec.seed,
            step=step,
            split=Split.HELD_OUT,
            prompt_format=spec.model.prompt_format,
            num_examples=spec.eval.num_examples,
            num_samples=spec.eval.num_samples,
            sampling=Sampling(**spec.sampling.model_dump()),
            dtype=spec.model.dtype,
            dtype_reason=str(self.run_dir.state.facts.get(REASON_FACT)),
        )
        roles = self.roles
        planned = plan_evaluation(
            task=self.task,
            tokenizer=roles.tokenizer,
            settings=settings,
            # What `strop eval` calls the model before, and the checkpoint of this step.
            model_digest=self.model_digest if step == 0 else await roles.learner.weights_digest(),
            trained_ids=list_names(self.task, self.task.examples(Split.TRAIN)),
            max_positions=roles.learner.shape.max_positions,
        )
        path = self.run_dir.eval_path(self.task.name, step)
        # Of an attempt that was killed: what it kept is not gone on with, it is asked in a moment.
        shutil.rmtree(kept_at(path), ignore_errors=True)
        with ShardFolder(kept_at(path), planned.plan, spec.task.model_dump(mode="json")) as folder:
            result = await run_evaluation(
                planned,
                roles.engine,
                roles.tokenizer,
                judge=self.judge,
                folder=folder,
                on_example=on_progress,
            )
        write_result(result, path)
        if result.greedy.accuracy is None:
            stop = RunStopped(
                f"{result.verdict}: none of {result.greedy.num_rollouts} held-out replies at step {step}"
                " could be judged",
                allowed="an engine that answers and a task that can say right or wrong",
                next_step=f"read {path} and mend the task; the last checkpoint is intact",
            )
            add_traces(stop, result.causes)
            raise stop
        best = self._find_best(result)
        change = None if best is None else compare_results(best, result).greedy
        return EvalSummary(
            step=step,
            best_step=None if best is None or change is None else best.step,
            change=None if change is None else change.estimate,
            change_high=None if change is None else change.high,
            num_examples=result.num_examples,
            greedy_accuracy=result.greedy.accuracy,
            greedy_low=result.greedy.low,
            greedy_high=result.greedy.high,
            sampled_accuracy=result.sampled.accuracy if result.sampled is not None else None,
            invalid_cause=None if result.is_valid else result.verdict,
            causes=tuple(result.causes),
        )

    def _find_best(self, result: EvalResult) -> EvalResult | None:
        """Return the best earlier evaluation of the run that this one may be compared with."""
        found = map(read_result, self.run_dir.eval_path(self.task.name, 0).parent.glob("*.json"))
        earlier = sorted((one for one in found if one.step < result.step), key=lambda one: one.step)
        valid = [one for one in earlier if one.is_valid and one.protocol_digest == result.protocol_digest]
        if not valid or not result.is_valid:
            return None
        # The first of equals, which a rise of the reward has the longest way to go from.
        return max(valid, key=lambda one: one.greedy.accuracy or 0.0)
