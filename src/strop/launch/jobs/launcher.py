"""The verbs of jobs, once for all backends: plan, check, submit, status, logs, cancel.

`fetch` and `drill` have files of their own. What a verb may touch: `plan` nothing; `check`, `status` and
`logs` only read; `submit` fills the job's home and makes one call to the scheduler; `cancel` sends signals,
and what became of them is read from the state afterwards, never from the call.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from strop.errors import EXIT_INTERRUPTED, CheckRefused, ConfigError, StoreError, explain_refusal
from strop.hardware import free_disk_bytes
from strop.hardware.findings import Finding, Severity, require_none
from strop.launch.jobs.attempts import read_attempts
from strop.launch.jobs.contract import (
    Answer,
    AttemptRecord,
    Backend,
    JobPlan,
    JobRef,
    JobRequest,
    JobState,
    JobStatus,
    LogLine,
    Renewable,
    StatusSource,
)
from strop.launch.jobs.filling import fill_home, find_homes_of, name_home, refill_home, refuse_foreign_home
from strop.launch.jobs.home import has_plan, has_ref, job_path_of, read_plan, read_ref, write_ref
from strop.launch.jobs.index import note_job
from strop.launch.jobs.last_known import recall, remember
from strop.launch.jobs.logs import FileLogs, FilteredLogs, LogFilter, follow, require_logs
from strop.launch.jobs.next_job import forbid_next, make_next_plan, refuse_next, refuse_other_run
from strop.launch.jobs.planning import make_plan, move_plan
from strop.launch.jobs.secrets import remove_secrets
from strop.launch.jobs.truth import find_split, judge
from strop.store import FileLock
from strop.store.atomic import explain_write_failure, write_bytes_atomically

REFUSED_NAME = "refused.txt"
"""The scheduler's own words, where it refused the job."""
MIN_FREE_BYTES = 1 << 30
KILL_LIMIT_S = 60.0
"""How long a scheduler may take to show that a killed job has ended."""
SETTLE_LIMIT_S = 10.0
"""How long a scheduler may take to see the end of a job whose record says that it has ended."""
UNKNOWN_LIMIT_S = 60.0
"""How long logs of a job are followed that its scheduler does not know: it may just have been submitted."""
_ASK_EVERY_S = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Submitted:
    """What became of a submission."""

    ref: JobRef
    plan: JobPlan
    is_new: bool
    """False: the very same job was submitted before, and this is its reference."""
    notice: str = ""
    """Why the job is not in the list of jobs."""
    warnings: tuple[str, ...] = ()
    """What else a person must do, because it did not work beside the submission itself."""


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
        self._environ = os.environ if environ is None else environ

    def plan(self, request: JobRequest) -> JobPlan:
        """Return what would be submitted, without any effect. Raises: ConfigError."""
        return make_plan(request, self.backend)

    def check(self, plan: JobPlan) -> list[Finding]:
        """Return what would stop the job, reading only; the worst first."""
        found = [*_check_disk(Path(plan.home)), *self.backend.probe(plan)]
        order = list(Severity)
        return sorted(found, key=lambda finding: order.index(finding.severity))

    def submit(self, request: JobRequest, *, is_new: bool = False) -> Submitted:
        """Submit once: the same plan again is the job that it made the first time.

        `is_new`: another job, even of the same plan or name.
        Raises: CheckRefused if `check` finds an error, another plan has the name, or the scheduler refuses;
            StoreError if the home cannot be filled.
        """
        plan, root = self.plan(request), Path(request.home).parent
        if not root.is_dir():
            # There cannot be an earlier one. What is refused leaves no folder behind.
            require_none(self.check(plan))
        with _lock_of(root, plan.name):
            earlier = None if is_new else self._find_earlier(plan, root)
            if earlier is None:
                request = _move_to_free_home(request)
            elif has_ref(earlier):
                return Submitted(ref=read_ref(job_path_of(earlier)), plan=plan, is_new=False)
            else:
                request = move_plan(request, str(earlier))
            plan = self.plan(request)
            accepted = None if earlier is None else self.backend.find_accepted(plan)
            if accepted is not None:
                return self._keep(accepted, plan, is_new=False)
            require_none(self.check(plan))
            return self._fill_and_hand_over(plan, request)

    def resume(self, home: Path, request: JobRequest) -> Submitted:
        """Submit a job again that has ended without success, in its own home, from its last checkpoint.

        Raises: CheckRefused if it may still live, has succeeded, or is another run.
        """
        with _lock_of(home.parent, read_plan(job_path_of(home)).name):
            old = read_plan(job_path_of(home))
            noted = read_ref(job_path_of(home)) if has_ref(home) else None
            num_past = 0 if noted is None else self._count_lives(noted, old)
            request = replace(move_plan(request, str(home)), num_past=num_past)
            plan = self.plan(request)
            refuse_other_run(plan, old)
            accepted = self.backend.find_accepted(old)
            if accepted is not None and (noted is None or accepted.job_id != noted.job_id):
                # A resume that was killed before it could note what it had submitted.
                return self._keep(accepted, old, is_new=False)
            if noted is not None:
                self._refuse_living(noted)
                if isinstance(self.backend, Renewable):
                    start_step = self.backend.find_saved_step(noted, 0)
                    plan = replace(plan, follows=noted.job_id, start_step=start_step)
            require_none(self.check(plan))
            return self._fill_and_hand_over(plan, request, is_resumed=True)

    def resubmit(self, ref: JobRef, *, submitted_at: float) -> Submitted:
        """Submit the next job of a run from what its home holds: the same code, spec and resources.

        Twice, by two at once, or once more after a kill at any place, it is one job.
        Raises: CheckRefused if there may be no next one, `check` finds an error or the scheduler refuses;
            StoreError where something does not answer.
        """
        home = Path(ref.home)
        with _lock_of(home.parent, read_plan(job_path_of(home)).name):
            old, noted = read_plan(job_path_of(home)), read_ref(job_path_of(home))
            if noted.job_id != ref.job_id:
                return Submitted(ref=noted, plan=old, is_new=False)
            is_begun = old.follows == noted.job_id
            if is_begun:
                # Killed after the next job's plan was written: whether it was submitted, that does not say.
                accepted = self.backend.find_accepted(old)
                if accepted is not None and accepted.job_id != noted.job_id:
                    return self._keep(accepted, old, is_new=False)
            refuse_next(self.backend, old, self.status([noted]), is_begun=is_begun)
            self._refuse_living(noted)
            plan = old if is_begun else self._make_next(old, noted, submitted_at)
            require_none(self.check(plan))
            refill_home(plan)
            return self._keep(self.backend.hand_over(plan), plan, is_new=True)

    def _make_next(self, old: JobPlan, noted: JobRef, submitted_at: float) -> JobPlan:
        return make_next_plan(
            self.backend, old, noted, num_past=self._count_lives(noted, old), submitted_at=submitted_at
        )

    def status(self, refs: Sequence[JobRef]) -> list[JobStatus]:
        """Return where every member of some jobs stands, by one question to the scheduler."""
        try:
            answers: Mapping[tuple[str, int], Answer] | None = self.backend.ask(refs)
        except StoreError as error:
            answers, silence = None, str(error)
        else:
            silence = ""
        found: list[JobStatus] = []
        for ref in refs:
            plan = read_plan(job_path_of(ref.home))
            mine = [self._judge(ref, member.index, plan, answers, silence) for member in plan.members]
            remember(ref, mine)
            found += mine
        return found

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
            with _lock_of(Path(ref.home).parent, ref.name):
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

    def _find_earlier(self, plan: JobPlan, root: Path) -> Path | None:
        """Return the home of the same plan, if there is one.

        Raises: CheckRefused if the name belongs to another plan's job.
        """
        found = find_homes_of(root, plan.name)
        named = Path(plan.home)
        if has_plan(named) and named not in [home for home, _ in found]:
            # output.dir may give a home any name.
            found.insert(0, (named, read_plan(job_path_of(named))))
        same = [home for home, other in found if other.plan_hash == plan.plan_hash]
        if same:
            return same[0]
        if found:
            home, other = found[0]
            raise CheckRefused(
                explain_refusal(
                    f"the name {plan.name} belongs to {home.name}, whose plan is another"
                    f" ({other.plan_hash} there, {plan.plan_hash} here)",
                    allowed="one plan for a name, so that nothing is submitted twice by mistake",
                    next_step="change `name` in the run file, or submit with --new",
                )
            )
        return None

    def _refuse_living(self, ref: JobRef) -> None:
        """Refuse to let a job live again whose first life may go on.

        Its record says earlier that it has ended than its scheduler does, so that is asked too.
        """
        deadline = time.monotonic() + SETTLE_LIMIT_S
        while True:
            standing = [one.state for one in self.status([ref]) if not _may_live_again(one.state)]
            answers = self.backend.ask([ref])
            living = [answer.state for answer in answers.values() if not answer.state.is_terminal]
            # Only an end that is recorded and not settled yet is worth waiting for.
            if standing or not living or time.monotonic() > deadline:
                break
            time.sleep(_ASK_EVERY_S)
        standing += living
        if standing:
            raise CheckRefused(
                explain_refusal(
                    f"job {ref.job_id} of {ref.home} is {standing[0].value}",
                    allowed="a job that has ended without success: two lives would write into one run",
                    next_step="wait for its end, or `strop cancel` it",
                )
            )

    def _count_lives(self, ref: JobRef, plan: JobPlan) -> int:
        """Return the first number that no attempt of a job has yet."""
        found = [one for member in plan.members for one in self.read_attempts(ref, member.index)]
        return max([one.number + 1 for one in found], default=plan.num_past)

    def _fill_and_hand_over(
        self, plan: JobPlan, request: JobRequest, *, is_resumed: bool = False
    ) -> Submitted:
        job_path = job_path_of(plan.home)
        if not is_resumed:
            refuse_foreign_home(plan)
        with ExitStack() as undo:
            # Whatever ends it, an interrupt from the keyboard too.
            undo.callback(remove_secrets, job_path)
            fill_home(plan, request, self._environ)
            undo.pop_all()
        try:
            ref = self.backend.hand_over(plan)
        except (CheckRefused, ConfigError) as error:
            remove_secrets(job_path)
            write_bytes_atomically(job_path / REFUSED_NAME, str(error).encode())
            raise
        return self._keep(ref, plan, is_new=True)

    def _keep(self, ref: JobRef, plan: JobPlan, *, is_new: bool) -> Submitted:
        """Note an accepted job."""
        write_ref(ref)
        (job_path_of(plan.home) / REFUSED_NAME).unlink(missing_ok=True)
        notice, warnings = "", tuple(ref.details.get("warnings", ()))
        try:
            note_job(ref, self._environ)
        except StoreError as error:
            # It is submitted. The list only helps to find it from other folders.
            notice = str(error)
        return Submitted(ref=ref, plan=plan, is_new=is_new, notice=notice, warnings=warnings)

    def _judge(
        self,
        ref: JobRef,
        member: int,
        plan: JobPlan,
        answers: Mapping[tuple[str, int], Answer] | None,
        silence: str,
    ) -> JobStatus:
        """Return where one member stands; where nobody tells, its last known state."""
        answer = (answers or {}).get((ref.job_id, member))
        try:
            attempts = self.read_attempts(ref, member)
        except StoreError as error:
            if answer is None or answer.state is JobState.SUCCEEDED:
                # Whether it is a success, only its record says.
                return recall(ref, member, silence or str(error))
            attempts = []
        found = judge(attempts, answer, max_requeue=plan.max_requeue, num_past=plan.num_past)
        if found.state is JobState.UNKNOWN and (silence or found.source is StatusSource.NOTHING):
            return recall(ref, member, silence or self._explain_unknown(ref, member), is_asked=not silence)
        split = find_split(attempts)
        return JobStatus(
            ref=ref,
            member=member,
            state=found.state,
            reason="; ".join(filter(None, [split, found.reason])),
            source=found.source,
            attempt=attempts[-1] if attempts else None,
            nodes=(answer.nodes if answer else "") or ",".join(attempts[-1].nodes if attempts else ()),
            since=answer.since if answer else None,
            is_saved=_is_saved(attempts, answer, plan.num_past),
        )

    def _explain_unknown(self, ref: JobRef, member: int) -> str:
        place = self.backend.open_record(ref, member).describe("attempts")
        return f"the scheduler does not know it, and there is no record in {place}"

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


def _is_saved(attempts: Sequence[AttemptRecord], answer: Answer | None, num_past: int) -> bool:
    """Whether a job's last attempt ended with 75, as its record says, else its scheduler."""
    codes = [one.exit_code for one in attempts if one.number >= num_past]
    if codes and codes[-1] is not None:
        return codes[-1] == EXIT_INTERRUPTED
    return answer is not None and answer.is_saved


def _is_settled(status: JobStatus) -> bool:
    """Whether a member will not live again by itself, as its scheduler or its success says."""
    is_said = status.source is StatusSource.SCHEDULER or status.state is JobState.SUCCEEDED
    return status.state.is_terminal and is_said


def _may_live_again(state: JobState) -> bool:
    """Whether a state is no success, and none of a job that its scheduler still knows."""
    return state is JobState.UNKNOWN or (state.is_terminal and state is not JobState.SUCCEEDED)


def _check_disk(home: Path) -> list[Finding]:
    """Look for room where the job's home will be."""
    free_bytes = free_disk_bytes(home)
    if free_bytes >= MIN_FREE_BYTES:
        return []
    return [
        Finding(
            code="disk",
            given=f"{home}: {free_bytes / 1e9:.2f} GB are free",
            allowed=f"{MIN_FREE_BYTES / 1e9:.1f} GB or more for logs and checkpoints",
            next_step="free some, or name another output.root",
        )
    ]


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


def _lock_of(root: Path, name: str) -> FileLock:
    """Return the lock of a name: two submissions of it in one second would be two jobs."""
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise explain_write_failure(error, root) from error
    return FileLock(root / f".{name}.submit.lock")


def _move_to_free_home(request: JobRequest) -> JobRequest:
    """Return the request for a home that no job has: another one may have been filled since it was named.

    Raises: CheckRefused if the run file or a flag names a home that is taken.
    """
    home, spec = Path(request.home), request.resolved.spec
    if not has_plan(home):
        return request
    if spec.output.dir is not None:
        raise CheckRefused(
            explain_refusal(
                f"{home} is the home of another job",
                allowed="a directory of its own for every job",
                next_step="name another output.dir, or go on in it with --resume",
            )
        )
    return move_plan(request, str(name_home(home.parent, spec.name, request.submitted_at)))
