"""The status of jobs: from their own records, one query to the scheduler, the last known state.

The record outranks the scheduler, because it outlives the scheduler's memory. The scheduler reports the
present, and facts that the job could not write itself: that it was cancelled, or waits to be requeued. A job
that no source knows is `unknown`, which ends nothing and starts nothing.
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
    Renewable,
    SchedulerStatus,
    StatusSource,
)
from strop.launch.index import list_job_dirs, list_job_names
from strop.launch.job_dir import (
    STATE_NAME,
    has_plan,
    has_ref,
    job_path_of,
    lock_folder,
    read_plan,
    read_ref,
)
from strop.launch.sagemaker.job_log import JobLog
from strop.launch.secrets import has_secrets, remove_secrets
from strop.launch.sites import find_site, list_site_names

RECORD_LAG_S = 60.0
"""Longest time for which a shared file system hides a written record."""
CLOCK_SKEW_S = 30.0
"""Largest difference of two nodes' clocks."""
_FAILURES = {EXIT_REFUSED: "preflight", EXIT_USAGE: "usage"}
_WAITING = {JobState.QUEUED, JobState.PREEMPTED}
_LIVING = {JobState.STARTING, JobState.RUNNING}


def list_statuses(roots: list[Path], environ: Mapping[str, str]) -> list[JobStatus]:
    """Return the status of all jobs of this user, newest first, by one query to each scheduler.

    A job with a damaged directory is `unknown` and does not hide the others.
    Raises: StoreError if a folder cannot be listed.
    """
    groups: dict[str, tuple[JobPlan, list[JobRef]]] = {}
    statuses: list[JobStatus] = []
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
            statuses.append(_unknown(ref, 0, str(error)))
            continue
        known_end = read_known_end(ref, [trial.index for trial in plan.trials])
        if known_end is not None and not has_secrets(job_path_of(home)):
            statuses += known_end
            continue
        key = f"{plan.backend} {sorted(plan.profile.items(), key=str)}"
        groups.setdefault(key, (plan, []))[1].append(ref)
    for plan, refs in groups.values():
        statuses += find_statuses(backend_of(plan), refs)
    return sorted(statuses, key=lambda status: status.ref.submitted_at, reverse=True)


def clear_secrets(roots: list[Path], environ: Mapping[str, str]) -> list[Path]:
    """Remove the secrets of jobs that are over; return the directories of these jobs. Raises: StoreError."""
    homes = [home for home in list_job_dirs(roots, environ) if has_secrets(job_path_of(home))]
    if homes:
        # Whoever sees an end removes them.
        list_statuses(roots, environ)
    return [home for home in homes if not has_secrets(job_path_of(home))]


def find_statuses(backend: Backend, refs: Sequence[JobRef]) -> list[JobStatus]:
    """Return the status of every trial of some jobs, by one query to the scheduler."""
    try:
        answers: Mapping[tuple[str, int], SchedulerStatus] | None = backend.poll(refs)
    except StoreError as error:
        answers, silence = None, str(error)
    else:
        silence = ""
    statuses: list[JobStatus] = []
    for ref in refs:
        plan = read_plan(job_path_of(ref.home))
        of_job = [_find_status(backend, ref, trial.index, plan, answers, silence) for trial in plan.trials]
        statuses += of_job
        seen = [status for status in of_job if status.source is not StatusSource.LAST_KNOWN]
        # A full or read-only disk refuses both, and the next status can do them instead.
        with suppress(StoreError):
            _note_ends(ref, of_job)
            _note_states(ref, [status for status in seen if status.state is not JobState.UNKNOWN])
            if answers is not None and all(_is_over(backend, status, answers) for status in of_job):
                _forget_secrets(ref)
    return statuses


def _note_ends(ref: JobRef, statuses: Sequence[JobStatus]) -> None:
    """Note in the job log, where there is one, how jobs ended by all that is known, as `status` says it."""
    log = ref.details.get("job_log")
    if not log or not Path(log).exists():
        return
    states = {status.trial: status.state for status in statuses}
    named = [(job["name"], states[job["trial"]]) for job in ref.details["jobs"]]
    JobLog(Path(log)).note_states({name: str(state) for name, state in named if state.is_terminal})


def _note_states(ref: JobRef, statuses: Sequence[JobStatus]) -> None:
    seen = {
        str(status.trial): {
            "job_id": ref.job_id,
            "state": status.state.value,
            "reason": status.reason,
            "at": time.time(),
        }
        for status in statuses
    }
    if seen:
        path = job_path_of(ref.home) / STATE_NAME
        write_bytes_atomically(path, json.dumps({**_read_states(path), **seen}, indent=1).encode())


def is_forgotten(status: JobStatus) -> bool:
    """Whether a trial without an end is unknown to a scheduler that answers."""
    is_unknown = status.state is JobState.UNKNOWN and not status.is_silent
    return is_unknown and status.source is not StatusSource.SCHEDULER


def close_forgotten(ref: JobRef, statuses: Sequence[JobStatus]) -> None:
    """Record trials that no scheduler knows as cancelled. Raises: StoreError."""
    reason = "closed by `strop cancel`: its scheduler had forgotten it"
    _note_states(ref, [replace(status, state=JobState.CANCELLED, reason=reason) for status in statuses])


def _is_over(backend: Backend, status: JobStatus, answers: Mapping[tuple[str, int], SchedulerStatus]) -> bool:
    """Whether no attempt of a trial can follow, by its record and by a scheduler that answers."""
    if isinstance(backend, Renewable) and status.state in {JobState.TIMEOUT, JobState.FAILED}:
        # The run's next job needs its secrets.
        return False
    answer = answers.get((status.ref.job_id, status.trial))
    return status.state.is_terminal and (answer is None or answer.state.is_terminal)


def _forget_secrets(ref: JobRef) -> None:
    """Remove the secrets of a job that is over, unless it is being submitted again. Raises: StoreError."""
    job_path, lock = job_path_of(ref.home), lock_folder(Path(ref.home))
    if not has_secrets(job_path) or not lock.try_acquire():
        return
    try:
        if read_ref(job_path) == ref:
            remove_secrets(job_path)
    finally:
        lock.release()


def _find_status(
    backend: Backend,
    ref: JobRef,
    trial: int,
    plan: JobPlan,
    answers: Mapping[tuple[str, int], SchedulerStatus] | None,
    silence: str,
) -> JobStatus:
    """Return the status of one trial, its last known state if no source answers."""
    answer = (answers or {}).get((ref.job_id, trial))
    try:
        record = backend.open_record(ref, trial)
        attempts = read_attempts(record)
    except StoreError as error:
        if answer is None or answer.state is JobState.SUCCEEDED:
            # Only the record shows a success.
            return _read_known(ref, trial, silence or str(error))
        attempts = []
    decision = decide_state(attempts, answer, max_requeue=plan.max_requeue, num_past=plan.num_past)
    if decision.state is JobState.UNKNOWN and (silence or decision.source is StatusSource.NOTHING):
        place = record.describe("attempts")
        why = silence or f"the scheduler does not know it, and there is no record in {place}"
        return _read_known(ref, trial, why, has_answer=not silence)
    if decision.state is JobState.UNKNOWN and answer is None:
        # Somebody may have closed it, which its own record does not say.
        known = _read_known(ref, trial, decision.reason, has_answer=True)
        if known.state.is_terminal:
            return known
    codes = [attempt.exit_code for attempt in attempts if attempt.number >= plan.num_past]
    if codes and codes[-1] is not None:
        is_saved = codes[-1] == EXIT_INTERRUPTED
    else:
        is_saved = answer is not None and answer.is_saved
    return JobStatus(
        ref=ref,
        trial=trial,
        state=decision.state,
        reason="; ".join(filter(None, [find_split_brain(attempts), decision.reason])),
        source=decision.source,
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
    """Return a status as JSON values."""
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


def find_orphans(roots: list[Path], environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return jobs whose directory is missing, and directories whose job no source knows, with the reasons.

    A scheduler that does not answer contributes none.
    """
    orphans = []
    known_names = list_job_names(roots, environ)
    for site in dict.fromkeys([*list_site_names(Path.cwd(), environ), *BACKENDS]):
        backend = open_backend(find_site(site, Path.cwd(), environ))
        try:
            tagged = list(backend.list_tagged())
        except (StropError, ImportError):
            # A site that is not in use here has no scheduler.
            continue
        for ref in tagged:
            if ref.job_id in known_names or (ref.home and has_plan(Path(ref.home))):
                continue
            age_h = max(0.0, time.time() - ref.submitted_at) / 3600.0
            orphans.append(
                (
                    f"job {ref.job_id} on {site}, submitted {age_h:.1f} h ago",
                    f"its directory {ref.home or '(unknown)'} is not there",
                )
            )
    orphans += [
        (status.ref.home, f"job {status.ref.job_id}: {status.reason}")
        for status in list_statuses(roots, environ)
        if status.state is JobState.UNKNOWN
    ]
    return list(dict.fromkeys(orphans))


@dataclass(frozen=True, kw_only=True, slots=True)
class StateDecision:
    """A state, the reason for it and its source."""

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
    """Return the state of a trial. `answer` None: the scheduler does not know the trial, or is silent.

    `num_past`: attempts with smaller numbers are of earlier jobs in the directory, and are ignored.
    """
    of_job = [attempt for attempt in attempts if attempt.number >= num_past]
    latest = max(of_job, key=lambda attempt: attempt.number, default=None)
    if answer is not None and answer.state is JobState.CANCELLED:
        # It overrides an exit code: a cancelled job may have ended with 75.
        return _from_scheduler(answer)
    is_next = answer is not None and latest is not None and num_past + answer.num_restarts > latest.number
    done = next((attempt for attempt in of_job if attempt.exit_code == EXIT_DONE), None)
    if done is not None:
        # Whatever starts it again, the run is finished.
        latest, is_next = done, False
    if latest is not None and latest.exit_code is not None and not is_next:
        return _decide_ended(latest, answer, num_past + max_requeue)
    if answer is None:
        return StateDecision(state=JobState.UNKNOWN, reason="no source knows it", source=StatusSource.NOTHING)
    if answer.state is JobState.SUCCEEDED:
        # The scheduler reports a completion that the job has not recorded.
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
    decision = _from_scheduler(answer, state)
    if state is JobState.FAILED and latest is not None and latest.cause:
        return replace(decision, reason=f"{decision.reason}: {latest.cause}")
    return decision


def _decide_ended(latest: AttemptRecord, answer: SchedulerStatus | None, last_number: int) -> StateDecision:
    """Return the state after an ended attempt. `last_number`: the number of the last allowed attempt."""
    code = latest.exit_code
    assert code is not None
    if code == EXIT_DONE:
        # A success may have a cause: the failure of a role that the run does not need.
        return StateDecision(state=JobState.SUCCEEDED, reason=latest.cause, source=StatusSource.RECORD)
    if code != EXIT_INTERRUPTED:
        word = _FAILURES.get(code, describe_exit(code))
        reason = f"{word}: {latest.cause}" if latest.cause else word
        may_change = code == EXIT_REFUSED or latest.signal
        if may_change and answer is not None and answer.state in _WAITING | _LIVING:
            # It may be requeued without the node that refused it, or after the preemption.
            state = JobState.RUNNING if answer.state in _LIVING else JobState.PREEMPTED
            return StateDecision(state=state, reason=f"ending: {reason}", source=StatusSource.SCHEDULER)
        return StateDecision(state=JobState.FAILED, reason=reason, source=StatusSource.RECORD)
    # The attempt saved its state and requested to be requeued.
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
        # However the scheduler treats exit code 75, a stopped job is no success.
        state, reason = JobState.FAILED, f"{reason}, and the scheduler calls it {answer.raw}"
    elif answer is not None:
        return _from_scheduler(answer)
    return StateDecision(state=state, reason=reason, source=StatusSource.RECORD)


def _from_scheduler(answer: SchedulerStatus, state: JobState | None = None) -> StateDecision:
    reason = answer.reason or answer.raw
    return StateDecision(state=state or answer.state, reason=reason, source=StatusSource.SCHEDULER)


def find_split_brain(attempts: Sequence[AttemptRecord]) -> str | None:
    """Describe an attempt that ended long after a later one had begun; return None without one.

    This happens if a node that the scheduler gave up keeps computing: two nodes work on one run.
    """
    ordered = sorted(attempts, key=lambda attempt: attempt.number)
    for earlier, later in itertools.pairwise(ordered):
        ended, began = earlier.ended_at, later.started_at
        if ended is not None and began is not None and ended > began + CLOCK_SKEW_S:
            first, second = (", ".join(attempt.nodes) or "an unknown node" for attempt in (earlier, later))
            return (
                f"split_brain: attempt {earlier.name} on {first} went on for"
                f" {ended - began:.0f} s beside attempt {later.name} on {second}"
            )
    return None


# `job/state.json` has the last known state of every trial: it serves when no source answers, and spares
# schedulers queries about jobs that ended long ago.


def _read_known(ref: JobRef, trial: int, why: str, *, has_answer: bool = False) -> JobStatus:
    """Return the last known state with its age, or `unknown`.

    `has_answer`: the scheduler answered and does not know the job. Then only a known end still holds: a job
    that once ran may not run now.
    """
    last = _read_states(job_path_of(ref.home) / STATE_NAME).get(str(trial), {})
    try:
        state, at = JobState(last["state"]), float(last["at"])
    except (KeyError, ValueError, TypeError):
        state, at = JobState.UNKNOWN, 0.0
    # Some schedulers give a resumed job its old name.
    is_of_this_job = last.get("job_id") == ref.job_id and at >= ref.submitted_at
    if not is_of_this_job or state is JobState.UNKNOWN or (has_answer and not state.is_terminal):
        return _unknown(ref, trial, why, is_silent=not has_answer)
    last_reason = last.get("reason")
    return JobStatus(
        ref=ref,
        trial=trial,
        state=state,
        reason=f"{last_reason}; {why}" if last_reason else why,
        source=StatusSource.LAST_KNOWN,
        age_s=max(0.0, time.time() - at),
        is_silent=not has_answer,
    )


def read_known_end(ref: JobRef, trials: Sequence[int]) -> list[JobStatus] | None:
    """Return the known ends of all trials of a job, or None if its scheduler must be queried."""
    statuses = [_read_known(ref, trial, "", has_answer=True) for trial in trials]
    if not all(status.state.is_terminal for status in statuses):
        return None
    return [replace(status, reason=status.reason.rstrip("; ")) for status in statuses]


def _read_states(path: Path) -> dict[str, dict[str, Any]]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(content, dict):
        return {}
    return {key: value for key, value in content.items() if isinstance(value, dict)}
