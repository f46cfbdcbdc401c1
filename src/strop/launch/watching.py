"""Waiting for the end of a run, and submitting its next job where its scheduler starts none.

What is known of the run stands in its home, so a watcher may be killed at any time and started again, from
any place that sees the home; two of them do no more than one. What nobody says starts and ends nothing.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

from strop.errors import CheckRefused, StoreError, explain_refusal
from strop.launch.contract import JobRef, JobState, JobStatus, Renewable
from strop.launch.home import job_path_of, read_ref
from strop.launch.launcher import Launcher
from strop.launch.next_job import describe_status, may_go_on

ASK_EVERY_S = 15.0
"""Schedulers of many users throttle who asks more often."""
ASK_HERE_EVERY_S = 1.0
UNKNOWN_LIMIT_S = 600.0
"""How long a job is waited for that its scheduler, which does answer, does not know."""
_HERE = frozenset({"local", "container"})


class _News:
    """Says what has changed, and not at every look what is as it was."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self._told: dict[str, str] = {}

    def tell(self, kind: str, words: str) -> None:
        """Say it, unless it was what was said last of its kind."""
        if self._told.get(kind) != words:
            self.say(words)
        self._told[kind] = words


def watch(
    launcher: Launcher,
    home: Path,
    say: Callable[[str], None],
    *,
    pause: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = time.time,
) -> None:
    """Wait until every member of a run has ended for good, saying what changes.

    Raises: CheckRefused for an end that is no success, with why no next job follows; StoreError if nobody
        knows the job any more.
    """
    news, unknown_s = _News(say), 0.0
    while True:
        # Anew each time: somebody else may have submitted the next job.
        ref = read_ref(job_path_of(home))
        statuses = launcher.status([ref])
        words = f"{ref.job_id}: {', '.join(map(describe_status, statuses))}"
        news.tell("state", words)
        has_ended = all(one.state.is_terminal and not one.is_silent for one in statuses)
        if has_ended and not _goes_on(launcher, ref, statuses, news, now):
            return
        pause_s = _choose_pause_s(ref)
        is_lost = any(one.state is JobState.UNKNOWN and not one.is_silent for one in statuses)
        unknown_s = unknown_s + pause_s if is_lost else 0.0
        if unknown_s > UNKNOWN_LIMIT_S:
            raise _lost(ref, words)
        pause(pause_s)


def _goes_on(
    launcher: Launcher,
    ref: JobRef,
    statuses: list[JobStatus],
    news: _News,
    now: Callable[[], float],
) -> bool:
    """Return whether there is a next job, or may still be one; False for a success.

    Raises: CheckRefused for an end that is none.
    """
    if all(one.state is JobState.SUCCEEDED for one in statuses):
        return False
    if not isinstance(launcher.backend, Renewable) or not any(map(may_go_on, statuses)):
        raise CheckRefused(
            explain_refusal(
                f"job {ref.job_id} ended as {', '.join(map(describe_status, statuses))}",
                allowed="an end of all members with success",
                next_step=f"strop logs {ref.job_id}",
            )
        )
    try:
        submitted = launcher.resubmit(ref, submitted_at=now())
    except StoreError as error:
        # Whether it was accepted will be seen at the next look; nothing is lost meanwhile.
        news.tell("wait", f"the next job waits: {error}")
        return True
    word = "submitted" if submitted.is_new else "was submitted"
    news.say(f"{submitted.ref.job_id} {word} as the next job of this run, after {ref.job_id}")
    for warning in submitted.warnings:
        news.say(f"notice: {warning}")
    return True


def _choose_pause_s(ref: JobRef) -> float:
    every_s = ASK_HERE_EVERY_S if ref.backend in _HERE else ASK_EVERY_S
    return every_s * random.uniform(1.0, 1.25)


def _lost(ref: JobRef, words: str) -> StoreError:
    return StoreError(
        explain_refusal(
            f"{words}; so it has been for {UNKNOWN_LIMIT_S / 60:.0f} minutes",
            allowed="a job that its scheduler or its own record knows",
            next_step=f"look for {ref.job_id} at {ref.site}; --resume goes on in {ref.home}",
        )
    )
