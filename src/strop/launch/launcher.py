"""The verbs of jobs, once for all backends: plan, check, submit, status, logs, cancel, watch.

`fetch` has its own file. Effects: `plan` has none; `check`, `status` and `logs` only read;
`submit` writes the job directory and calls the scheduler once; `cancel` sends signals, and reads the outcome
from the status afterwards, never from the call.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from strop.errors import EXIT_DONE, EXIT_FAILED, CheckRefused, ConfigError, StoreError
from strop.hardware.findings import Finding
from strop.launch.backends import BACKENDS
from strop.launch.build_request import make_plan
from strop.launch.contract import (
    JobPlan,
    JobRef,
    JobRequest,
    JobState,
    JobStatus,
    Renewable,
)
from strop.launch.job_dir import job_path_of, lock_folder, read_plan, read_ref
from strop.launch.logs import FileLogs, FilteredLogs, LogFilter, follow, require_logs
from strop.launch.options import SiteOptions
from strop.launch.status import close_forgotten, find_statuses, is_forgotten
from strop.launch.submit import (
    Submitter,
    check_plan,
    describe_status,
    mark_cancelled,
    may_go_on,
)
from strop.record.files import LogLine

KILL_LIMIT_S = 60.0
"""Longest time until a scheduler shows that a killed job has ended."""
UNKNOWN_LIMIT_S = 60.0
"""How long to follow the logs of a job unknown to its scheduler: it may just have been submitted."""
LOST_LIMIT_S = 600.0
"""How long to watch a job that its answering scheduler does not know."""
_ASK_EVERY_S = 15.0
"""Pause while watching. Schedulers with many users throttle more frequent queries."""
_ASK_HERE_EVERY_S = 1.0
"""Pause while watching a job on this machine."""
_POLL_S = 0.5
"""Pause while waiting for a cancellation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CancelOutcome:
    """The outcome of a cancellation."""

    statuses: tuple[JobStatus, ...]
    ended_by: str
    """`it had ended`, `TERM`, `KILL`, or that its scheduler had forgotten it; empty if no end was seen."""


class Launcher(Submitter):
    """All verbs over one backend; `submit` has those that submit."""

    def plan(self, request: JobRequest) -> JobPlan:
        """Return the plan of a submission, without any effect. Raises: ConfigError."""
        return make_plan(request, self.backend)

    def check(self, plan: JobPlan) -> list[Finding]:
        """Find obstacles to the job without changing anything, the worst first."""
        return check_plan(self.backend, plan)

    def status(self, refs: Sequence[JobRef]) -> list[JobStatus]:
        """Return the status of every trial of some jobs, by one query to the scheduler."""
        return find_statuses(self.backend, refs)

    def logs(self, ref: JobRef, trial: int, log_filter: LogFilter, *, is_followed: bool) -> Iterator[LogLine]:
        """Yield the lines of a trial's logs; if followed, until the trial has ended.

        Raises: ConfigError if there is no such trial; StoreError naming the place, if there is no log and
            it is not followed.
        """
        require_trial(ref, trial)
        source = self.backend.open_logs(ref, trial)
        record = self.backend.open_record(ref, trial)
        files = FileLogs(record, log_filter) if source is None else FilteredLogs(source, log_filter)
        if is_followed:
            yield from follow(files, is_over=self.watch_end(ref, trial))
            return
        lines = files.read_rest()
        require_logs(files, record)
        yield from lines

    def watch_end(self, ref: JobRef, trial: int) -> Callable[[], bool]:
        """Return a function that checks whether a trial has ended, or has been unknown for long."""
        end = TrialEnd(self, ref, trial)
        return lambda: end.find() is not None

    def cancel(self, ref: JobRef, *, trial: int | None = None, grace_s: float) -> CancelOutcome:
        """End a job: TERM, wait, KILL. The outcome is read from its status.

        Raises: ConfigError if there is no such trial; StoreError if the scheduler does not answer, which
            leaves open whether the job has ended.
        """
        require_trial(ref, trial)
        if isinstance(self.backend, Renewable):
            # First: a watcher would submit the next job as soon as this one has ended.
            with lock_folder(Path(ref.home)):
                ref = mark_cancelled(ref)
        ended_by = "it had ended"
        if not all(status.state.is_terminal for status in self._statuses_of(ref, trial)):
            ended_by = "TERM"
            self.backend.stop(ref, trial, grace_s=grace_s)
            if not self._wait_for_end(ref, trial, grace_s):
                self.backend.stop(ref, trial, grace_s=0.0)
                ended_by = "KILL" if self._wait_for_end(ref, trial, KILL_LIMIT_S) else ""
        forgotten = [status for status in self._statuses_of(ref, trial) if is_forgotten(status)]
        if forgotten:
            # Its scheduler answers, and has had the order to end what it may know of.
            close_forgotten(ref, forgotten)
            ended_by = "its scheduler had forgotten it"
        return CancelOutcome(statuses=tuple(self._statuses_of(ref, trial)), ended_by=ended_by)

    def _statuses_of(self, ref: JobRef, trial: int | None) -> list[JobStatus]:
        return [status for status in self.status([ref]) if trial in {None, status.trial}]

    def _wait_for_end(self, ref: JobRef, trial: int | None, limit_s: float) -> bool:
        deadline = time.monotonic() + limit_s
        while True:
            statuses = self._statuses_of(ref, trial)
            has_ended = all(status.state.is_terminal or is_forgotten(status) for status in statuses)
            if has_ended or time.monotonic() > deadline:
                return has_ended
            time.sleep(_POLL_S)


class TrialEnd:
    """Checks whether a trial has ended, or has long been unknown to a scheduler that answers."""

    def __init__(
        self,
        launcher: Launcher,
        ref: JobRef,
        trial: int,
        *,
        every_s: float = 0.0,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`every_s`: the shortest pause between two queries. `say` receives each new state.

        Raises: ConfigError if the job has no such trial.
        """
        require_trial(ref, trial)
        self._launcher, self._ref, self._trial = launcher, ref, trial
        self._every_s, self._say = every_s, say
        self._ask_at = float("-inf")
        self._unknown_since: float | None = None
        self._state: JobState | None = None

    def find(self) -> JobStatus | None:
        """Return the status at the end, or None while the trial goes on. Raises: StoreError."""
        if time.monotonic() < self._ask_at:
            return None
        statuses = self._launcher.status([self._ref])
        status = next(status for status in statuses if status.trial == self._trial)
        self._ask_at = time.monotonic() + self._every_s
        if status.state is not self._state:
            self._state = status.state
            self._say(f"{self._ref.job_id}: {describe_status(status)}")
        if status.state is not JobState.UNKNOWN or status.is_silent:
            self._unknown_since = None
            return status if status.state.is_terminal else None
        self._unknown_since = self._unknown_since or time.monotonic()
        return status if time.monotonic() - self._unknown_since > UNKNOWN_LIMIT_S else None


def exit_code_of(status: JobStatus) -> int:
    """Return 0 for a success, else the last attempt's exit code, or 1."""
    if status.state is JobState.SUCCEEDED:
        return EXIT_DONE
    code = None if status.attempt is None else status.attempt.exit_code
    return code or EXIT_FAILED


def ask_every_s(ref: JobRef) -> float:
    """Return the pause between two queries about a job, in seconds."""
    return _ASK_HERE_EVERY_S if BACKENDS.get(ref.backend, SiteOptions).is_here else _ASK_EVERY_S


def require_trial(ref: JobRef, trial: int | None) -> None:
    """Refuse a trial that a job does not have; None means all trials. Raises: ConfigError."""
    num_trials = len(read_plan(job_path_of(ref.home)).trials)
    if trial is not None and not 0 <= trial < num_trials:
        raise ConfigError(
            f"job {ref.job_id} has no trial {trial}",
            allowed=f"0 to {num_trials - 1}",
            next_step=f"`strop status {ref.job_id}` lists the trials",
        )


class _Notices:
    """Reports changes: drops a message that repeats the last one of its kind."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self._last: dict[str, str] = {}

    def say_new(self, kind: str, words: str) -> None:
        """Report a message, unless it equals the last one of its kind."""
        if self._last.get(kind) != words:
            self.say(words)
        self._last[kind] = words


def watch(
    launcher: Launcher,
    home: Path,
    say: Callable[[str], None],
    *,
    pause: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = time.time,
) -> None:
    """Wait until every trial of a run has ended for good, report changes, and submit the run's next job.

    All state is in the job directory: a watcher may be killed and restarted at any time, on any machine that
    sees the directory, and two of them do no more than one. An unknown state ends and starts nothing.

    Raises: CheckRefused for an end without success, with the reason why no next job follows; StoreError if
        no source knows the job any more.
    """
    notices, unknown_s = _Notices(say), 0.0
    while True:
        # Read again each time: another process may have submitted the next job.
        ref = read_ref(job_path_of(home))
        statuses = launcher.status([ref])
        words = f"{ref.job_id}: {', '.join(map(describe_status, statuses))}"
        notices.say_new("state", words)
        has_ended = all(status.state.is_terminal and not status.is_silent for status in statuses)
        if has_ended and not _submit_next(launcher, ref, statuses, notices, now):
            return
        pause_s = ask_every_s(ref) * random.uniform(1.0, 1.25)
        is_lost = any(status.state is JobState.UNKNOWN and not status.is_silent for status in statuses)
        unknown_s = unknown_s + pause_s if is_lost else 0.0
        if unknown_s > LOST_LIMIT_S:
            raise StoreError(
                f"{words}; so it has been for {LOST_LIMIT_S / 60:.0f} minutes",
                allowed="a job that its scheduler or its own record knows",
                next_step=f"look for {ref.job_id} at {ref.site}; --resume goes on in {ref.home}",
            )
        pause(pause_s)


def _submit_next(
    launcher: Launcher,
    ref: JobRef,
    statuses: list[JobStatus],
    notices: _Notices,
    now: Callable[[], float],
) -> bool:
    """Submit the next job if there may be one; return False after a success, True to keep watching.

    Raises: CheckRefused for any other end.
    """
    if all(status.state is JobState.SUCCEEDED for status in statuses):
        return False
    if not isinstance(launcher.backend, Renewable) or not any(map(may_go_on, statuses)):
        raise CheckRefused(
            f"job {ref.job_id} ended as {', '.join(map(describe_status, statuses))}",
            allowed="an end of all trials with success",
            next_step=f"strop logs {ref.job_id}",
        )
    try:
        submitted = launcher.resubmit(ref, submitted_at=now())
    except StoreError as error:
        # The next query shows whether it was accepted; nothing is lost meanwhile.
        notices.say_new("wait", f"the next job waits: {error}")
        return True
    word = "submitted" if submitted.is_new else "was submitted"
    notices.say(f"{submitted.ref.job_id} {word} as the next job of this run, after {ref.job_id}")
    for warning in submitted.warnings:
        notices.say(f"notice: {warning}")
    return True
