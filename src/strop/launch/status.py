"""The status of jobs: their own records, one query to the scheduler, the last known state.

The record outranks the scheduler, because it outlives the scheduler's memory. The scheduler is asked for the
present and for what the job could not write itself: that it was cancelled, that it waits to start again. A
job that no source knows is `unknown`, which ends nothing and starts nothing.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from strop.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_REFUSED, EXIT_USAGE, StoreError, StropError
from strop.io.atomic import write_bytes_atomically
from strop.launch.attempts import describe_exit, read_attempts
from strop.launch.backends import BACKENDS, backend_of, open_backend
from strop.launch.contract import (
    AttemptRecord,
    Backend,
    JobPlan,
    JobRef,
    JobState,
    JobStatus,
    SchedulerStatus,
    StatusSource,
)
from strop.launch.index import list_job_dirs, list_job_names
from strop.launch.job_dir import STATE_NAME, has_plan, has_ref, job_path_of, read_plan, read_ref
from strop.launch.sites import KnownSite, find_site, list_sites

RECORD_LAG_S = 60.0
"""How long a shared file system may hide a record that was written."""
CLOCK_SKEW_S = 30.0
"""How far the clocks of two nodes may differ."""
_FAILURES = {EXIT_REFUSED: "preflight", EXIT_USAGE: "usage"}
_WAITING = {JobState.QUEUED, JobState.PREEMPTED}
_LIVING = {JobState.STARTING, JobState.RUNNING}


def list_statuses(roots: list[Path], environ: Mapping[str, str]) -> list[JobStatus]:
    """Return the status of all jobs of this user, newest first, by one query to each scheduler.

    A damaged job directory is `unknown` and hides no other one.
    Raises: StoreError if a folder cannot be listed.
    """
    groups: dict[str, tuple[JobPlan, list[JobRef]]] = {}
    found: list[JobStatus] = []
    for home in list_job_dirs(roots, environ):
        if not has_ref(home):
            continue
        try:
            plan, ref = read_plan(job_path_of(home)), read_ref(job_path_of(home))
        except StoreError as error:
            ref = JobRef(
                name=home.name,
                site="-",
                backend="-",
                home=str(home),
                job_id="-",
                plan_hash="",
                submitted_at=0.0,
            )
            found.append(_unknown(ref, 0, str(error)))
            continue
        ended = read_known_end(ref, [trial.index for trial in plan.trials])
        if ended is not None:
            found += ended
            continue
        key = f"{plan.backend} {sorted(plan.profile.items(), key=str)}"
        groups.setdefault(key, (plan, []))[1].append(ref)
    found += [one for plan, refs in groups.values() for one in find_statuses(backend_of(plan), refs)]
    return sorted(found, key=lambda one: one.ref.submitted_at, reverse=True)


def find_statuses(backend: Backend, refs: Sequence[JobRef]) -> list[JobStatus]:
    """Return the status of every trial of some jobs, by one query to the scheduler."""
    try:
        answers: Mapping[tuple[str, int], SchedulerStatus] | None = backend.poll(refs)
    except StoreError as error:
        answers, silence = None, str(error)
    else:
        silence = ""
    found: list[JobStatus] = []
    for ref in refs:
        plan = read_plan(job_path_of(ref.home))
        mine = [_find_status(backend, ref, trial.index, plan, answers, silence) for trial in plan.trials]
        found += mine
        seen = {
            str(one.trial): {
                "job_id": ref.job_id,
                "state": one.state.value,
                "reason": one.reason,
                "at": time.time(),
            }
            for one in mine
            if one.state is not JobState.UNKNOWN and one.source is not StatusSource.LAST_KNOWN
        }
        if seen:
            path = job_path_of(ref.home) / STATE_NAME
            states = {**_read_states(path), **seen}
            # Only a full disk hinders it, and then the next answer is as good.
            with suppress(StoreError):
                write_bytes_atomically(path, json.dumps(states, indent=1).encode())
    return found


def _find_status(
    backend: Backend,
    ref: JobRef,
    trial: int,
    plan: JobPlan,
    answers: Mapping[tuple[str, int], SchedulerStatus] | None,
    silence: str,
) -> JobStatus:
    """Return the status of one trial; its last known state where no source answers."""
    answer = (answers or {}).get((ref.job_id, trial))
    try:
        record = backend.open_record(ref, trial)
        attempts = read_attempts(record)
    except StoreError as error:
        if answer is None or answer.state is JobState.SUCCEEDED:
            # Only the record says whether it is a success.
            return _read_known(ref, trial, silence or str(error))
        attempts = []
    found = decide_state(attempts, answer, max_requeue=plan.max_requeue, num_past=plan.num_past)
    if found.state is JobState.UNKNOWN and (silence or found.source is StatusSource.NOTHING):
        place = record.describe("attempts")
        why = silence or f"the scheduler does not know it, and there is no record in {place}"
        return _read_known(ref, trial, why, has_answer=not silence)
    codes = [one.exit_code for one in attempts if one.number >= plan.num_past]
    if codes and codes[-1] is not None:
        is_saved = codes[-1] == EXIT_INTERRUPTED
    else:
        is_saved = answer is not None and answer.is_saved
    return JobStatus(
        ref=ref,
        trial=trial,
        state=found.state,
        reason="; ".join(filter(None, [find_split_brain(attempts), found.reason])),
        source=found.source,
        attempt=attempts[-1] if attempts else None,
        nodes=(answer.nodes if answer else "") or ",".join(attempts[-1].nodes if attempts else ()),
        since=answer.since if answer else None,
        is_saved=is_saved,
    )


def _unknown(ref: JobRef, trial: int, why: str, *, is_silent: bool = False) -> JobStatus:
    return JobStatus(
        ref=ref,
        trial=trial,
        state=JobState.UNKNOWN,
        reason=why,
        source=StatusSource.NOTHING,
        is_silent=is_silent,
    )


def status_to_json(status: JobStatus) -> dict[str, Any]:
    """Return a status for programs."""
    attempt = status.attempt
    return {
        "name": status.ref.name,
        "trial": status.trial,
        "state": status.state.value,
        "reason": status.reason,
        "source": status.source.value,
        "age_s": status.age_s,
        "site": status.ref.site,
        "job_id": status.ref.job_id,
        "home": status.ref.home,
        "nodes": status.nodes,
        "attempt": None
        if attempt is None
        else {"name": attempt.name, "number": attempt.number, "exit_code": attempt.exit_code},
    }


def find_orphans(
    roots: list[Path], environ: Mapping[str, str], *, now: float | None = None
) -> list[tuple[str, str]]:
    """Return jobs whose directory is gone, and directories whose job no source knows, each with the reason.

    A scheduler that does not answer adds none.
    """
    found = []
    known = list_job_names(roots, environ)
    for site in (
        *list_sites(Path.cwd(), environ),
        *(KnownSite(name=one, backend=one, files=()) for one in BACKENDS),
    ):
        backend = open_backend(find_site(site.name, Path.cwd(), environ))
        try:
            tagged = list(backend.list_tagged())
        except (StropError, ImportError):
            # A site that is not in use here has no scheduler to ask.
            continue
        for ref in tagged:
            if ref.job_id in known or (ref.home and has_plan(Path(ref.home))):
                continue
            age_h = max(0.0, (time.time() if now is None else now) - ref.submitted_at) / 3600.0
            found.append(
                (
                    f"job {ref.job_id} on {site.name}, submitted {age_h:.1f} h ago",
                    f"its directory {ref.home or '(unknown)'} is not there",
                )
            )
    found += [
        (status.ref.home, f"job {status.ref.job_id}: {status.reason}")
        for status in list_statuses(roots, environ)
        if status.state is JobState.UNKNOWN
    ]
    return list(dict.fromkeys(found))


@dataclass(frozen=True, kw_only=True, slots=True)
class StateDecision:
    """A state, and why it is that one."""

    state: JobState
    reason: str
    source: StatusSource


def decide_state(
    attempts: Sequence[AttemptRecord],
    answer: SchedulerStatus | None,
    *,
    max_requeue: int,
    num_past: int = 0,
    now: float | None = None,
) -> StateDecision:
    """Return the state of a trial. `answer` None: the scheduler does not know it, or does not answer.

    `num_past`: attempts of earlier jobs in the same directory have smaller numbers, and are ignored.
    """
    mine = [one for one in attempts if one.number >= num_past]
    latest = max(mine, key=lambda one: one.number, default=None)
    if answer is not None and answer.state is JobState.CANCELLED:
        # Even over an exit code: a cancelled job may well show 75.
        return _from_scheduler(answer)
    is_next = answer is not None and latest is not None and num_past + answer.num_restarts > latest.number
    if latest is not None and latest.exit_code is not None and not is_next:
        return _decide_ended(latest, answer, num_past + max_requeue)
    if answer is None:
        return StateDecision(state=JobState.UNKNOWN, reason="no source knows it", source=StatusSource.NOTHING)
    if answer.state is JobState.SUCCEEDED:
        # A scheduler calls it completed, and it left no record of that.
        now = time.time() if now is None else now
        if answer.since is not None and now - answer.since < RECORD_LAG_S:
            state, reason = JobState.RUNNING, "its record is not to be seen yet"
        else:
            state = JobState.FAILED
            reason = f"no record: the scheduler says {answer.raw}, and the job wrote no verdict"
        return StateDecision(state=state, reason=reason, source=StatusSource.SCHEDULER)
    state = answer.state
    if state in _LIVING:
        has_begun = latest is not None and latest.started_at is not None and not is_next
        state = JobState.RUNNING if has_begun else JobState.STARTING
    elif state is JobState.QUEUED and answer.num_restarts:
        state = JobState.PREEMPTED
    return _from_scheduler(answer, state)


def _decide_ended(latest: AttemptRecord, answer: SchedulerStatus | None, last_number: int) -> StateDecision:
    """Return what the record of an ended attempt means. `last_number`: of the last attempt it may have."""
    code = latest.exit_code
    assert code is not None
    if code == EXIT_DONE:
        # A cause beside a success: a role failed that the run does not need.
        return StateDecision(state=JobState.SUCCEEDED, reason=latest.cause, source=StatusSource.RECORD)
    if code != EXIT_INTERRUPTED:
        word = _FAILURES.get(code, describe_exit(code))
        reason = f"{word}: {latest.cause}" if latest.cause else word
        may_change = code == EXIT_REFUSED or latest.signal
        if may_change and answer is not None and answer.state in _WAITING | _LIVING:
            # Not over yet: it may be requeued without the node that refused it, or after the preemption.
            state = JobState.RUNNING if answer.state in _LIVING else JobState.PREEMPTED
            return StateDecision(state=state, reason=f"ending: {reason}", source=StatusSource.SCHEDULER)
        return StateDecision(state=JobState.FAILED, reason=reason, source=StatusSource.RECORD)
    # It saved its state, and asked to be requeued.
    how = f"on {latest.signal}" if latest.signal else "without a signal"
    state, reason = JobState.UNKNOWN, f"its state is saved; it ended {how}"
    if answer is not None and answer.state in _WAITING | _LIVING:
        # The next attempt has not begun, or its first node has not written its start record yet.
        state, reason = JobState.PREEMPTED, answer.reason or "waits to be requeued"
    elif answer is not None and answer.state is JobState.TIMEOUT:
        return _from_scheduler(answer)
    elif not latest.signal and latest.number >= last_number:
        state = JobState.FAILED
        reason = f"requeue budget: attempt {latest.number} was the last one that it may have"
    elif answer is not None and answer.state is JobState.SUCCEEDED:
        # Whatever a scheduler makes of exit code 75: a job that was stopped is no success.
        state, reason = JobState.FAILED, f"{reason}, and the scheduler calls it {answer.raw}"
    elif answer is not None:
        return _from_scheduler(answer)
    return StateDecision(state=state, reason=reason, source=StatusSource.RECORD)


def _from_scheduler(answer: SchedulerStatus, state: JobState | None = None) -> StateDecision:
    reason = answer.reason or answer.raw
    return StateDecision(state=state or answer.state, reason=reason, source=StatusSource.SCHEDULER)


def find_split_brain(attempts: Sequence[AttemptRecord]) -> str | None:
    """Return a sentence where an attempt ended long after a later one had begun, else None.

    A node that the scheduler had given up kept computing: two nodes worked on one run.
    """
    ordered = sorted(attempts, key=lambda one: one.number)
    for earlier, later in itertools.pairwise(ordered):
        ended, began = earlier.ended_at, later.started_at
        if ended is not None and began is not None and ended > began + CLOCK_SKEW_S:
            first, second = (", ".join(one.nodes) or "an unknown node" for one in (earlier, later))
            return (
                f"split_brain: attempt {earlier.name} on {first} went on for"
                f" {ended - began:.0f} s beside attempt {later.name} on {second}"
            )
    return None


# The last known state of every trial, in `job/state.json`: for times when no source answers, and so that
# jobs that ended long ago cost their schedulers nothing.


def _read_known(ref: JobRef, trial: int, why: str, *, has_answer: bool = False) -> JobStatus:
    """Return the last known state with its age, or `unknown`.

    `has_answer`: the scheduler did answer, and does not know the job. Then only a known end still holds; that
    it once ran does not mean that it runs.
    """
    known = _read_states(job_path_of(ref.home) / STATE_NAME).get(str(trial), {})
    try:
        state, at = JobState(known["state"]), float(known["at"])
    except (KeyError, ValueError, TypeError):
        state, at = JobState.UNKNOWN, 0.0
    # Some schedulers give a resumed job the name that it had before.
    is_of_this_job = known.get("job_id") == ref.job_id and at >= ref.submitted_at
    if not is_of_this_job or state is JobState.UNKNOWN or (has_answer and not state.is_terminal):
        return _unknown(ref, trial, why, is_silent=not has_answer)
    seen = known.get("reason")
    return JobStatus(
        ref=ref,
        trial=trial,
        state=state,
        reason=f"{seen}; {why}" if seen else why,
        source=StatusSource.LAST_KNOWN,
        age_s=max(0.0, time.time() - at),
        is_silent=not has_answer,
    )


def read_known_end(ref: JobRef, trials: Sequence[int]) -> list[JobStatus] | None:
    """Return how all trials of a job ended, if that is known; None: a scheduler must be asked."""
    found = [_read_known(ref, trial, "", has_answer=True) for trial in trials]
    if not all(one.state.is_terminal for one in found):
        return None
    return [replace(one, reason=one.reason.rstrip("; ")) for one in found]


def _read_states(path: Path) -> dict[str, dict[str, Any]]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(content, dict):
        return {}
    return {key: value for key, value in content.items() if isinstance(value, dict)}
