"""The verbs of jobs, once for all backends: plan, check, submit, status, logs, cancel.

`fetch` and `drill` have files of their own. What a verb may touch: `plan` nothing; `check`, `status` and
`logs` only read; `submit` fills the job's home and makes one call to the scheduler; `cancel` sends signals,
and what became of them is read from the state afterwards, never from the call.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from strop.errors import ConfigError, explain_refusal
from strop.hardware.findings import Finding
from strop.launch.attempts import read_attempts
from strop.launch.checking import check_plan
from strop.launch.contract import (
    AttemptRecord,
    Backend,
    JobPlan,
    JobRef,
    JobRequest,
    JobState,
    JobStatus,
    Renewable,
    StatusSource,
)
from strop.launch.home import job_path_of, read_plan
from strop.launch.logs import FileLogs, FilteredLogs, LogFilter, follow, require_logs
from strop.launch.next_job import forbid_next
from strop.launch.planning import make_plan
from strop.launch.secrets import remove_secrets
from strop.launch.standing import find_statuses
from strop.launch.submitting import Submitted, Submitter, lock_name
from strop.record.files import LogLine

KILL_LIMIT_S = 60.0
"""How long a scheduler may take to show that a killed job has ended."""
UNKNOWN_LIMIT_S = 60.0
"""How long logs of a job are followed that its scheduler does not know: it may just have been submitted."""
_ASK_EVERY_S = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class CancelOutcome:
    """What became of a cancellation."""

    statuses: tuple[JobStatus, ...]
    ended_by: str
    """`it had ended`, `TERM` or `KILL`; empty where its end was not seen."""


class Launcher:
    """All verbs over one backend."""

    def __init__(self, backend: Backend, *, environ: Mapping[str, str] | None = None) -> None:
        self.backend = backend
        self.environ = os.environ if environ is None else environ
        self._submitter = Submitter(backend, self.environ)

    def plan(self, request: JobRequest) -> JobPlan:
        """Return what would be submitted, without any effect. Raises: ConfigError."""
        return make_plan(request, self.backend)

    def check(self, plan: JobPlan) -> list[Finding]:
        """Return what would stop the job, reading only; the worst first."""
        return check_plan(self.backend, plan)

    def submit(self, request: JobRequest, *, is_new: bool = False) -> Submitted:
        """Submit once: the same plan again is the job that it made the first time. See `Submitter.submit`."""
        return self._submitter.submit(request, is_new=is_new)

    def resume(self, home: Path, request: JobRequest) -> Submitted:
        """Submit a job again that has ended without success, in its own home. See `Submitter.resume`."""
        return self._submitter.resume(home, request)

    def resubmit(self, ref: JobRef, *, submitted_at: float) -> Submitted:
        """Submit the next job of a run from what its home holds. See `Submitter.resubmit`."""
        return self._submitter.resubmit(ref, submitted_at=submitted_at)

    def status(self, refs: Sequence[JobRef]) -> list[JobStatus]:
        """Return where every member of some jobs stands, by one question to the scheduler."""
        return find_statuses(self.backend, refs)

    def logs(self, ref: JobRef, member: int, wanted: LogFilter, *, is_followed: bool) -> Iterator[LogLine]:
        """Yield the lines of a member's logs; followed, until it has ended.

        Raises: ConfigError if there is no such member; StoreError naming the place, if there is no log and
            none is waited for.
        """
        require_member(ref, member)
        source = self.backend.open_logs(ref, member)
        record = self.backend.open_record(ref, member)
        files = FileLogs(record, wanted) if source is None else FilteredLogs(source, wanted)
        if is_followed:
            over = _End(lambda: self._members(ref, member)[0])
            yield from follow(files, is_over=over.is_seen)
            return
        lines = files.read_rest()
        require_logs(files, record)
        yield from lines

    def cancel(self, ref: JobRef, *, member: int | None = None, grace_s: float) -> CancelOutcome:
        """End a job: TERM, wait, KILL. What ended it is read from its state.

        Raises: ConfigError if there is no such member; StoreError if the scheduler does not answer: then
            nothing is known to have ended.
        """
        require_member(ref, member)
        if isinstance(self.backend, Renewable):
            # First: what watches the job would submit the next one as soon as this one has ended.
            with lock_name(Path(ref.home).parent, ref.name):
                ref = forbid_next(ref)
        ended_by = self._end(ref, member, grace_s)
        statuses = self.status([ref])
        if all(_is_settled(one) for one in statuses):
            # One that ends before its first life has nobody to remove them.
            remove_secrets(job_path_of(ref.home))
        mine = tuple(one for one in statuses if member in {None, one.member})
        return CancelOutcome(statuses=mine, ended_by=ended_by)

    def _end(self, ref: JobRef, member: int | None, grace_s: float) -> str:
        """Ask for an end, then force it; return what it took, or nothing where no end was seen."""
        if self._all_ended(ref, member):
            return "it had ended"
        self.backend.stop(ref, member, grace_s=grace_s)
        if self._wait_for_end(ref, member, grace_s):
            return "TERM"
        self.backend.stop(ref, member, grace_s=0.0)
        return "KILL" if self._wait_for_end(ref, member, KILL_LIMIT_S) else ""

    def read_attempts(self, ref: JobRef, member: int) -> list[AttemptRecord]:
        """Return what a member wrote of its attempts. Raises: StoreError."""
        return read_attempts(self.backend.open_record(ref, member))

    def _members(self, ref: JobRef, member: int | None) -> tuple[JobStatus, ...]:
        return tuple(one for one in self.status([ref]) if member in {None, one.member})

    def _all_ended(self, ref: JobRef, member: int | None) -> bool:
        return all(one.state.is_terminal for one in self._members(ref, member))

    def _wait_for_end(self, ref: JobRef, member: int | None, limit_s: float) -> bool:
        deadline = time.monotonic() + limit_s
        while not (ended := self._all_ended(ref, member)) and time.monotonic() < deadline:
            time.sleep(_ASK_EVERY_S)
        return ended


class _End:
    """The end of a member, for whoever follows its logs: also one that nobody can tell any more."""

    def __init__(self, ask: Callable[[], JobStatus]) -> None:
        self._ask = ask
        self._unknown_since: float | None = None

    def is_seen(self) -> bool:
        """Whether it has ended, or a scheduler that answers has known nothing of it for long."""
        status = self._ask()
        is_unknown = status.state is JobState.UNKNOWN and not status.is_silent
        if not is_unknown:
            self._unknown_since = None
            return status.state.is_terminal
        self._unknown_since = self._unknown_since or time.monotonic()
        return time.monotonic() - self._unknown_since > UNKNOWN_LIMIT_S


def _is_settled(status: JobStatus) -> bool:
    """Whether a member will not live again by itself, as its scheduler or its success says."""
    is_said = status.source is StatusSource.SCHEDULER or status.state is JobState.SUCCEEDED
    return status.state.is_terminal and is_said


def require_member(ref: JobRef, member: int | None) -> None:
    """Refuse a member that a job does not have. None: all of them. Raises: ConfigError."""
    num_members = len(read_plan(job_path_of(ref.home)).members)
    if member is not None and not 0 <= member < num_members:
        raise ConfigError(
            explain_refusal(
                f"job {ref.job_id} has no member {member}",
                allowed=f"0 to {num_members - 1}",
                next_step=f"`strop status {ref.job_id}` lists the members",
            )
        )
