"""How a trial of a job stands and ends, asked as seldom as its scheduler likes."""

from __future__ import annotations

import time
from collections.abc import Callable

from strop.errors import EXIT_DONE, EXIT_FAILED
from strop.launch.backends import BACKENDS
from strop.launch.contract import JobRef, JobState, JobStatus
from strop.launch.launcher import ASK_EVERY_S, ASK_HERE_EVERY_S, UNKNOWN_LIMIT_S, Launcher, require_trial
from strop.launch.submit import describe_status


def exit_code_of(status: JobStatus) -> int:
    """Return 0 for a success, else the code that the last attempt ended with, or 1."""
    if status.state is JobState.SUCCEEDED:
        return EXIT_DONE
    code = None if status.attempt is None else status.attempt.exit_code
    return code or EXIT_FAILED


class TrialEnd:
    """Tells each new state of a trial, and how it ended."""

    def __init__(self, launcher: Launcher, ref: JobRef, trial: int, say: Callable[[str], None]) -> None:
        """Raises: ConfigError if the job has no such trial."""
        require_trial(ref, trial)
        self._launcher, self._ref, self._trial, self._say = launcher, ref, trial, say
        self._every_s = ASK_HERE_EVERY_S if BACKENDS[ref.backend].is_here else ASK_EVERY_S
        self._ask_at = float("-inf")
        self._unknown_since: float | None = None
        self._state: JobState | None = None

    def find(self) -> JobStatus | None:
        """Return the status of a trial that has ended, or that nobody has known for long; else None.

        Raises: StoreError if its record does not answer.
        """
        if time.monotonic() < self._ask_at:
            return None
        statuses = self._launcher.status([self._ref])
        status = next(one for one in statuses if one.trial == self._trial)
        self._ask_at = time.monotonic() + self._every_s
        if status.state is not self._state:
            self._state = status.state
            self._say(f"{self._ref.job_id}: {describe_status(status)}")
        if status.state is not JobState.UNKNOWN or status.is_silent:
            self._unknown_since = None
            return status if status.state.is_terminal else None
        self._unknown_since = self._unknown_since or time.monotonic()
        return status if time.monotonic() - self._unknown_since > UNKNOWN_LIMIT_S else None
