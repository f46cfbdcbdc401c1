"""What may go on in the home of a job that has ended: the same run, by hand or by itself.

By itself it goes on after 75 and after its time limit, as often as `job.max_requeue` says, and only if it
came further than where it began. Never after a cancellation, also one that came when the job had ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from strop.errors import CheckRefused, StoreError, explain_refusal
from strop.io.atomic import write_bytes_atomically
from strop.launch.contract import Backend, JobPlan, JobRef, JobState, JobStatus, Renewable
from strop.launch.home import job_path_of, read_plan, read_ref

CANCELLED_NAME = "cancelled.txt"
"""Holds the id of a job that somebody cancelled."""


def forbid_next(ref: JobRef) -> JobRef:
    """Note that a job is cancelled, and return the job that is meant: its next one, if there is one already.

    Under the lock of the job's name. Raises: StoreError if the disk fails.
    """
    job_path = job_path_of(ref.home)
    newest = read_ref(job_path)
    if newest.job_id != ref.job_id and read_plan(job_path).follows == ref.job_id:
        ref = newest
    write_bytes_atomically(job_path / CANCELLED_NAME, ref.job_id.encode())
    return ref


def describe_status(status: JobStatus) -> str:
    """Return a member's state, and why it is so where that is known."""
    return f"{status.state}{f' ({status.reason})' if status.reason else ''}"


def may_go_on(status: JobStatus) -> bool:
    """Whether a member ended in a way after which the next job would go on."""
    return status.state is JobState.TIMEOUT or (status.state is JobState.FAILED and status.is_saved)


def refuse_next(
    backend: Backend, plan: JobPlan, statuses: Sequence[JobStatus], *, is_begun: bool = False
) -> None:
    """Refuse to submit the next job by itself. `is_begun`: it had been decided that there is one.

    Raises: CheckRefused with the reason; StoreError if a place does not answer.
    """
    reason = _find_objection(backend, plan, statuses, is_begun)
    if reason:
        ended = ", ".join(map(describe_status, statuses))
        raise CheckRefused(
            explain_refusal(
                f"job {statuses[0].ref.job_id} ended as {ended}, and is not submitted again: {reason}",
                allowed="an end with 75 or by the time limit that left a newer checkpoint,"
                " job.max_requeue times",
                next_step=f"read `strop logs {statuses[0].ref.job_id}`; --resume goes on all the same",
            )
        )


def _find_objection(
    backend: Backend, plan: JobPlan, statuses: Sequence[JobStatus], is_begun: bool
) -> str | None:
    if not isinstance(backend, Renewable):
        return "this scheduler starts jobs again by itself"
    if _is_cancelled(statuses[0].ref) or any(one.state is JobState.CANCELLED for one in statuses):
        return "it was cancelled"
    if len(statuses) > 1:
        return "members of a sweep go on by hand"
    if not may_go_on(statuses[0]) or statuses[0].is_silent:
        return "this is no end to go on from"
    return None if is_begun else _find_spent(backend, plan, statuses[0].ref)


def _find_spent(backend: Renewable, plan: JobPlan, ref: JobRef) -> str | None:
    """Return why a run has used up what it may have; None: it may have one job more."""
    if plan.num_resubmitted >= plan.max_requeue:
        return f"job.max_requeue={plan.max_requeue}, and that often it was"
    step = backend.find_saved_step(ref, 0)
    if step is not None and (plan.start_step is None or step > plan.start_step):
        return None
    began = "without one" if plan.start_step is None else f"from step {plan.start_step}"
    now = "none" if step is None else f"step {step}"
    return f"no newer checkpoint: it began {began}, and now there is {now}"


def make_next_plan(
    backend: Backend, old: JobPlan, noted: JobRef, *, num_past: int, submitted_at: float
) -> JobPlan:
    """Return the plan of the job that goes on after an ended one, which `refuse_next` did not refuse.

    Raises: StoreError if the place of its checkpoints does not answer.
    """
    assert isinstance(backend, Renewable)
    plan = replace(
        old,
        submitted_at=submitted_at,
        num_past=num_past,
        follows=noted.job_id,
        start_step=backend.find_saved_step(noted, 0),
        num_resubmitted=old.num_resubmitted + 1,
    )
    return backend.renew(plan, submitted_at=submitted_at)


def _is_cancelled(ref: JobRef) -> bool:
    path = job_path_of(ref.home) / CANCELLED_NAME
    try:
        return path.read_text().strip() == ref.job_id
    except FileNotFoundError:
        return False
    except OSError as error:
        raise StoreError(
            explain_refusal(
                f"{path} cannot be read ({error.strerror})",
                allowed="a job's home that can be read",
                next_step="check its rights",
            )
        ) from error


def refuse_other_run(plan: JobPlan, old: JobPlan) -> None:
    """Refuse to go on in the home of another run, or from another site. Raises: CheckRefused."""
    if plan.spec_digest != old.spec_digest or plan.command != old.command:
        raise CheckRefused(
            explain_refusal(
                f"{old.home} is a run of another spec",
                allowed="the run file that it was submitted with; only job, store and output may differ",
                next_step="submit it as a new job, without --resume",
            )
        )
    if (plan.site, plan.backend) != (old.site, old.backend):
        raise CheckRefused(
            explain_refusal(
                f"{old.home} was submitted to {old.site}, and this is {plan.site}",
                allowed="the same site: only there it can be seen whether the job still lives",
                next_step=f"submit with --on {old.site}",
            )
        )
    if [one.overrides for one in plan.members] != [one.overrides for one in old.members]:
        raise CheckRefused(
            explain_refusal(
                f"{old.home} has {len(old.members)} members, and another sweep is asked for",
                allowed="the same --sweep as at first",
                next_step="repeat it, or submit a new job",
            )
        )
