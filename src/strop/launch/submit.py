"""Submitting: once for each plan, again by hand after an end (resume), a run's next job (resubmit).

A submission may be killed at any point. The same call again finds what it left: the directory that it wrote,
or the job that the scheduler had accepted before its reference could be written.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from strop.errors import CheckRefused, ConfigError, StoreError
from strop.hardware import free_disk_bytes
from strop.hardware.findings import Finding, Severity, require_none
from strop.io import FileLock
from strop.io.atomic import explain_write_failure, write_bytes_atomically
from strop.launch.attempts import read_attempts
from strop.launch.build_request import make_plan
from strop.launch.contract import Backend, JobPlan, JobRef, JobRequest, JobState, JobStatus, Renewable
from strop.launch.index import note_job
from strop.launch.job_dir import (
    CANCELLED_NAME,
    REFUSED_NAME,
    find_job_dirs_of,
    has_plan,
    has_ref,
    job_path_of,
    name_job_dir,
    read_plan,
    read_ref,
    refuse_foreign_job_dir,
    update_job_dir,
    write_job_dir,
    write_ref,
)
from strop.launch.secrets import remove_secrets
from strop.launch.status import find_statuses

SETTLE_LIMIT_S = 10.0
"""How long a scheduler may take to see the end of a job whose record says that it has ended."""
MIN_FREE_BYTES = 1 << 30
_ASK_EVERY_S = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Submitted:
    """The result of a submission."""

    ref: JobRef
    plan: JobPlan
    is_new: bool
    """False: the same job was submitted before, and this is its reference."""
    notice: str = ""
    """Why the job is not in the list of jobs."""
    warnings: tuple[str, ...] = ()
    """What a person must do by hand, because a step other than the submission itself failed."""


class Submitter:
    """Submits to one backend."""

    def __init__(self, backend: Backend, *, environ: Mapping[str, str] | None = None) -> None:
        self.backend = backend
        self.environ = os.environ if environ is None else environ

    def submit(self, request: JobRequest, *, is_new: bool = False) -> Submitted:
        """Submit once: the same plan again is the job that it made the first time.

        `is_new`: another job, even of the same plan or name.
        Raises: CheckRefused if `check` finds an error, another plan has the name, or the scheduler refuses;
            StoreError if the job directory cannot be written.
        """
        plan, root = make_plan(request, self.backend), Path(request.home).parent
        if not root.is_dir():
            # There cannot be an earlier one. A refused submission leaves no folder behind.
            require_none(check_plan(self.backend, plan))
        with lock_name(root, plan.name):
            earlier = None if is_new else self._find_earlier(plan, root)
            if earlier is None:
                home, spec = Path(request.home), request.resolved.spec
                if has_plan(home) and spec.output.dir is not None:
                    raise CheckRefused(
                        f"{home} is the directory of another job",
                        allowed="a directory of its own for every job",
                        next_step="name another output.dir, or go on in it with --resume",
                    )
                if has_plan(home):
                    # It has been taken since it was named.
                    home = name_job_dir(home.parent, spec.name, request.submitted_at)
                request = replace(request, home=str(home))
            elif has_ref(earlier):
                return Submitted(ref=read_ref(job_path_of(earlier)), plan=plan, is_new=False)
            else:
                request = replace(request, home=str(earlier))
            plan = make_plan(request, self.backend)
            accepted = None if earlier is None else self.backend.recover(plan)
            if accepted is not None:
                return self._record_accepted(accepted, plan, is_new=False)
            require_none(check_plan(self.backend, plan))
            return self._write_and_submit(plan, request)

    def resume(self, home: Path, request: JobRequest) -> Submitted:
        """Submit a job again that has ended without success, in its own directory, from its last checkpoint.

        Raises: CheckRefused if it may still run, has succeeded, or is another run.
        """
        with lock_name(home.parent, read_plan(job_path_of(home)).name):
            old = read_plan(job_path_of(home))
            last = read_ref(job_path_of(home)) if has_ref(home) else None
            num_past = 0 if last is None else self._count_attempts(last, old)
            request = replace(request, home=str(home), num_past=num_past)
            plan = make_plan(request, self.backend)
            refuse_other_run(plan, old)
            accepted = self.backend.recover(old)
            if accepted is not None and (last is None or accepted.job_id != last.job_id):
                # A resume that was killed before it could write the reference of what it had submitted.
                return self._record_accepted(accepted, old, is_new=False)
            if last is not None:
                self._refuse_running(last)
                if isinstance(self.backend, Renewable):
                    start_step = self.backend.find_saved_step(last)
                    plan = replace(plan, follows=last.job_id, start_step=start_step)
            require_none(check_plan(self.backend, plan))
            return self._write_and_submit(plan, request, is_resumed=True)

    def resubmit(self, ref: JobRef, *, submitted_at: float) -> Submitted:
        """Submit a run's next job from what its directory holds: the same code, spec and resources.

        Idempotent: twice, by two callers at once, or again after a kill at any point, it is one job.
        Raises: CheckRefused if there may be no next one, `check` finds an error or the scheduler refuses;
            StoreError where something does not answer.
        """
        home = Path(ref.home)
        with lock_name(home.parent, read_plan(job_path_of(home)).name):
            old, last = read_plan(job_path_of(home)), read_ref(job_path_of(home))
            if last.job_id != ref.job_id:
                return Submitted(ref=last, plan=old, is_new=False)
            is_begun = old.follows == last.job_id
            if is_begun:
                # Killed after the next job's plan was written, which does not say whether it was submitted.
                accepted = self.backend.recover(old)
                if accepted is not None and accepted.job_id != last.job_id:
                    return self._record_accepted(accepted, old, is_new=False)
            refuse_next(self.backend, old, find_statuses(self.backend, [last]), is_begun=is_begun)
            self._refuse_running(last)
            assert isinstance(self.backend, Renewable)  # `refuse_next` refuses other backends.
            plan = old
            if not is_begun:
                plan = replace(
                    old,
                    submitted_at=submitted_at,
                    num_past=self._count_attempts(last, old),
                    follows=last.job_id,
                    start_step=self.backend.find_saved_step(last),
                    num_resubmitted=old.num_resubmitted + 1,
                )
                plan = self.backend.renew(plan, submitted_at=submitted_at)
            require_none(check_plan(self.backend, plan))
            update_job_dir(plan)
            return self._record_accepted(self.backend.submit(plan), plan, is_new=True)

    def _find_earlier(self, plan: JobPlan, root: Path) -> Path | None:
        """Return the directory of the same plan's job, if there is one.

        Raises: CheckRefused if the name belongs to another plan's job.
        """
        found = find_job_dirs_of(root, plan.name)
        named = Path(plan.home)
        if has_plan(named) and named not in [home for home, _ in found]:
            # output.dir may give a job directory any name.
            found.insert(0, (named, read_plan(job_path_of(named))))
        same = [home for home, other in found if other.plan_hash == plan.plan_hash]
        if same:
            return same[0]
        if found:
            home, other = found[0]
            raise CheckRefused(
                f"the name {plan.name} belongs to {home.name}, whose plan is another"
                f" ({other.plan_hash} there, {plan.plan_hash} here)",
                allowed="one plan for a name, so that nothing is submitted twice by mistake",
                next_step="change `name` in the run file, or submit with --new",
            )
        return None

    def _refuse_running(self, ref: JobRef) -> None:
        """Refuse to submit a job again that has succeeded or may still run.

        Its record shows an end earlier than its scheduler does, so both are asked.
        """
        deadline = time.monotonic() + SETTLE_LIMIT_S
        while True:
            states = [one.state for one in find_statuses(self.backend, [ref])]
            running: list[JobState] = [
                state
                for state in states
                if state is JobState.SUCCEEDED or not (state.is_terminal or state is JobState.UNKNOWN)
            ]
            answers = self.backend.poll([ref])
            living = [answer.state for answer in answers.values() if not answer.state.is_terminal]
            # Only an end that is recorded and not settled yet is worth waiting for.
            if running or not living or time.monotonic() > deadline:
                break
            time.sleep(_ASK_EVERY_S)
        running += living
        if running:
            raise CheckRefused(
                f"job {ref.job_id} of {ref.home} is {running[0].value}",
                allowed="a job that has ended without success: two jobs would write into one run",
                next_step="wait for its end, or `strop cancel` it",
            )

    def _count_attempts(self, ref: JobRef, plan: JobPlan) -> int:
        """Return the first number that no attempt of a job has yet."""
        found = [
            one for trial in plan.trials for one in read_attempts(self.backend.open_record(ref, trial.index))
        ]
        return max([one.number + 1 for one in found], default=plan.num_past)

    def _write_and_submit(self, plan: JobPlan, request: JobRequest, *, is_resumed: bool = False) -> Submitted:
        job_path = job_path_of(plan.home)
        if not is_resumed:
            refuse_foreign_job_dir(plan)
        with ExitStack() as undo:
            # On any failure, an interrupt from the keyboard too.
            undo.callback(remove_secrets, job_path)
            write_job_dir(plan, request, self.environ)
            undo.pop_all()
        try:
            ref = self.backend.submit(plan)
        except (CheckRefused, ConfigError) as error:
            remove_secrets(job_path)
            write_bytes_atomically(job_path / REFUSED_NAME, str(error).encode())
            raise
        return self._record_accepted(ref, plan, is_new=True)

    def _record_accepted(self, ref: JobRef, plan: JobPlan, *, is_new: bool) -> Submitted:
        """Write the reference of an accepted job."""
        write_ref(ref)
        (job_path_of(plan.home) / REFUSED_NAME).unlink(missing_ok=True)
        notice, warnings = "", tuple(ref.details.get("warnings", ()))
        try:
            note_job(ref, self.environ)
        except StoreError as error:
            # It is submitted. The list only helps to find it from other folders.
            notice = str(error)
        return Submitted(ref=ref, plan=plan, is_new=is_new, notice=notice, warnings=warnings)


def check_plan(backend: Backend, plan: JobPlan) -> list[Finding]:
    """Return what would stop the job, reading only; the worst first."""
    home = Path(plan.home)
    free_bytes = free_disk_bytes(home)
    found = backend.probe(plan)
    if free_bytes < MIN_FREE_BYTES:
        no_space = Finding(
            code="disk",
            given=f"{home}: {free_bytes / 1e9:.2f} GB are free",
            allowed=f"{MIN_FREE_BYTES / 1e9:.1f} GB or more for logs and checkpoints",
            next_step="free some, or name another output.root",
        )
        found = [no_space, *found]
    order = list(Severity)
    return sorted(found, key=lambda finding: order.index(finding.severity))


def lock_name(root: Path, name: str) -> FileLock:
    """Return the lock of a name: two submissions of it in one second would be two jobs."""
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise explain_write_failure(error, root) from error
    return FileLock(root / f".{name}.submit.lock")


# Which job may follow in the directory of one that has ended. By itself the run goes on after exit code 75
# and after its time limit, at most job.max_requeue times, and only if it has a newer checkpoint than at its
# start. Never after a cancellation, also one that came when the job had ended.


def mark_cancelled(ref: JobRef) -> JobRef:
    """Record that a job is cancelled; return the job that is meant: its next one, if there is one already.

    Under the lock of the job's name. Raises: StoreError if the disk fails.
    """
    job_path = job_path_of(ref.home)
    newest = read_ref(job_path)
    if newest.job_id != ref.job_id and read_plan(job_path).follows == ref.job_id:
        ref = newest
    write_bytes_atomically(job_path / CANCELLED_NAME, ref.job_id.encode())
    return ref


def describe_status(status: JobStatus) -> str:
    """Return a trial's state, and why it is so where that is known."""
    return f"{status.state}{f' ({status.reason})' if status.reason else ''}"


def may_go_on(status: JobStatus) -> bool:
    """Whether a trial ended in a way after which the next job would go on."""
    return status.state is JobState.TIMEOUT or (status.state is JobState.FAILED and status.is_saved)


def refuse_next(backend: Backend, plan: JobPlan, statuses: Sequence[JobStatus], *, is_begun: bool) -> None:
    """Refuse to submit the next job by itself. `is_begun`: its plan has been written already.

    Raises: CheckRefused with the reason; StoreError if a place does not answer.
    """
    reason = _find_objection(backend, plan, statuses, is_begun)
    if reason:
        ended = ", ".join(map(describe_status, statuses))
        raise CheckRefused(
            f"job {statuses[0].ref.job_id} ended as {ended}, and is not submitted again: {reason}",
            allowed="an end with 75 or by the time limit that left a newer checkpoint, job.max_requeue times",
            next_step=f"read `strop logs {statuses[0].ref.job_id}`; --resume goes on all the same",
        )


def _find_objection(
    backend: Backend, plan: JobPlan, statuses: Sequence[JobStatus], is_begun: bool
) -> str | None:
    ref = statuses[0].ref
    if not isinstance(backend, Renewable):
        return "this scheduler starts jobs again by itself"
    path = job_path_of(ref.home) / CANCELLED_NAME
    try:
        is_cancelled = path.read_text().strip() == ref.job_id
    except FileNotFoundError:
        is_cancelled = False
    except OSError as error:
        raise StoreError(
            f"{path} cannot be read ({error.strerror})",
            allowed="a job directory that can be read",
            next_step="check its rights",
        ) from error
    if is_cancelled or any(one.state is JobState.CANCELLED for one in statuses):
        return "it was cancelled"
    if len(statuses) > 1:
        return "trials of a sweep go on by hand"
    if not may_go_on(statuses[0]) or statuses[0].is_silent:
        return "this is no end to go on from"
    return None if is_begun else _find_spent(backend, plan, ref)


def _find_spent(backend: Renewable, plan: JobPlan, ref: JobRef) -> str | None:
    """Return why a run may have no further job: its budget is spent, or the last one made no progress."""
    if plan.num_resubmitted >= plan.max_requeue:
        return f"job.max_requeue={plan.max_requeue}, and that often it was"
    step = backend.find_saved_step(ref)
    if step is not None and (plan.start_step is None or step > plan.start_step):
        return None
    began = "without one" if plan.start_step is None else f"from step {plan.start_step}"
    now = "none" if step is None else f"step {step}"
    return f"no newer checkpoint: it began {began}, and now there is {now}"


def refuse_other_run(plan: JobPlan, old: JobPlan) -> None:
    """Refuse to go on in the directory of another run, or from another site. Raises: CheckRefused."""
    if plan.spec_digest != old.spec_digest or plan.command != old.command:
        raise CheckRefused(
            f"{old.home} is a run of another spec",
            allowed="the run file that it was submitted with; only job, store and output may differ",
            next_step="submit it as a new job, without --resume",
        )
    if (plan.site, plan.backend) != (old.site, old.backend):
        raise CheckRefused(
            f"{old.home} was submitted to {old.site}, and this is {plan.site}",
            allowed="the same site: only there it can be seen whether the job still runs",
            next_step=f"submit with --on {old.site}",
        )
    if [one.overrides for one in plan.trials] != [one.overrides for one in old.trials]:
        raise CheckRefused(
            f"{old.home} has {len(old.trials)} trials, and another sweep is asked for",
            allowed="the same --sweep as at first",
            next_step="repeat it, or submit a new job",
        )
