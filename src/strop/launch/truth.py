"""Where a member stands, from all that is known: its own record, the scheduler's answer, the last state.

The record outranks the scheduler, because it outlives the scheduler's memory; for the present and for what
the job could not write itself (that it was cancelled, that it waits again) the scheduler is asked. What
nobody says is `unknown`, and starts and ends nothing.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

from strop.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_REFUSED, EXIT_USAGE
from strop.launch.contract import Answer, AttemptRecord, JobState, StatusSource
from strop.launch.exit_codes import describe_exit

RECORD_LAG_S = 60.0
"""How long a shared file system may hide a record that was written."""
CLOCK_SKEW_S = 30.0
"""How far the clocks of two nodes may be apart."""
_FAILURES = {EXIT_REFUSED: "preflight", EXIT_USAGE: "usage"}
_WAITING = {JobState.QUEUED, JobState.PREEMPTED}
_LIVING = {JobState.STARTING, JobState.RUNNING}


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """A state, and why it is that one."""

    state: JobState
    reason: str
    source: StatusSource


def judge(
    attempts: Sequence[AttemptRecord],
    answer: Answer | None,
    *,
    max_requeue: int,
    num_past: int = 0,
    now: float | None = None,
) -> Judgement:
    """Return where a member stands. `answer` None: the scheduler does not know it, or does not answer.

    `num_past`: attempts of earlier jobs in the same home have smaller numbers, and say nothing of this one.
    """
    mine = [one for one in attempts if one.number >= num_past]
    latest = max(mine, key=lambda one: one.number, default=None)
    if answer is not None and answer.state is JobState.CANCELLED:
        # Even over an exit code: being stopped is no success, and a stopped job may well show 75.
        return _said(answer)
    is_over = latest is not None and latest.exit_code is not None
    is_next = answer is not None and latest is not None and num_past + answer.num_restarts > latest.number
    if latest is not None and is_over and not is_next:
        return _judge_ended(latest, answer, num_past + max_requeue)
    if answer is None:
        return Judgement(state=JobState.UNKNOWN, reason="no source knows it", source=StatusSource.NOTHING)
    has_begun = latest is not None and latest.started_at is not None and not is_next
    return _judge_answer(answer, has_begun=has_begun, now=time.time() if now is None else now)


def _judge_answer(answer: Answer, *, has_begun: bool, now: float) -> Judgement:
    """Return what a scheduler's answer means for an attempt that has left no verdict."""
    if answer.state is JobState.SUCCEEDED:
        return _judge_unrecorded(answer, now)
    state = answer.state
    if state in _LIVING:
        state = JobState.RUNNING if has_begun else JobState.STARTING
    elif state is JobState.QUEUED and answer.num_restarts:
        state = JobState.PREEMPTED
    return _said(answer, state)


def _judge_ended(latest: AttemptRecord, answer: Answer | None, last_number: int) -> Judgement:
    """Return what the record of an ended attempt means. `last_number`: of the last attempt it may have."""
    code = latest.exit_code
    assert code is not None
    if code == EXIT_DONE:
        # A cause beside a success: a role has failed that the run did without.
        return Judgement(state=JobState.SUCCEEDED, reason=latest.cause, source=StatusSource.RECORD)
    if code != EXIT_INTERRUPTED:
        word = _FAILURES.get(code, describe_exit(code))
        reason = f"{word}: {latest.cause}" if latest.cause else word
        may_change = code == EXIT_REFUSED or latest.signal
        if may_change and answer is not None and answer.state in _WAITING | _LIVING:
            # Not over yet: it may live again without the node that refused it; who was told was stopped.
            state = JobState.RUNNING if answer.state in _LIVING else JobState.PREEMPTED
            return Judgement(state=state, reason=f"ending: {reason}", source=StatusSource.SCHEDULER)
        return Judgement(state=JobState.FAILED, reason=reason, source=StatusSource.RECORD)
    return _judge_saved(latest, answer, last_number)


def _judge_saved(latest: AttemptRecord, answer: Answer | None, last_number: int) -> Judgement:
    """Return where a member stands whose last attempt saved its state and asked to live again."""
    state, reason = JobState.UNKNOWN, f"its state is saved; it was told to end by {latest.signal or 'nobody'}"
    if answer is not None and answer.state in _WAITING | _LIVING:
        # A new life has not begun, or its first node has not written so yet.
        state, reason = JobState.PREEMPTED, answer.reason or "waits to live again"
    elif answer is not None and answer.state is JobState.TIMEOUT:
        return _said(answer)
    elif not latest.signal and latest.number >= last_number:
        state = JobState.FAILED
        reason = f"requeue budget: attempt {latest.number} was the last one that it may have"
    elif answer is not None and answer.state is JobState.SUCCEEDED:
        # Whatever a scheduler thinks of 75: what was stopped is no success.
        state, reason = JobState.FAILED, f"{reason}, and the scheduler calls it {answer.raw}"
    elif answer is not None:
        return _said(answer)
    return Judgement(state=state, reason=reason, source=StatusSource.RECORD)


def _judge_unrecorded(answer: Answer, now: float) -> Judgement:
    """Judge a job that a scheduler calls completed, and that left no record of it."""
    if answer.since is not None and now - answer.since < RECORD_LAG_S:
        return Judgement(
            state=JobState.RUNNING,
            reason="its record is not to be seen yet",
            source=StatusSource.SCHEDULER,
        )
    return Judgement(
        state=JobState.FAILED,
        reason=f"no record: the scheduler says {answer.raw}, and the job wrote no verdict",
        source=StatusSource.SCHEDULER,
    )


def _said(answer: Answer, state: JobState | None = None) -> Judgement:
    reason = answer.reason or answer.raw
    return Judgement(state=state or answer.state, reason=reason, source=StatusSource.SCHEDULER)


def find_split(attempts: Sequence[AttemptRecord]) -> str | None:
    """Return a sentence where an attempt ended long after a later one had begun, else None.

    A node that a scheduler had given up went on computing: two of them worked at one run.
    """
    ordered = sorted(attempts, key=lambda one: one.number)
    for earlier, later in itertools.pairwise(ordered):
        ended, began = earlier.ended_at, later.started_at
        if ended is not None and began is not None and ended > began + CLOCK_SKEW_S:
            return (
                f"split_brain: attempt {earlier.name} on {_nodes_of(earlier)} went on for"
                f" {ended - began:.0f} s beside attempt {later.name} on {_nodes_of(later)}"
            )
    return None


def _nodes_of(attempt: AttemptRecord) -> str:
    return ", ".join(attempt.nodes) or "an unknown node"
