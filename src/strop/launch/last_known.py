"""The last known state of every member, kept in `job/state.json` for the day when nobody answers."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from strop.errors import StoreError
from strop.io.atomic import write_bytes_atomically
from strop.launch.contract import JobRef, JobState, JobStatus, StatusSource
from strop.launch.home import STATE_NAME, job_path_of


def remember(ref: JobRef, statuses: Sequence[JobStatus]) -> None:
    """Keep what members of a job were seen to be, in one write. A help: a full disk changes nothing."""
    seen = {
        str(one.member): {
            "job_id": ref.job_id,
            "state": one.state.value,
            "reason": one.reason,
            "at": time.time(),
        }
        for one in statuses
        if one.state is not JobState.UNKNOWN and one.source is not StatusSource.LAST_KNOWN
    }
    if not seen:
        return
    path = job_path_of(ref.home) / STATE_NAME
    states = {**_read_states(path), **seen}
    try:
        write_bytes_atomically(path, json.dumps(states, indent=1).encode())
    except StoreError:
        return


def recall(ref: JobRef, member: int, why: str, *, is_asked: bool = False) -> JobStatus:
    """Return the last known state with its age, or `unknown`.

    `is_asked`: the scheduler did answer, and knows nothing of the job. Then only an end that was seen still
    holds; that it once ran does not mean that it runs.
    """
    known = _read_states(job_path_of(ref.home) / STATE_NAME).get(str(member), {})
    try:
        state, at = JobState(known["state"]), float(known["at"])
    except (KeyError, ValueError, TypeError):
        state, at = JobState.UNKNOWN, 0.0
    # Some schedulers give a job that goes on in its home the name that it had before.
    is_of_this_job = known.get("job_id") == ref.job_id and at >= ref.submitted_at
    if not is_of_this_job or state is JobState.UNKNOWN or (is_asked and not state.is_terminal):
        return JobStatus(
            ref=ref,
            member=member,
            state=JobState.UNKNOWN,
            reason=why,
            source=StatusSource.NOTHING,
            is_silent=not is_asked,
        )
    seen = known.get("reason")
    return JobStatus(
        ref=ref,
        member=member,
        state=state,
        reason=f"{seen}; {why}" if seen else why,
        source=StatusSource.LAST_KNOWN,
        age_s=max(0.0, time.time() - at),
        is_silent=not is_asked,
    )


def recall_end(ref: JobRef, members: Sequence[int]) -> list[JobStatus] | None:
    """Return how all members of a job ended, if that was seen; None: somebody must be asked.

    An end stays one, so that old jobs cost their schedulers nothing.
    """
    found = [recall(ref, member, "", is_asked=True) for member in members]
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
