"""How a run stops: a signal, an alarm, a collapse, or nothing left to score."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any, NoReturn

from strop.errors import RunStopped
from strop.record import Event, EventKind, RunDir
from strop.record.fence import ATTEMPT_VARIABLE
from strop.rollout import Group
from strop.tasks.failures import find_causes, find_failures, sum_up
from strop.train.checkpoint import TrainerState
from strop.train.watch.trends import CollapseWatch
from strop.train.watch.tripwires import MAX_REFUSED_IN_A_ROW

_Handler = Callable[[int, FrameType | None], Any] | int | signal.Handlers | None

# What a second signal of the kind does: end the process at once, for a person at a terminal.
_SECOND: dict[signal.Signals, _Handler] = {
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGINT: signal.default_int_handler,
}


class StopFlag:
    """Set by the first signal. A second one ends the process at once, without a checkpoint.

    Except SIGTERM in a job: Slurm sends it to every process of a step, and more than once, and the node's
    agent passes it on. What takes too long in a job is killed.

    Not the event loop's own handlers: those run when the loop next looks, which is after the step
    that follows an optimizer step under way.
    """

    def __init__(self) -> None:
        self.cause: str | None = None
        """Name of the signal in lower case, for example 'sigterm'; None while there was none."""
        self._previous: dict[signal.Signals, _Handler] = {}

    def __enter__(self) -> StopFlag:
        """Install the handlers; only the main thread may."""
        self._previous = {number: signal.signal(number, self._on_signal) for number in _SECOND}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Give the signals back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.cause = signal.Signals(number).name.lower()
        for known, handler in _SECOND.items():
            is_repeated = known is signal.SIGTERM and ATTEMPT_VARIABLE in os.environ
            signal.signal(known, signal.SIG_IGN if is_repeated else handler)


class Ending:
    """Ends one run, as a tripwire does."""

    def __init__(self, run_dir: RunDir, publish: Callable[[Event], None]) -> None:
        self._run_dir = run_dir
        self._publish = publish
        self._lost = ""
        """Why rollouts of the step failed; empty where none did."""
        self._is_all_lost = False

    def on_alarms(self, state: TrainerState, alarms: Sequence[Event], *, is_wanted: bool) -> None:
        """End the run where updates keep failing, or on any alarm where that `is_wanted`.

        Raises: RunStopped.
        """
        step, num_refused = state.step, state.num_refused_in_a_row
        is_by_loss = self._is_all_lost or any(alarm.cause == "verifier_errors" for alarm in alarms)
        lead = f"{self._lost}; " if is_by_loss else ""
        if num_refused >= MAX_REFUSED_IN_A_ROW:
            self.now(
                step,
                f"{lead}step {step} is number {num_refused} in a row without an update",
                f"fewer than {MAX_REFUSED_IN_A_ROW} steps in a row whose update is empty or not finite",
            )
        if alarms and is_wanted:
            causes = ", ".join(alarm.cause for alarm in alarms)
            self.now(
                step,
                f"{lead}step {step} raised {causes}",
                "steps without alarm, as tripwires.on_alarm asks",
                suspect_step=step - 1,
            )

    def on_collapse(self, step: int, watch: CollapseWatch) -> None:
        """End the run where the alarms of several steps in a row are those of a collapse.

        Raises: RunStopped.
        """
        if watch.reason is not None:
            self.now(
                step,
                f"{watch.reason}, up to step {step}",
                "steps that are none of a collapse; tripwires.on_alarm='warn' goes on in any case",
                # The weights that gave the numbers of the first of them.
                suspect_step=step - watch.num_in_a_row,
            )

    def where_all_failed(self, step: int, groups: Sequence[Group]) -> None:
        """End the run where no rollout could be scored: such a failure will not go away by itself.

        Raises: RunStopped.
        """
        outcomes = [r.outcome for group in groups for r in group.rollouts if not r.outcome.is_too_long]
        causes = find_causes(find_failures(outcomes))
        self._lost = sum_up(causes, len(outcomes), f"rollouts of step {step + 1}") if causes else ""
        self._is_all_lost = bool(causes) and sum(cause.num for cause in causes) == len(outcomes)
        kinds = {(cause.failure.owner, cause.failure.kind) for cause in causes}
        if self._is_all_lost and len(kinds) == 1:
            self.now(step, self._lost, "steps in which some rollout can be scored")

    def now(self, step: int, given: str, allowed: str, *, suspect_step: int | None = None) -> NoReturn:
        """End the run.

        `suspect_step` is the step whose weights gave the numbers that raised the alarm.
        Raises: RunStopped.
        """
        self._publish(Event(kind=EventKind.STOP, step=step, cause="tripwire", detail=given))
        where = self._offer_checkpoint(suspect_step)
        raise RunStopped(
            given,
            allowed=allowed,
            next_step=f"read {self._run_dir.path}/events.jsonl and mend the cause; {where}",
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
