"""Submit a plan once, again by hand after its end (resume), or the run's next job (resubmit).

A submission may be killed at any point. Repeating the call finds the directory that the first one wrote, or
the job that the scheduler accepted before its reference was written.
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
from strop.io.atomic import write_bytes_atomically
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
    lock_folder,
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
from strop.spec.display import list_differences

SETTLE_LIMIT_S = 10.0
"""Longest time until a scheduler sees the end of a job whose record shows it."""
MIN_FREE_BYTES = 1 << 30
_ASK_EVERY_S = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Submitted:
    """The result of a submission."""

    ref: JobRef
    plan: JobPlan
    is_new: bool
    """False if the same job was submitted before; `ref` is that job."""
    notice: str = ""
    """Why the job is missing in the list of jobs; empty if it is there."""
    warnings: tuple[str, ...] = ()
    """Steps to do by hand, because something other than the submission failed."""


class Submitter:
    """Submits to one backend."""

    def __init__(self, backend: Backend, *, environ: Mapping[str, str] | None = None) -> None:
        self.backend = backend
        self.environ = os.environ if environ is None else environ

    def submit(self, request: JobRequest, *, is_new: bool = False) -> Submitted:
        """Submit once: for an equal plan return the job that was submitted first.

        `is_new`: submit another job, even of the same plan or name.
        Raises: CheckRefused if `check` finds an error, another plan has the name, or the scheduler refuses;
            StoreError if the job directory cannot be written.
        """
        plan, root = make_plan(request, self.backend), Path(request.home).parent
        if not root.is_dir():
            # There can be no earlier job. A refused submission leaves no folder behind.
            require_none(check_plan(self.backend, plan))
        with lock_folder(Path(request.home)):
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
                    # Another job took the directory after it was named.
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
        """Resubmit a job that ended without success, in its own directory, from its last checkpoint.

        Raises: CheckRefused if the job may still run, has succeeded, or is of another run.
        """
        with lock_folder(home):
            old = read_plan(job_path_of(home))
            last = read_ref(job_path_of(home)) if has_ref(home) else None
            num_past = 0 if last is None else self._next_number(last, old)
            request = replace(request, home=str(home), num_past=num_past)
            plan = make_plan(request, self.backend)
            refuse_other_run(plan, old)
            accepted = self.backend.recover(old)
            if accepted is not None and (last is None or accepted.job_id != last.job_id):
                # A resume was killed after it submitted the job and before it wrote the reference.
                return self._record_accepted(accepted, old, is_new=False)
            if last is not None:
                self._refuse_running(last)
                if isinstance(self.backend, Renewable):
                    start_step = self.backend.find_saved_step(last)
                    plan = replace(plan, follows=last.job_id, start_step=start_step)
            require_none(check_plan(self.backend, plan))
            return self._write_and_submit(plan, request, is_resumed=True)

    def resubmit(self, ref: JobRef, *, submitted_at: float) -> Submitted:
        """Submit a run's next job from its directory, with the same code, spec and resources.

        Idempotent: repeated or concurrent calls, and calls after a kill at any point, submit one job.
        Raises: CheckRefused if no next job is allowed, `check` finds an error or the scheduler refuses;
            StoreError if the scheduler or a store does not answer.
        """
        home = Path(ref.home)
        with lock_folder(home):
            old, last = read_plan(job_path_of(home)), read_ref(job_path_of(home))
            if last.job_id != ref.job_id:
                return Submitted(ref=last, plan=old, is_new=False)
            is_begun = old.follows == last.job_id
            if is_begun:
                # A kill after the next job's plan was written leaves open whether it was submitted.
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
                    num_past=self._next_number(last, old),
                    follows=last.job_id,
                    start_step=self.backend.find_saved_step(last),
                    num_resubmitted=old.num_resubmitted + 1,
                )
                plan = self.backend.renew(plan, submitted_at=submitted_at)
            require_none(check_plan(self.backend, plan))
            update_job_dir(plan)
            return self._record_accepted(self.backend.submit(plan), plan, is_new=True)

    def _find_earlier(self, plan: JobPlan, root: Path) -> Path | None:
        """Return the directory of the job with the same plan, or None.

        Raises: CheckRefused if a job of another plan has the name.
        """
        jobs = find_job_dirs_of(root, plan.name)
        output_dir = Path(plan.home)
        if has_plan(output_dir) and output_dir not in [home for home, _ in jobs]:
            # output.dir may give a job directory any name.
            jobs.insert(0, (output_dir, read_plan(job_path_of(output_dir))))
        same = [home for home, other in jobs if other.plan_hash == plan.plan_hash]
        if same:
            return same[0]
        if jobs:
            home, other = jobs[0]
            raise CheckRefused(
                f"the name {plan.name} belongs to {home.name}, whose plan is another:"
                f" {describe_changes(other, plan)}",
                allowed="one plan for a name, so that nothing is submitted twice by mistake",
                next_step="change `name` in the run file, or submit with --new",
            )
        return None

    def _refuse_running(self, ref: JobRef) -> None:
        """Refuse to resubmit a job that has succeeded or may still run.

        Its record shows an end before its scheduler does, so both are read.
        """
        deadline = time.monotonic() + SETTLE_LIMIT_S
        while True:
            states = [status.state for status in find_statuses(self.backend, [ref])]
            running: list[JobState] = [
                state
                for state in states
                if state is JobState.SUCCEEDED or not (state.is_terminal or state is JobState.UNKNOWN)
            ]
            answers = self.backend.poll([ref])
            living = [answer.state for answer in answers.values() if not answer.state.is_terminal]
            # Waiting helps only if an end is recorded that the scheduler has not seen yet.
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

    def _next_number(self, ref: JobRef, plan: JobPlan) -> int:
        """Return the number of the next attempt of a job."""
        records = [self.backend.open_record(ref, trial.index) for trial in plan.trials]
        numbers = [attempt.number for record in records for attempt in read_attempts(record)]
        return max(numbers) + 1 if numbers else plan.num_past

    def _write_and_submit(self, plan: JobPlan, request: JobRequest, *, is_resumed: bool = False) -> Submitted:
        job_path = job_path_of(plan.home)
        if not is_resumed:
            refuse_foreign_job_dir(plan)
        with ExitStack() as undo:
            # On any failure, including an interrupt from the keyboard.
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
            # The job is submitted. The list only helps to find it from other folders.
            notice = str(error)
        return Submitted(ref=ref, plan=plan, is_new=is_new, notice=notice, warnings=warnings)


def check_plan(backend: Backend, plan: JobPlan) -> list[Finding]:
    """Find obstacles to the job without changing anything, the worst first."""
    home = Path(plan.home)
    free_bytes = free_disk_bytes(home)
    findings = backend.probe(plan)
    if free_bytes < MIN_FREE_BYTES:
        no_space = Finding(
            code="disk",
            given=f"{home}: {free_bytes / 1e9:.2f} GB are free",
            allowed=f"{MIN_FREE_BYTES / 1e9:.1f} GB or more for logs and checkpoints",
            next_step="free some, or name another output.root",
        )
        findings = [no_space, *findings]
    order = list(Severity)
    return sorted(findings, key=lambda finding: order.index(finding.severity))


# Which job may follow an ended one in its directory. The next job of a run is submitted automatically after
# exit code 75 and after the time limit, at most job.max_requeue times, and only if the run has a newer
# checkpoint than at the start. It is never submitted after a cancellation, even one of an ended job.


def mark_cancelled(ref: JobRef) -> JobRef:
    """Record that a job is cancelled; return the cancelled job, which is its next one if that exists already.

    The caller holds the lock of the job's folder. Raises: StoreError if the disk fails.
    """
    job_path = job_path_of(ref.home)
    newest = read_ref(job_path)
    if newest.job_id != ref.job_id and read_plan(job_path).follows == ref.job_id:
        ref = newest
    write_bytes_atomically(job_path / CANCELLED_NAME, ref.job_id.encode())
    return ref


def describe_status(status: JobStatus) -> str:
    """Return a trial's state, with its reason if known."""
    return f"{status.state}{f' ({status.reason})' if status.reason else ''}"


def may_go_on(status: JobStatus) -> bool:
    """Whether a next job could go on after this end of a trial."""
    return status.state is JobState.TIMEOUT or (status.state is JobState.FAILED and status.is_saved)


def refuse_next(backend: Backend, plan: JobPlan, statuses: Sequence[JobStatus], *, is_begun: bool) -> None:
    """Refuse to submit the next job automatically. `is_begun`: its plan has been written already.

    Raises: CheckRefused with the reason; StoreError if a store does not answer.
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
    if is_cancelled or any(status.state is JobState.CANCELLED for status in statuses):
        return "it was cancelled"
    if len(statuses) > 1:
        return "trials of a sweep go on by hand"
    if not may_go_on(statuses[0]) or statuses[0].is_silent:
        return "this is no end to go on from"
    return None if is_begun else _find_spent(backend, plan, ref)


def _find_spent(backend: Renewable, plan: JobPlan, ref: JobRef) -> str | None:
    """Return why a run may have no further job: its budget is spent, or the last job made no progress."""
    if plan.num_resubmitted >= plan.max_requeue:
        return f"job.max_requeue={plan.max_requeue}, and that often it was"
    step = backend.find_saved_step(ref)
    if step is not None and (plan.start_step is None or step > plan.start_step):
        return None
    began = "without one" if plan.start_step is None else f"from step {plan.start_step}"
    now = "none" if step is None else f"step {step}"
    return f"no newer checkpoint: it began {began}, and now there is {now}"


def describe_changes(old: JobPlan, plan: JobPlan) -> str:
    """Return what differs between two plans; what follows from settings only if none of these does."""
    derived = ("roles", "resources")
    there, here = (
        {key: value for key, value in item.asked.items() if key not in derived} for item in (old, plan)
    )
    return list_differences(there, here) or list_differences(old.asked, plan.asked)


def refuse_other_run(plan: JobPlan, old: JobPlan) -> None:
    """Refuse to resume in the directory of another run, or from another site. Raises: CheckRefused."""
    if plan.spec_digest != old.spec_digest or plan.command != old.command:
        raise CheckRefused(
            f"{old.home} is a run of another spec: {describe_changes(old, plan)}",
            allowed="the run file that it was submitted with; only job, store and output may differ",
            next_step="submit it as a new job, without --resume",
        )
    if (plan.site, plan.backend) != (old.site, old.backend):
        raise CheckRefused(
            f"{old.home} was submitted to {old.site}, and this is {plan.site}",
            allowed="the same site: only there it can be seen whether the job still runs",
            next_step=f"submit with --on {old.site}",
        )
    if [trial.overrides for trial in plan.trials] != [trial.overrides for trial in old.trials]:
        raise CheckRefused(
            f"{old.home} has {len(old.trials)} trials, and another sweep is asked for",
            allowed="the same --sweep as at first",
            next_step="repeat it, or submit a new job",
        )
