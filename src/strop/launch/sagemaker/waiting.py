"""Waiting for the end of a job. Being stopped is no success, unlike for the waiter of the vendor's client."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from strop.errors import CheckRefused, explain_refusal
from strop.launch.jobs.contract import JobRef, JobState
from strop.launch.jobs.launcher import Launcher

ASK_EVERY_S = 15.0
"""AWS throttles who asks more often."""


def wait_for_end(
    launcher: Launcher,
    ref: JobRef,
    say: Callable[[str], None],
    *,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Ask now and then until every member has ended; say what changes.

    Raises: CheckRefused for an end that is no success.
    """
    told = ""
    while True:
        statuses = launcher.status([ref])
        words = ", ".join(f"{one.state}{f' ({one.reason})' if one.reason else ''}" for one in statuses)
        if words != told:
            say(f"{ref.job_id}: {words}")
            told = words
        if all(one.state.is_terminal for one in statuses):
            break
        pause(ASK_EVERY_S * random.uniform(1.0, 1.25))
    if any(one.state is not JobState.SUCCEEDED for one in statuses):
        raise CheckRefused(
            explain_refusal(
                f"job {ref.job_id} ended as {words}",
                allowed="an end of all members with success",
                next_step=f"strop logs {ref.job_id}",
            )
        )
