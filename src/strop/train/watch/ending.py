"""How a run ends before its last step: a signal, an alarm, a collapse, or rollouts that cannot be scored."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any, NoReturn

from strop.errors import RunStopped
from strop.record import Event, EventKind, RunDir
from strop.record.fence import ATTEMPT_VARIABLE
from strop.rollout import Group
from strop.tasks.failures import find_causes, sum_up
from strop.train.watch.trends import CollapseWatch

MAX_REFUSED_IN_A_ROW = 3
"""Steps in a row without an update, not finite or without a token that counts, after which a run ends."""


_Handler = Callable[[int, FrameType | None], Any] | int | signal.Handlers | None

# A second signal of the kind ends the process at once, for a person at a terminal. A closed terminal hangs up
# more than once: its kernel does, and its shell.
_SECOND: dict[signal.Signals, _Handler] = {
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGINT: signal.default_int_handler,
    signal.SIGHUP: signal.SIG_IGN,
}


class StopFlag:
    """Set by the first signal. A second one ends the process at once, without a checkpoint.

    A second SIGTERM in a job is ignored: Slurm sends it to every process of a step, and more than once, and
    the node's agent passes it on. A job that takes too long to end is killed anyway.

    The event loop's own handlers would be too late: they run when the loop next turns, which is after the
    step that follows the running optimizer step.
    """

    def __init__(self) -> None:
        self.cause: str | None = None
        """Name of the signal in lower case, for example 'sigterm'; None before any signal."""
        self._previous: dict[signal.Signals, _Handler] = {}

    def __enter__(self) -> StopFlag:
        """Install the handlers; only the main thread may."""
        # Where hangups are ignored (nohup), they stay so.
        is_held = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        caught = [number for number in _SECOND if number is not signal.SIGHUP or not is_held]
        self._previous = {number: signal.signal(number, self._on_signal) for number in caught}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Put the previous handlers back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.cause = signal.Signals(number).name.lower()
        if number == signal.SIGHUP:
            leave_terminal()
        for known, handler in _SECOND.items():
            is_repeated = known is signal.SIGTERM and ATTEMPT_VARIABLE in os.environ
            signal.signal(known, signal.SIG_IGN if is_repeated else handler)


def leave_terminal() -> None:
    """Send output to a terminal nowhere from now on: writing to one that is gone is an error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        # A terminal that is gone is a character device still, and not called a terminal any more.
        if stat.S_ISCHR(os.fstat(stream).st_mode):
            os.dup2(nowhere, stream)
    os.close(nowhere)


class Ending:
    """Ends one run with `RunStopped` and advice on how to go on."""

    def __init__(self, run_dir: RunDir, publish: Callable[[Event], None]) -> None:
        self._run_dir = run_dir
        self._publish = publish
        self._lost = ""
        """Why rollouts of the step failed; empty where none failed."""
        self._is_all_lost = False

    def on_alarms(self, step: int, num_refused: int, alarms: Sequence[Event], *, is_wanted: bool) -> None:
        """End the run where updates keep failing, or on any alarm where that `is_wanted`.

        `num_refused` steps in a row had no update.
        Raises: RunStopped.
        """
        is_by_loss = self._is_all_lost or any(alarm.cause == "verifier_errors" for alarm in alarms)
        lead = f"{self._lost}; " if is_by_loss else ""
        if num_refused >= MAX_REFUSED_IN_A_ROW:
            self.stop(
                step,
                f"{lead}step {step} is number {num_refused} in a row without an update",
                f"fewer than {MAX_REFUSED_IN_A_ROW} steps in a row whose update is empty or not finite",
            )
        if alarms and is_wanted:
            causes = ", ".join(alarm.cause for alarm in alarms)
            self.stop(
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
            self.stop(
                step,
                f"{watch.reason}, up to step {step}",
                "steps that are none of a collapse; tripwires.on_alarm='warn' goes on in any case",
                # The weights that sampled the first of these steps.
                suspect_step=step - watch.num_in_a_row,
            )

    def on_all_failed(self, step: int, groups: Sequence[Group]) -> None:
        """End the run where no rollout could be scored: such a failure will not go away by itself.

        Raises: RunStopped.
        """
        outcomes = [r.outcome for group in groups for r in group.rollouts if not r.outcome.is_too_long]
        causes = find_causes(outcomes)
        self._lost = sum_up(causes, len(outcomes), f"rollouts of step {step + 1}") if causes else ""
        self._is_all_lost = bool(causes) and sum(cause.num for cause in causes) == len(outcomes)
        kinds = {(cause.failure.owner, cause.failure.kind) for cause in causes}
        if self._is_all_lost and len(kinds) == 1:
            self.stop(step, self._lost, "steps in which some rollout can be scored")

    def stop(self, step: int, reason: str, allowed: str, *, suspect_step: int | None = None) -> NoReturn:
        """End the run.

        `suspect_step` is the step whose weights sampled the rollouts that raised the alarm.
        Raises: RunStopped.
        """
        self._publish(Event(kind=EventKind.STOP, step=step, cause="tripwire", detail=reason))
        where = self._offer_checkpoint(suspect_step)
        raise RunStopped(
            reason,
            allowed=allowed,
            next_step=f"read {self._run_dir.path}/events.jsonl and mend the cause; {where}",
        )

    def _offer_checkpoint(self, suspect_step: int | None) -> str:
        """Name the checkpoint to go on from: beside one of suspect weights also the one before it."""
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
