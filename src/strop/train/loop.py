"""The loop: examples, rollouts, credit, one optimizer step, publication, record.

One step, in order: take the step's examples, attempt each several times, judge, assign credit over
the complete batch, add the term of the step's demonstrations, move the weights once, publish them to
the engine, write everything down, and checkpoint where one is due. A run that only imitates
(`train.terms = "sft"`) has no examples to attempt; all else is the same. A record of step k on disk
means that step k was trained; what was recorded after the last checkpoint is cut off on resume and
computed again, to the same values.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch

from strop.algorithm import build_algorithm
from strop.cluster import Roles
from strop.environments import RolloutPlan, SingleTurn, run_groups
from strop.errors import EngineError, Interrupted, LearnerError, RunStopped, WeightMismatch, explain_refusal
from strop.hardware import peak_rss_bytes, rss_bytes
from strop.policy.footprint import checkpoint_bytes, read_model_size
from strop.policy.learner import LossTerm, StepReport
from strop.record import Event, EventKind, RunDir
from strop.record.rollouts import write_rollouts
from strop.rollout import PROMPT_TOO_LONG, Group, Sampling
from strop.spec.run import RunSpec
from strop.tasks import Task, limits_of
from strop.tasks.judging import InlineJudge, Judge, TimedJudge
from strop.train.batch import TrainBatch, build_batch
from strop.train.checkpoint import (
    TrainerState,
    load_checkpoint,
    require_same_demonstrations,
    save_checkpoint,
)
from strop.train.demonstrations import Demonstration, Demonstrations
from strop.train.gate import GateCheck, GateInput, pass_gate
from strop.train.measure import (
    count_trained_tokens,
    measure_batch,
    measure_demonstrations,
    measure_rollouts,
    measure_time,
    measure_update,
)
from strop.train.observer import Evaluator, Observer
from strop.train.room import DiskWatch, MemoryWatch
from strop.train.schedule import schedule_demonstrations, schedule_examples
from strop.train.signals import StopFlag
from strop.train.terms import rl_term, sft_term
from strop.train.trends import History, find_divergence, find_trend_alarms
from strop.train.tripwires import (
    MAX_REFUSED_IN_A_ROW,
    find_alarms,
    find_fate_leak,
    find_format_drift,
)
from strop.train.watchdog import Watchdog

_SIGN_OF_LIFE = "Is anyone there?"
"""What a doubtful engine is asked to score."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainInput:
    """Everything that the loop works with, composed by the caller."""

    spec: RunSpec
    task: Task
    roles: Roles
    run_dir: RunDir
    model_dir: Path
    """Where the tokenizer's files come from for exports."""
    observer: Observer
    evaluate: Evaluator | None
    """None: the held-out examples are not looked at."""
    judge: Judge | None = None
    """None: replies are judged in this process."""
    demonstrations: Demonstrations | None = None
    """None: nothing is imitated."""


class TrainLoop:
    """Trains one run to its end, from wherever its last checkpoint left it."""

    def __init__(self, parts: TrainInput) -> None:
        self._parts = parts
        self._spec = parts.spec
        self._roles = parts.roles
        self._run_dir = parts.run_dir
        self._algorithm = build_algorithm(parts.spec.algorithm)
        self._schedule = schedule_examples(parts.spec, parts.task)
        self._imitated = schedule_demonstrations(parts.spec, parts.demonstrations)
        self._is_mixed = parts.spec.train.has_rl and parts.spec.train.has_sft
        self._judge = TimedJudge(parts.judge or InlineJudge(parts.task))
        self._state = TrainerState(
            step=0,
            version=0,
            num_refused_in_a_row=0,
            num_threads=torch.get_num_threads(),
            demonstrations=parts.demonstrations.digest if parts.demonstrations else None,
        )
        self._checks: list[GateCheck] = []
        self._history = History()
        self._memory = MemoryWatch(parts.spec.tripwires.max_memory_growth_bytes)
        size = read_model_size(parts.model_dir)
        self._disk = DiskWatch(parts.run_dir, checkpoint_bytes(size, parts.spec.model.dtype))
        self._stop = StopFlag()
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
        with self._stop, self._watchdog:
            self._resume()
            await self._publish()
            await self._pass_gate()
            self._parts.observer.on_start(
                run=str(self._run_dir.path), first_step=self._state.step, num_steps=self._spec.train.steps
            )
            if self._state.step == 0:
                await self._evaluate()
            while self._state.step < self._spec.train.steps:
                self._stop_if_asked()
                await self._step()
            self._give_notice()
            self._run_dir.mark_finished()

    def _resume(self) -> None:
        """Go back to the last checkpoint and cut off what was recorded after it."""
        latest = self._run_dir.latest_checkpoint()
        if latest is not None:
            step, path = latest
            digest = self._state.demonstrations
            self._state = load_checkpoint(path, self._roles.learner, num_threads=self._state.num_threads)
            require_same_demonstrations(self._state, digest)
            self._run_dir.truncate_after(step)
            self._event(EventKind.RESUME, "checkpoint", f"training goes on from {path.name}")
        else:
            self._run_dir.truncate_after(0)
        # From the record: earlier steps may be an earlier attempt's.
        self._history = History(self._run_dir.metrics.read())

    async def _publish(self) -> None:
        """Make the engine serve the learner's weights, and check that it does."""
        self._watchdog.progress("publish")
        update = await self._roles.publisher.publish(self._roles.learner)
        receipt = await self._roles.engine.update(update)
        if (receipt.version, receipt.digest) != (update.version, update.digest):
            raise WeightMismatch(
                explain_refusal(
                    f"the engine serves version {receipt.version} ({receipt.digest[:12]}) after"
                    f" version {update.version} ({update.digest[:12]}) was published",
                    allowed="the published version and digest",
                    next_step="read the engine's log and start the run again",
                )
            )

    async def _pass_gate(self) -> None:
        self._watchdog.progress("gate")
        parts = self._parts
        gate = GateInput(
            spec=parts.spec,
            task=parts.task,
            roles=parts.roles,
            model_dir=parts.model_dir,
            run_path=parts.run_dir.path,
            judge=parts.judge,
            demonstrations=parts.demonstrations,
        )
        self._checks = await pass_gate(gate)
        for check in self._checks:
            detail = check.detail if check.is_passed else f"accepted although it failed: {check.detail}"
            self._event(EventKind.GATE, check.name, detail)
        self._give_notice()

    def _give_notice(self) -> None:
        """Say what the gate found that every reader of the results must know."""
        for check in self._checks:
            if check.notice is not None:
                self._event(EventKind.NOTICE, check.name, check.notice)

    async def _step(self) -> None:
        """Do one step, from its examples to its checkpoint."""
        started_at = time.perf_counter()
        groups = await self._collect()
        num_attempted = self._note_too_long(groups)
        self._stop_if_all_failed(groups)
        collected_at = time.perf_counter()
        verify_s = min(self._judge.take_busy_s(), collected_at - started_at)
        self._watchdog.progress("learn")
        batch = build_batch(self._algorithm, groups, self._parts.task.limits.max_reply_tokens)
        imitated = self._imitated.examples(self._state.step) if self._imitated else []
        report = self._learn(self._list_terms(batch, imitated))
        learned_at = time.perf_counter()
        if report is not None:
            await self._publish()
        seconds = {
            "generate": collected_at - started_at - verify_s,
            "verify": verify_s,
            "learn": learned_at - collected_at,
            "sync": time.perf_counter() - learned_at,
        }
        # A step of nothing but prompts that are too long is no sign of trouble: the gate bounded them.
        self._advance(is_refused=report is None and (num_attempted > 0 or bool(imitated)))
        if groups:
            rollouts = [rollout for group in groups for rollout in group.rollouts]
            write_rollouts(self._run_dir.rollouts_path(self._state.step), rollouts)
        metrics = measure_rollouts(groups) | measure_batch(batch) if groups else {}
        metrics |= measure_demonstrations(imitated)
        metrics |= measure_update(report, is_mixed=self._is_mixed) if report is not None else {}
        step_s = time.perf_counter() - started_at
        metrics |= measure_time(seconds, step_s, count_trained_tokens(metrics))
        await self._close_step(metrics)

    async def _collect(self) -> list[Group]:
        """Attempt the step's examples, all at once; none in a run that only imitates."""
        if self._schedule is None:
            return []
        self._watchdog.progress("generate")
        spec, task = self._spec, self._parts.task
        sampling = Sampling(**spec.sampling.model_dump())
        plans_P_G = [
            [
                RolloutPlan(
                    example=example,
                    step=self._state.step,
                    sample_index=index,
                    run_seed=spec.seed,
                    sampling=sampling,
                    max_reply_tokens=limits_of(task, example).max_reply_tokens,
                    max_positions=self._roles.learner.model.shape.max_positions,
                    prompt_format=spec.model.prompt_format,
                )
                for index in range(spec.train.rollouts_per_prompt)
            ]
            for example in self._schedule.examples(self._state.step)
        ]
        groups = await run_groups(
            partial(SingleTurn, task, self._judge),
            self._roles.engine,
            self._roles.tokenizer,
            plans_P_G,
            on_group=lambda: self._watchdog.progress("generate"),
        )
        asked = [(plan.example.example_id, plan.sample_index) for plans_G in plans_P_G for plan in plans_G]
        self._raise_alarms(find_fate_leak(self._state.step, asked, groups))
        return groups

    def _list_terms(self, batch: TrainBatch, imitated: Sequence[Demonstration]) -> list[LossTerm]:
        """Return the terms of the step that have something to count."""
        terms = []
        if batch.credit.num_counted_tokens:
            terms.append(rl_term(self._algorithm, batch, self._spec.sampling.temperature))
        elif self._spec.train.has_rl:
            self._event(EventKind.TRIPWIRE, "empty_step", "no rollout of the step could be trained on")
        if imitated:
            terms.append(sft_term(imitated, self._spec.sft.weight))
        return terms

    def _learn(self, terms: Sequence[LossTerm]) -> StepReport | None:
        """Take the optimizer step. Returns None where there is nothing to count or it was refused."""
        if not terms:
            return None
        try:
            return self._roles.learner.step_terms(terms)
        except LearnerError as error:
            self._event(EventKind.TRIPWIRE, "non_finite", str(error))
            return None

    def _advance(self, *, is_refused: bool) -> None:
        self._state = replace(
            self._state,
            step=self._state.step + 1,
            version=self._roles.learner.version,
            num_refused_in_a_row=self._state.num_refused_in_a_row + 1 if is_refused else 0,
        )

    async def _close_step(self, metrics: dict[str, float]) -> None:
        """Record the step's numbers, checkpoint, evaluate, and stop where a tripwire says so."""
        step, spec = self._state.step, self._spec
        metrics["policy_version"] = self._state.version
        metrics |= _measure_memory()
        self._run_dir.metrics.append(step, metrics)
        self._parts.observer.on_step({"step": step, **metrics})
        self._raise_alarms(self._find_alarms(metrics))
        is_last = step == spec.train.steps
        if is_last or (spec.eval.every is not None and step % spec.eval.every == 0):
            await self._evaluate()
        is_due = is_last or step % spec.train.checkpoint_every == 0
        if not is_last:
            self._stop_on_low_disk()
        if is_due:
            self._checkpoint()

    def _find_alarms(self, metrics: Mapping[str, float]) -> list[Event]:
        """Compare the step's numbers with their bounds and with the steps before."""
        step, wires = self._state.step, self._spec.tripwires
        alarms = find_alarms(wires, step, metrics) + find_trend_alarms(wires, step, metrics, self._history)
        self._history.add(metrics)
        alarms += find_format_drift(step, metrics, self._history.first[0])
        if "memory_bytes" in metrics:
            alarms += self._memory.find_growth(step, metrics["memory_bytes"])
        return alarms

    def _stop_on_low_disk(self) -> None:
        """End the run before the disk is full, with one more checkpoint where it still fits."""
        found = self._disk.find_low(self._state.step)
        if found is None:
            return
        alarm, has_room = found
        self._publish_event(alarm)
        if has_room:
            self._checkpoint()
        self._stop_run(f"the disk is nearly full: {alarm.detail}", "room for the next checkpoint")

    def _raise_alarms(self, alarms: Sequence[Event]) -> None:
        """Publish alarms, and do what the run file asks for."""
        for alarm in alarms:
            self._publish_event(alarm)
        self._stop_on_alarm(alarms)

    def _stop_on_alarm(self, alarms: Sequence[Event]) -> None:
        """End the run where updates keep failing, or on any alarm where the run file asks for it."""
        step, num_refused = self._state.step, self._state.num_refused_in_a_row
        if num_refused >= MAX_REFUSED_IN_A_ROW:
            self._stop_run(
                f"step {step} is number {num_refused} in a row without an update",
                f"fewer than {MAX_REFUSED_IN_A_ROW} steps in a row whose update is empty or not finite",
            )
        if alarms and self._spec.tripwires.on_alarm == "stop":
            causes = ", ".join(alarm.cause for alarm in alarms)
            self._stop_run(
                f"step {step} raised {causes}",
                "steps without alarm, as tripwires.on_alarm asks",
                suspect_step=step - 1,
            )

    def _note_too_long(self, groups: Sequence[Group]) -> int:
        """Record the examples whose prompts left no room for a reply; return how many were attempted."""
        too_long = [group for group in groups if all(r.outcome.is_too_long for r in group.rollouts)]
        if too_long:
            ids = tuple(group.example.example_id for group in too_long)
            failure = too_long[0].rollouts[0].outcome.failure
            detail = f"{len(ids)} examples were not attempted: {failure.detail if failure else ''}"
            event = Event(
                kind=EventKind.ROLLOUT_LOST,
                step=self._state.step,
                cause=PROMPT_TOO_LONG,
                detail=detail,
                example_ids=ids,
            )
            self._publish_event(event)
        return len(groups) - len(too_long)

    def _stop_if_all_failed(self, groups: Sequence[Group]) -> None:
        """End the run where nothing could be scored: what breaks every rollout heals by no next step."""
        outcomes = [r.outcome for group in groups for r in group.rollouts if not r.outcome.is_too_long]
        failures = [outcome.failure for outcome in outcomes if outcome.failure is not None]
        kinds = {(failure.owner, failure.kind) for failure in failures}
        if failures and len(failures) == len(outcomes) and len(kinds) == 1:
            first = failures[0]
            self._stop_run(
                f"all {len(outcomes)} rollouts of step {self._state.step + 1} failed alike:"
                f" {first.owner}, {first.kind}\n{first.detail}\n",
                "steps in which some rollout can be scored",
            )

    def _stop_run(self, given: str, allowed: str, *, suspect_step: int | None = None) -> NoReturn:
        """End the run as a tripwire does: the cause on record, the last checkpoint offered.

        `suspect_step` is the step whose weights gave the numbers that raised the alarm.
        """
        self._event(EventKind.STOP, "tripwire", given)
        where = self._offer_checkpoint(suspect_step)
        raise RunStopped(
            explain_refusal(
                given,
                allowed=allowed,
                next_step=f"read {self._run_dir.path}/events.jsonl and mend the cause; {where}",
            )
        )

    def _offer_checkpoint(self, suspect_step: int | None) -> str:
        """Say where the run goes on: a checkpoint of suspect weights only together with one before it."""
        steps = self._run_dir.checkpoint_steps()
        if not steps:
            return "no checkpoint yet"
        name = self._run_dir.checkpoint_path(steps[-1]).name
        if suspect_step is None or steps[-1] < suspect_step:
            return f"the same command goes on from checkpoint {name}"
        suspect = f"the same command goes on from checkpoint {name}, whose weights raised this alarm"
        before = [step for step in steps if step < suspect_step]
        if not before:
            return f"{suspect}, and there is none before it"
        good = self._run_dir.checkpoint_path(before[-1]).name
        return f"{suspect}; remove {self._run_dir.checkpoint_path(steps[-1])} to go on from {good} before it"

    def _stop_if_asked(self) -> None:
        """End after a signal, with a checkpoint of the last step."""
        if self._stop.cause is None:
            return
        if self._state.step not in {0, *self._run_dir.checkpoint_steps()}:
            self._checkpoint()
        kept = self._run_dir.latest_checkpoint()
        where = f"checkpoint {kept[1].name}" if kept else "its start, no step was trained"
        raise Interrupted(
            explain_refusal(
                f"the run was stopped by {self._stop.cause} after step {self._state.step}",
                allowed=f"the run goes on from {where}",
                next_step="give the same command again",
            )
        )

    def _checkpoint(self) -> None:
        self._watchdog.progress("checkpoint")
        path = save_checkpoint(self._run_dir, self._roles.learner, self._parts.model_dir, self._state)
        self._run_dir.keep_checkpoints(self._spec.train.keep_checkpoints)
        self._event(EventKind.CHECKPOINT, "written", path.name)

    async def _evaluate(self) -> None:
        """Look at the held-out examples, where the run file asks for it."""
        if self._parts.evaluate is None:
            return
        self._watchdog.progress("evaluate")
        try:
            summary = await self._parts.evaluate(
                self._state.step, lambda: self._watchdog.progress("evaluate")
            )
        except (EngineError, RunStopped):
            # A dead engine tells why it died; what its silence led to does not.
            await self._require_engine()
            raise
        if summary.invalid_cause is not None:
            await self._require_engine()
        self._parts.observer.on_eval(summary)
        if summary.invalid_cause is not None:
            detail = f"{summary.invalid_cause}: the scores of this step are kept and never compared"
            self._event(EventKind.TRIPWIRE, "invalid_eval", detail)
        self._raise_alarms(find_divergence(summary, self._run_dir.metrics.read()))

    async def _require_engine(self) -> None:
        """See that the engine still answers: what a dead one left of an evaluation is no result.

        Raises: EngineError with the cause of its end. The step has no checkpoint yet, so a resumed run
            removes the evaluation and repeats it.
        """
        token_ids = self._roles.tokenizer.encode(_SIGN_OF_LIFE)
        await self._roles.engine.score(token_ids[:1], token_ids[1:], 1.0)

    def _event(self, kind: EventKind, cause: str, detail: str) -> None:
        self._publish_event(Event(kind=kind, step=self._state.step, cause=cause, detail=detail))

    def _publish_event(self, event: Event) -> None:
        self._run_dir.events.append(event)
        self._parts.observer.on_event(event)

    def _on_stall(self, stage: str, stalled_s: float) -> None:
        """Called by the watchdog's thread, just before it ends the process."""
        detail = f"stage {stage} has not moved for {stalled_s:.0f} s; stacks follow in the log"
        self._event(EventKind.TRIPWIRE, "stall", detail)


def _measure_memory() -> dict[str, float]:
    """Return the resident memory of this process, now where the system tells, and at its peak."""
    metrics: dict[str, float] = {"peak_memory_bytes": peak_rss_bytes()}
    now = rss_bytes()
    return metrics if now is None else metrics | {"memory_bytes": now}
