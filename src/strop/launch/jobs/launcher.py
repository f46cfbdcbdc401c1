"""The verbs of jobs, once for all backends: plan, check, submit, status, logs, cancel.

`fetch` and `drill` have files of their own. What a verb may touch: `plan` nothing; `check`, `status` and
`logs` only read; `submit` fills the job's home and makes one call to the scheduler; `cancel` sends signals,
and what became of them is read from the state afterwards, never from the call.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from strop.errors import CheckRefused, StoreError, explain_refusal
from strop.hardware import free_disk_bytes
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
    Problem,
    Severity,
    StatusSource,
)
from strop.launch.jobs.files import DirectoryRecord
from strop.launch.jobs.filling import fill_home, find_homes_of
from strop.launch.jobs.home import PLAN_NAME, STATE_NAME, has_ref, job_path_of, read_plan, read_ref, write_ref
from strop.launch.jobs.index import note_job
from strop.launch.jobs.logs import FileLogs, LogFilter, follow, require_logs
from strop.launch.jobs.planning import make_plan, move_plan
from strop.launch.jobs.secrets import remove_secrets
from strop.launch.jobs.truth import Judgement, judge
from strop.store import FileLock
from strop.store.atomic import explain_write_failure, write_bytes_atomically

REFUSED_NAME = "refused.txt"
"""The scheduler's own words, where it refused the job."""
MIN_FREE_BYTES = 1 << 30
KILL_LIMIT_S = 60.0
"""How long a scheduler may take to show that a killed job has ended."""
SETTLE_LIMIT_S = 10.0
"""How long a scheduler may take to see the end of a job whose record says that it has ended."""
_ASK_EVERY_S = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Submitted:
    """What became of a submission."""

    ref: JobRef
    plan: JobPlan
    is_new: bool
    """False: the very same job was submitted before, and this is its reference."""


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

    def check(self, plan: JobPlan) -> list[Problem]:
        """Return what would stop the job, reading only; the worst first."""
        found = [*_check_disk(Path(plan.home)), *self.backend.probe(plan)]
        order = list(Severity)
        return sorted(found, key=lambda problem: order.index(problem.severity))

    def submit(self, request: JobRequest, *, is_new: bool = False) -> Submitted:
        """Submit once: the same plan again is the job that it made the first time.

        `is_new`: another job, even of the same plan or name.
        Raises: CheckRefused if `check` finds an error, another plan has the name, or the scheduler refuses;
            StoreError if the home cannot be filled.
        """
        root = Path(request.home).parent
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise explain_write_failure(error, root) from error
        # One at a time for each name: two submissions in one second would be two jobs.
        with FileLock(root / f".{request.resolved.spec.name}.submit.lock"):
            plan = self.plan(request)
            earlier = None if is_new else self._find_earlier(plan, root)
            if earlier is not None:
                if has_ref(earlier):
                    return Submitted(ref=read_ref(job_path_of(earlier)), plan=plan, is_new=False)
                request = move_plan(request, str(earlier))
                plan = self.plan(request)
                accepted = self.backend.find_accepted(plan)
                if accepted is not None:
                    write_ref(accepted)
                    return Submitted(ref=accepted, plan=plan, is_new=False)
            self._refuse_problems(plan)
            fill_home(plan, request, self._environ)
            return Submitted(ref=self._hand_over(plan), plan=plan, is_new=True)

    def resume(self, home: Path, request: JobRequest) -> Submitted:
        """Submit a job again that has ended without success, in its own home, from its last checkpoint.

        Raises: CheckRefused if it may still live, has succeeded, or is another run.
        """
        old = read_plan(job_path_of(home))
        if has_ref(home):
            self._refuse_living(read_ref(job_path_of(home)))
        request = replace(move_plan(request, str(home)), first_number=_count_attempts(old))
        plan = self.plan(request)
        if plan.spec_digest != old.spec_digest:
            raise CheckRefused(
                explain_refusal(
                    f"{home} is a run of another spec",
                    allowed="the run file that it was submitted with; only job, store and output may differ",
                    next_step="submit it as a new job, without --resume",
                )
            )
        self._refuse_problems(plan)
        (job_path_of(home) / PLAN_NAME).unlink()
        fill_home(plan, request, self._environ)
        return Submitted(ref=self._hand_over(plan), plan=plan, is_new=True)

    def status(self, refs: Sequence[JobRef]) -> list[JobStatus]:
        """Return where every member of some jobs stands, by one question to the scheduler."""
        try:
            answers: Mapping[tuple[str, int], Answer] | None = self.backend.ask(refs)
        except StoreError as error:
            answers, silence = None, str(error)
        else:
            silence = ""
        return [
            self._judge(ref, member.index, plan, answers, silence)
            for ref in refs
            for plan in [read_plan(job_path_of(ref.home))]
            for member in plan.members
        ]

    def logs(self, ref: JobRef, member: int, wanted: LogFilter, *, is_followed: bool) -> Iterator[LogLine]:
        """Yield the lines of a member's logs; followed, until it has ended.

        Raises: StoreError naming the place, if there is no log and none is waited for.
        """
        source = self.backend.open_logs(ref, member)
        if source is None:
            record = self.backend.open_record(ref, member)
            files = FileLogs(record, wanted)
            if not is_followed:
                lines = files.read_rest()
                require_logs(files, record)
                yield from lines
                return
            yield from follow(files, is_over=lambda: self._is_over(ref, member))
            return
        over = not is_followed
        while True:
            lines = source.read_new()
            yield from lines
            if over and not lines:
                return
            over = over or self._is_over(ref, member)
            time.sleep(0.0 if lines else 1.0)

    def cancel(self, ref: JobRef, *, member: int | None = None, grace_s: float) -> CancelOutcome:
        """End a job: TERM, wait, KILL. What ended it is read from its state.

        Raises: StoreError if the scheduler does not answer: then nothing is known to have ended.
        """
        if self._all_ended(ref, member):
            return CancelOutcome(statuses=self._members(ref, member), ended_by="it had ended")
        self.backend.stop(ref, member, grace_s=grace_s)
        if self._wait_for_end(ref, member, grace_s):
            return CancelOutcome(statuses=self._members(ref, member), ended_by="TERM")
        self.backend.stop(ref, member, grace_s=0.0)
        ended = self._wait_for_end(ref, member, KILL_LIMIT_S)
        return CancelOutcome(statuses=self._members(ref, member), ended_by="KILL" if ended else "")

    def read_attempts(self, ref: JobRef, member: int) -> list[AttemptRecord]:
        """Return what a member wrote of its attempts. Raises: StoreError."""
        return read_attempts(self.backend.open_record(ref, member))

    def _find_earlier(self, plan: JobPlan, root: Path) -> Path | None:
        """Return the home of the same plan, if there is one.

        Raises: CheckRefused if the name belongs to another plan's job.
        """
        found = find_homes_of(root, plan.name)
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

    def _refuse_problems(self, plan: JobPlan) -> None:
        errors = [problem for problem in self.check(plan) if problem.severity is Severity.ERROR]
        if errors:
            raise CheckRefused("\n".join(map(str, errors)))

    def _refuse_living(self, ref: JobRef) -> None:
        """Refuse to let a job live again whose first life may go on.

        Its record says earlier that it has ended than its scheduler does, so that is asked too.
        """
        deadline = time.monotonic() + SETTLE_LIMIT_S
        while True:
            answers = self.backend.ask([ref])
            living = [answer for answer in answers.values() if not answer.state.is_terminal]
            if not living or time.monotonic() > deadline:
                break
            time.sleep(_ASK_EVERY_S)
        standing = [answer.state for answer in living]
        standing += [one.state for one in self.status([ref]) if not _may_live_again(one.state)]
        if standing:
            raise CheckRefused(
                explain_refusal(
                    f"job {ref.job_id} of {ref.home} is {standing[0].value}",
                    allowed="a job that has ended without success: two lives would write into one run",
                    next_step="wait for its end, or `strop cancel` it",
                )
            )

    def _hand_over(self, plan: JobPlan) -> JobRef:
        job_path = job_path_of(plan.home)
        try:
            ref = self.backend.hand_over(plan)
        except CheckRefused as error:
            write_bytes_atomically(job_path / REFUSED_NAME, str(error).encode())
            remove_secrets(job_path)
            raise
        write_ref(ref)
        (job_path / REFUSED_NAME).unlink(missing_ok=True)
        note_job(ref, self._environ)
        return ref

    def _judge(
        self,
        ref: JobRef,
        member: int,
        plan: JobPlan,
        answers: Mapping[tuple[str, int], Answer] | None,
        silence: str,
    ) -> JobStatus:
        """Return where one member stands, and keep it as the last known state."""
        try:
            attempts = self.read_attempts(ref, member)
        except StoreError as error:
            attempts, silence = [], silence or str(error)
        answer = (answers or {}).get((ref.job_id, member))
        attempts = [one for one in attempts if one.number >= plan.first_number]
        found = judge(attempts, answer, max_requeue=plan.max_requeue, first_number=plan.first_number)
        if found.state is JobState.UNKNOWN and silence:
            return _recall(ref, member, silence)
        status = JobStatus(
            ref=ref,
            member=member,
            state=found.state,
            reason=_explain_unknown(found, self.backend, ref, member),
            source=found.source,
            attempt=attempts[-1] if attempts else None,
            nodes=(answer.nodes if answer else "") or ",".join(attempts[-1].nodes if attempts else ()),
            since=answer.since if answer else None,
        )
        _remember(status)
        return status

    def _is_over(self, ref: JobRef, member: int) -> bool:
        return self._members(ref, member)[0].state.is_terminal

    def _members(self, ref: JobRef, member: int | None) -> tuple[JobStatus, ...]:
        return tuple(one for one in self.status([ref]) if member in {None, one.member})

    def _all_ended(self, ref: JobRef, member: int | None) -> bool:
        return all(one.state.is_terminal for one in self._members(ref, member))

    def _wait_for_end(self, ref: JobRef, member: int | None, limit_s: float) -> bool:
        deadline = time.monotonic() + limit_s
        while not (ended := self._all_ended(ref, member)) and time.monotonic() < deadline:
            time.sleep(_ASK_EVERY_S)
        return ended


def _may_live_again(state: JobState) -> bool:
    """Whether a state is no success, and none of a job that its scheduler still knows."""
    return state is JobState.UNKNOWN or (state.is_terminal and state is not JobState.SUCCEEDED)


def _count_attempts(plan: JobPlan) -> int:
    """Return the number that the next attempt gets: above those of all members."""
    numbers = [
        attempt.number
        for member in plan.members
        for attempt in read_attempts(DirectoryRecord(Path(member.path)))
    ]
    return max(numbers, default=-1) + 1


def _check_disk(home: Path) -> list[Problem]:
    """Look for room where the job's home will be."""
    place = next((path for path in (home, *home.parents) if path.is_dir()), None)
    free = None if place is None else free_disk_bytes(place)
    if free is not None and free >= MIN_FREE_BYTES:
        return []
    return [
        Problem(
            code="disk",
            given=f"{home}: {'its disk is unknown' if free is None else f'{free / 1e9:.2f} GB are free'}",
            allowed=f"{MIN_FREE_BYTES / 1e9:.1f} GB or more for logs and checkpoints",
            next_step="free some, or name another output.root",
            severity=Severity.UNKNOWN if free is None else Severity.ERROR,
        )
    ]


def _explain_unknown(found: Judgement, backend: Backend, ref: JobRef, member: int) -> str:
    if found.state is not JobState.UNKNOWN or found.source is not StatusSource.NOTHING:
        return found.reason
    place = backend.open_record(ref, member).describe("attempts")
    return f"the scheduler does not know it, and there is no record in {place}"


def _remember(status: JobStatus) -> None:
    """Keep a state for the day when nobody answers. It is a convenience: a full disk changes nothing."""
    path = job_path_of(status.ref.home) / STATE_NAME
    states = _read_states(path)
    states[str(status.member)] = {"state": status.state.value, "reason": status.reason, "at": time.time()}
    try:
        write_bytes_atomically(path, json.dumps(states).encode())
    except StoreError:
        return


def _recall(ref: JobRef, member: int, silence: str) -> JobStatus:
    """Return the last known state with its age, where nobody answers."""
    known = _read_states(job_path_of(ref.home) / STATE_NAME).get(str(member))
    if known is None:
        return JobStatus(
            ref=ref, member=member, state=JobState.UNKNOWN, reason=silence, source=StatusSource.NOTHING
        )
    return JobStatus(
        ref=ref,
        member=member,
        state=JobState(known["state"]),
        reason=silence,
        source=StatusSource.LAST_KNOWN,
        age_s=max(0.0, time.time() - float(known["at"])),
    )


def _read_states(path: Path) -> dict[str, dict[str, Any]]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
