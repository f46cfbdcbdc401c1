"""The training loop: examples, rollouts, credit, optimizer steps, publication of the weights, the record.

One step, in order: take the step's examples, attempt each several times, judge, assign credit over the
complete batch, add the terms of offline data, update the weights, publish them to the engine, record
everything, and checkpoint where one is due. A run on demonstrations alone (`train.terms = "sft"`) has no
rollouts; all else is the same. A record of step k on disk means that step k was trained; what was recorded
after the last checkpoint is cut off on resume and computed again, to the same values.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from strop.cluster import Roles
from strop.errors import EngineError, Interrupted, RunStopped
from strop.record import Event, EventKind, RunDir
from strop.record.events import ACCEPTED
from strop.record.parts import PARTS_FACT
from strop.record.prediction import Prediction
from strop.record.timeline import LEARNER
from strop.rollout import Group
from strop.spec.run import RunSpec
from strop.tasks import Task
from strop.tasks.judging import Judge
from strop.train.batch import TrainBatch, schedule_examples
from strop.train.data.offline import Demonstrations
from strop.train.data.preferences import Preferences
from strop.train.gate import pass_gate
from strop.train.gate_checks import GateCheck, GateInput
from strop.train.generation import (
    Batch,
    Collector,
    RolloutBuffer,
)
from strop.train.measure import (
    count_trained_tokens,
    measure_demonstrations,
    measure_groups,
    measure_memory,
    measure_pairs,
    measure_time,
    measure_update,
)
from strop.train.observer import Evaluator, Observer
from strop.train.publishing import Publishing
from strop.train.recording import (
    SampledStep,
    TrainerState,
    add_lanes,
    choose_checkpoint,
    load_checkpoint,
    load_waiting,
    save_checkpoint,
)
from strop.train.step import StepTerms, take_steps
from strop.train.watch.ending import Ending, StopFlag
from strop.train.watch.process import (
    DiskWatch,
    LoopLagWatch,
    Watchdog,
    full_collections_by_hand,
)
from strop.train.watch.trends import find_divergence
from strop.train.watch.tripwires import CauseLog, StepWatch, find_fate_leak, find_impossible_rollouts

_SIGN_OF_LIFE = "Is anyone there?"
"""A text to score: an engine that does so still answers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainInput:
    """The parts of a run that the caller has composed."""

    spec: RunSpec
    task: Task
    roles: Roles
    run_dir: RunDir
    model_dir: Path
    """Where the tokenizer's files come from for exports."""
    observer: Observer
    evaluate: Evaluator | None
    """None: no evaluation."""
    judge: Judge | None = None
    """None: replies are judged in this process."""
    demonstrations: Demonstrations | None = None
    preferences: Preferences | None = None
    prediction: Prediction | None = None
    """How long the run's steps should take; None: no estimate."""


class TrainLoop:
    """Trains one run to its end, from its last checkpoint on."""

    def __init__(self, parts: TrainInput) -> None:
        self._parts = parts
        self._spec = parts.spec
        self._roles = parts.roles
        self._run_dir = parts.run_dir
        self._timeline = parts.run_dir.timeline
        self._terms = StepTerms(
            spec=parts.spec,
            roles=parts.roles,
            task=parts.task,
            demonstrations=parts.demonstrations,
            preferences=parts.preferences,
        )
        self._schedule = schedule_examples(parts.spec, parts.task)
        self._judge = (parts.judge or Judge(parts.task)).with_own_clock()
        self._state = TrainerState(
            step=0,
            version=0,
            num_refused_in_a_row=0,
            num_threads=torch.get_num_threads(),
            made_of=parts.run_dir.state.facts.get(PARTS_FACT, {}) | self._terms.digest_offline_data(),
        )
        self._collector = Collector(
            parts.spec,
            parts.task,
            self._judge,
            parts.roles,
            on_group=lambda: self._watchdog.progress("generate"),
        )
        self._buffer: RolloutBuffer | None = None
        self._weights_dir: Path | None = None
        self._publishing = Publishing(parts.spec, parts.roles, self._event)
        self._end = Ending(parts.run_dir, self._publish_event)
        self._causes = CauseLog(self._publish_event)
        self._checks: list[GateCheck] = []
        self._watch = StepWatch(parts.spec, parts.task, parts.prediction)
        self._disk = DiskWatch.of_run(parts.spec, parts.run_dir, parts.model_dir)
        self._stop = StopFlag()
        # A learner that computes in the event loop blocks it by design.
        self._lag = LoopLagWatch(self._on_lag) if parts.roles.learner.is_async else None
        self._watchdog = Watchdog(
            parts.spec.tripwires.max_stall_s,
            self._on_stall,
            log_path=parts.run_dir.path / "latest" / "train.log",
        )

    async def run(self) -> None:
        """Train until every requested step is done.

        Raises: CheckRefused by the gate; Interrupted after a signal, with a checkpoint written;
            RunStopped by a tripwire; any error of a role, with the last checkpoint intact.
        """
        with self._stop, self._watchdog, self._lag or nullcontext(), full_collections_by_hand():
            # Back to the last checkpoint; what was recorded after it is cut off.
            latest, note = choose_checkpoint(self._run_dir)
            if latest is not None:
                step, path = latest
                # With adapters the base weights are still those of the model.
                self._weights_dir = path / "model" if self._spec.lora.rank is None else None
                now = self._state
                self._state = await load_checkpoint(
                    path, self._roles.learner, num_threads=now.num_threads, made_of=now.made_of
                )
                self._run_dir.truncate_after(step)
                self._open_buffer(load_waiting(path))
            else:
                self._run_dir.truncate_after(0)
                self._open_buffer([])
            if note:
                self._event(EventKind.RESUME, "start" if latest is None else "checkpoint", note)
            # From the record: earlier steps may be an earlier attempt's.
            self._watch.recall(self._run_dir.metrics.read())
            await self._publish()
            with self._timeline.span(LEARNER, "gate"):
                await self._pass_gate()
            await self._terms.prepare(self._run_dir.path)
            self._parts.observer.on_start(
                run=str(self._run_dir.path), first_step=self._state.step, num_steps=self._spec.train.steps
            )
            if self._state.step == 0:
                await self._evaluate()
            try:
                while self._state.step < self._spec.train.steps:
                    await self._stop_if_asked()
                    await self._step()
            finally:
                await self._publishing.close()
                if self._buffer is not None:
                    await self._buffer.close()
            self._give_notice()
            self._run_dir.mark_finished()

    def _open_buffer(self, waiting: Sequence[tuple[int, Group]]) -> None:
        if self._schedule is None:
            return
        self._buffer = self._collector.open_buffer(
            self._terms.algorithm,
            self._schedule,
            first_number=self._state.next_group,
            first_step=self._state.step,
        )
        self._buffer.restore(waiting)

    async def _publish(self) -> None:
        self._watchdog.progress("publish")
        await self._publishing.publish(self._state.step)

    async def _pass_gate(self) -> None:
        await self._publishing.await_proof()
        self._watchdog.progress("gate")
        parts = self._parts
        gate = GateInput(
            spec=parts.spec,
            task=parts.task,
            roles=parts.roles,
            model_dir=parts.model_dir,
            run_path=parts.run_dir.path,
            weights_dir=self._weights_dir,
            judge=parts.judge,
            demonstrations=parts.demonstrations,
            preferences=parts.preferences,
            dtype_reason=parts.run_dir.state.facts.get("dtype_reason"),
            on_causes=lambda causes: self._causes.note(self._state.step, causes),
        )
        self._checks = await pass_gate(gate)
        for check in self._checks:
            detail = check.detail if check.is_passed else f"{ACCEPTED}{check.detail}"
            self._event(EventKind.GATE, check.name, detail)
        self._give_notice()

    def _give_notice(self) -> None:
        """Repeat the gate's findings that every reader of the results must know."""
        for check in self._checks:
            if check.notice is not None:
                self._event(EventKind.NOTICE, check.name, check.notice)

    async def _step(self) -> None:
        """Do one step, from its examples to its checkpoint."""
        started_at = time.perf_counter()
        collected = await self._collect()
        groups = collected.groups if collected is not None else []
        num_attempted = self._causes.note_too_long(self._state.step, groups)
        self._end.on_all_failed(self._state.step, groups)
        await self._publishing.await_proof()
        collected_at = time.perf_counter()
        verify_s = min(self._judge.busy.take_s(), collected_at - started_at)
        self._watchdog.progress("learn")
        batch = await self._terms.credit(groups)
        demonstrations = self._terms.list_demonstrations(self._state.step)
        steps = await self._terms.build(self._state.step, batch, groups, demonstrations)
        if groups and not batch.credit.num_counted_tokens:
            self._event(EventKind.TRIPWIRE, "empty_step", "no rollout of the step could be trained on")
        update = await take_steps(
            self._roles.learner,
            steps,
            self._spec.train,
            self._state.step,
            on_refused=lambda error: self._event(EventKind.TRIPWIRE, "non_finite", str(error)),
        )
        learned_at = time.perf_counter()
        sampled, metrics = self._sum_up(collected, batch)
        # A step whose prompts are all too long is no sign of trouble: the gate has bounded their share.
        was_tried = num_attempted > 0 or bool(steps) or (collected is not None and collected.is_short)
        is_refused = was_tried and not update.steps
        self._state = replace(
            self._state,
            step=self._state.step + 1,
            version=self._roles.learner.version,
            next_group=0 if self._buffer is None else self._buffer.next_unconsumed,
            num_refused_in_a_row=self._state.num_refused_in_a_row + 1 if is_refused else 0,
        )
        if self._spec.train.deterministic and self._buffer is not None:
            await self._buffer.settle()
        await self._publish()
        synced_at = time.perf_counter()
        seconds = {
            "generate": collected_at - started_at - verify_s,
            "verify": verify_s,
            "learn": learned_at - collected_at,
            "sync": synced_at - learned_at,
        }
        for name, start, end in (
            ("wait", started_at, collected_at),
            ("learn", collected_at, learned_at),
            ("sync", learned_at, synced_at),
        ):
            self._timeline.add(LEARNER, name, start, end)
        add_lanes(self._timeline, self._collector, self._judge, collected, sampled.statuses)
        with self._timeline.span(LEARNER, "record"):
            sampled.write(self._run_dir, self._state.step)
        metrics |= measure_demonstrations(demonstrations) | measure_pairs(steps)
        train, is_stale = self._spec.train, metrics.get("staleness_max", 0.0) > 0.0
        metrics |= measure_update(update, is_mixed=train.has_rl and train.has_sft, is_stale=is_stale)
        step_s = time.perf_counter() - started_at
        metrics |= measure_time(seconds, step_s, count_trained_tokens(metrics))
        await self._close_step(metrics, groups)

    async def _collect(self) -> Batch | None:
        """Return the groups of the step, sampled now or ahead of it; None in a step without rollouts."""
        buffer, schedule = self._buffer, self._schedule
        if buffer is None or schedule is None or not self._terms.samples(self._state.step):
            return None
        self._watchdog.progress("generate")
        buffer.admit(self._publishing.step)
        batch = await buffer.take()
        sampled = [*batch.groups, *(group for _, group in batch.discarded)]
        step = self._state.step
        self._causes.note_groups(step, sampled)
        asked = [
            (example.example_id, index)
            for example in map(schedule.numbered, batch.numbers)
            for index in range(self._spec.train.group_size)
        ]
        self._raise_alarms(
            find_fate_leak(step, asked, batch.groups) + find_impossible_rollouts(step, sampled)
        )
        if batch.is_short:
            detail = f"{len(batch.groups)} groups are trained on; {len(batch.discarded)} were discarded"
            self._event(EventKind.TRIPWIRE, "short_batch", detail)
        return batch

    def _sum_up(self, collected: Batch | None, batch: TrainBatch) -> tuple[SampledStep, dict[str, float]]:
        """Return the step's rollouts with how their groups ended, and their metrics.

        Called before `_state` has the step's new version: staleness is against the weights that were trained.
        """
        if collected is None or self._buffer is None:
            return SampledStep(), {}
        version, advantages = self._state.version, self._terms.list_advantages(batch, collected.groups)
        sampled = SampledStep.of_batch(collected, batch, advantages, version=version)
        counts = Counter(sampled.statuses)
        for status, num_groups in counts.items():
            self._buffer.note(status, num_groups)
        num_ahead = self._buffer.num_ahead if self._spec.train.max_staleness else None
        metrics = measure_groups(collected, batch, self._parts.task, version=version, num_ahead=num_ahead)
        return sampled, metrics | {f"num_{status}_groups": float(number) for status, number in counts.items()}

    async def _close_step(self, metrics: dict[str, float], groups: Sequence[Group]) -> None:
        """Record the step's numbers, checkpoint, evaluate, and stop where a tripwire says so."""
        step, spec = self._state.step, self._spec
        metrics["policy_version"] = self._state.version
        metrics |= measure_memory() | (self._lag.take() if self._lag is not None else {})
        self._timeline.write(step)
        self._run_dir.metrics.append(step, metrics)
        self._parts.observer.on_step({"step": step, **metrics})
        self._raise_alarms(self._watch.find_alarms(step, metrics, groups))
        if spec.tripwires.on_alarm != "warn" and spec.train.terms != "distill":
            self._end.on_collapse(step, self._watch.collapse)
        is_last = step == spec.train.steps
        if is_last or (spec.eval.every is not None and step % spec.eval.every == 0):
            await self._evaluate()
        is_due = is_last or step % spec.train.checkpoint_every == 0
        low = None if is_last else self._disk.find_low(step)
        if low is not None:
            # The run ends before the disk is full, with one more checkpoint where it still fits.
            alarm, has_room = low
            self._publish_event(alarm)
            if has_room:
                await self._checkpoint()
            self._end.stop(step, f"the disk is nearly full: {alarm.detail}", "room for the next checkpoint")
        if is_due:
            await self._checkpoint()
        gc.collect()

    def _raise_alarms(self, alarms: Sequence[Event]) -> None:
        """Publish alarms, and end the run where `tripwires.on_alarm` asks for it."""
        for alarm in alarms:
            self._publish_event(alarm)
        state, is_wanted = self._state, self._spec.tripwires.on_alarm == "stop"
        self._end.on_alarms(state.step, state.num_refused_in_a_row, alarms, is_wanted=is_wanted)

    async def _stop_if_asked(self) -> None:
        """End after a signal, with a checkpoint of the last step."""
        if self._stop.cause is None:
            return
        if self._state.step not in {0, *self._run_dir.checkpoint_steps()}:
            await self._checkpoint()
        latest = self._run_dir.latest_checkpoint()
        where = f"checkpoint {latest[1].name}" if latest else "its start, no step was trained"
        raise Interrupted(
            f"the run was stopped by {self._stop.cause} after step {self._state.step}",
            allowed=f"the run goes on from {where}",
            next_step="give the same command again",
        )

    async def _checkpoint(self) -> None:
        self._watchdog.progress("checkpoint")
        await self._publishing.await_proof()
        waiting: list[tuple[int, Group]] = []
        if self._buffer is not None:
            # Groups for later steps: in a deterministic run every one that was started, else those that
            # ended.
            if self._spec.train.deterministic:
                await self._buffer.settle()
            waiting = self._buffer.list_waiting()
        with self._timeline.span(LEARNER, "checkpoint"):
            path = await save_checkpoint(
                self._run_dir, self._roles.learner, self._parts.model_dir, self._state, waiting
            )
        self._timeline.write(self._state.step)
        self._run_dir.keep_checkpoints(self._spec.train.keep_checkpoints)
        self._event(EventKind.CHECKPOINT, "written", path.name)

    async def _evaluate(self) -> None:
        """Evaluate the policy on the held-out examples, where the run has an evaluator."""
        await self._publishing.await_proof()
        if self._parts.evaluate is None:
            return
        self._watchdog.progress("evaluate")
        try:
            with self._timeline.span(LEARNER, "evaluate"):
                summary = await self._parts.evaluate(
                    self._state.step, lambda: self._watchdog.progress("evaluate")
                )
        except (EngineError, RunStopped) as error:
            notes = "\n\n".join(getattr(error, "__notes__", ()))
            self._event(EventKind.TRIPWIRE, "invalid_eval", str(error), notes)
            # A dead engine's own error names the cause, this one only a consequence.
            await self._require_engine()
            raise
        if summary.invalid_cause is not None:
            await self._require_engine()
        self._timeline.write(self._state.step)
        self._causes.note(self._state.step, summary.causes)
        self._parts.observer.on_eval(summary)
        if summary.invalid_cause is not None:
            detail = f"{summary.invalid_cause}: the scores of this step are kept and never compared"
            self._event(EventKind.TRIPWIRE, "invalid_eval", detail)
        self._raise_alarms(find_divergence(summary, self._run_dir.metrics.read()))

    async def _require_engine(self) -> None:
        """Check that the engine still answers: an evaluation that its death cut short is no result.

        Raises: EngineError with the cause of its death. The step has no checkpoint yet, so a resumed run
            removes the evaluation and repeats it.
        """
        token_ids = self._roles.tokenizer.encode(_SIGN_OF_LIFE)
        await self._roles.engine.score(token_ids[:1], token_ids[1:], 1.0)

    def _event(self, kind: EventKind, cause: str, detail: str, trace: str = "") -> None:
        step = self._state.step
        self._publish_event(Event(kind=kind, step=step, cause=cause, detail=detail, trace=trace))

    def _publish_event(self, event: Event) -> None:
        self._run_dir.events.append(event)
        self._parts.observer.on_event(event)

    def _on_lag(self, late_s: float, stack: str) -> None:
        """Record the lag; called by the watching thread while the event loop is blocked."""
        detail = f"the event loop has been blocked for {late_s:.1f} s; the call that blocks it:\n{stack}"
        self._event(EventKind.TRIPWIRE, "loop_lag", detail)

    def _on_stall(self, stage: str, stalled_s: float) -> None:
        """Record the stall; called by the watchdog's thread just before it ends the process."""
        detail = f"stage {stage} has not moved for {stalled_s:.0f} s; stacks follow in the log"
        self._event(EventKind.TRIPWIRE, "stall", detail)
