"""Where the members of jobs stand: their records, one question to the scheduler, what was known before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from strop.errors import EXIT_INTERRUPTED, StoreError
from strop.launch.attempts import read_attempts
from strop.launch.contract import (
    Answer,
    AttemptRecord,
    Backend,
    JobPlan,
    JobRef,
    JobState,
    JobStatus,
    StatusSource,
)
from strop.launch.home import job_path_of, read_plan
from strop.launch.last_known import recall, remember
from strop.launch.truth import find_split, judge


def find_statuses(backend: Backend, refs: Sequence[JobRef]) -> list[JobStatus]:
    """Return where every member of some jobs stands, by one question to the scheduler."""
    try:
        answers: Mapping[tuple[str, int], Answer] | None = backend.ask(refs)
    except StoreError as error:
        answers, silence = None, str(error)
    else:
        silence = ""
    found: list[JobStatus] = []
    for ref in refs:
        plan = read_plan(job_path_of(ref.home))
        mine = [_judge(backend, ref, member.index, plan, answers, silence) for member in plan.members]
        remember(ref, mine)
        found += mine
    return found


def _judge(
    backend: Backend,
    ref: JobRef,
    member: int,
    plan: JobPlan,
    answers: Mapping[tuple[str, int], Answer] | None,
    silence: str,
) -> JobStatus:
    """Return where one member stands; where nobody tells, its last known state."""
    answer = (answers or {}).get((ref.job_id, member))
    try:
        attempts = read_attempts(backend.open_record(ref, member))
    except StoreError as error:
        if answer is None or answer.state is JobState.SUCCEEDED:
            # Whether it is a success, only its record says.
            return recall(ref, member, silence or str(error))
        attempts = []
    found = judge(attempts, answer, max_requeue=plan.max_requeue, num_past=plan.num_past)
    if found.state is JobState.UNKNOWN and (silence or found.source is StatusSource.NOTHING):
        return recall(ref, member, silence or _explain_unknown(backend, ref, member), is_asked=not silence)
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


def _explain_unknown(backend: Backend, ref: JobRef, member: int) -> str:
    place = backend.open_record(ref, member).describe("attempts")
    return f"the scheduler does not know it, and there is no record in {place}"


def _is_saved(attempts: Sequence[AttemptRecord], answer: Answer | None, num_past: int) -> bool:
    """Whether a job's last attempt ended with 75, as its record says, else its scheduler."""
    codes = [one.exit_code for one in attempts if one.number >= num_past]
    if codes and codes[-1] is not None:
        return codes[-1] == EXIT_INTERRUPTED
    return answer is not None and answer.is_saved
