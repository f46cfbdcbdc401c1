"""Trying again, a bounded number of times, with growing pauses."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryRules:
    """How often and how patiently. The defaults give up after about half a minute of pauses."""

    num_attempts: int = 8
    first_pause_s: float = 0.25
    """Longest pause after the first failure; doubled after each further one."""
    max_pause_s: float = 8.0

    def pause_s(self, attempt_index: int) -> float:
        """Return a random pause, so that many clients do not come back together."""
        longest_s = min(self.first_pause_s * 2.0**attempt_index, self.max_pause_s)
        return random.uniform(0.5, 1.0) * longest_s


def retry(
    action: Callable[[], T],
    rules: RetryRules,
    failures: tuple[type[Exception], ...],
    explain: Callable[[Exception, int], Exception | None],
) -> T:
    """Return what the action returns; try again while it fails with one of `failures`.

    `explain` is given a failure and the number of attempts left. It returns the error to raise, or
    None where another attempt is worth while. All other exceptions pass.
    """
    for attempt_index in range(rules.num_attempts):
        try:
            return action()
        except failures as failure:
            error = explain(failure, rules.num_attempts - attempt_index - 1)
            if error is not None:
                raise error from failure
        time.sleep(rules.pause_s(attempt_index))
    raise AssertionError("after the last attempt, `explain` returns an error")
