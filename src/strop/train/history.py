"""What the numbers of a step are compared with: the first steps of the run, and the last ones.

Its size is fixed, however long the run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import hypot
from statistics import fmean, stdev

NUM_FIRST = 8
"""Steps at the start that later ones are compared with; their median is robust to one odd step."""
NUM_BEGIN = 2
"""Steps at the start that no collapse can have reached, where the first `NUM_FIRST` may hold a fast one."""
NUM_RECENT = 16
"""Steps back whose gradient norms a new one is compared with: a norm that grows slowly is no spike."""
NUM_LOW = 8
"""Steps in a row that are a trend and not the luck of one step's examples."""
_MIN_STEPS = 6
"""Steps of a window that must have a metric."""
_NUM_ERRORS = 3.0
"""Standard errors beyond which a difference between two windows is no chance."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """How a metric moved between the first steps and the last ones, by the means of both."""

    then: float
    now: float
    error: float
    """Standard error of the difference, from how far the single steps lie from their means."""

    @property
    def is_rise(self) -> bool:
        """Whether it rose by more than chance explains."""
        return self.now - self.then > _NUM_ERRORS * self.error

    @property
    def is_fall(self) -> bool:
        """Whether it fell by more than chance explains."""
        return self.then - self.now > _NUM_ERRORS * self.error


def change_between(first: Sequence[float], last: Sequence[float]) -> Change:
    """Compare two windows of single steps."""
    spread = stdev(first), stdev(last)
    if len(first) < _MIN_STEPS:  # So few may lie close by luck.
        spread = max(spread), max(spread)
    error = hypot(spread[0] / len(first) ** 0.5, spread[1] / len(last) ** 0.5)
    return Change(then=fmean(first), now=fmean(last), error=error)


class History:
    """The steps that later ones are compared with."""

    def __init__(self, records: Iterable[Mapping[str, float]] = ()) -> None:
        self.first: list[Mapping[str, float]] = []
        """The first steps of the run, of whichever attempt."""
        self.last: deque[Mapping[str, float]] = deque(maxlen=NUM_LOW - 1)
        """The last steps, none of which is a first one: with the step that is looked at, `NUM_LOW`."""
        self.grad_norms: deque[float] = deque(maxlen=NUM_RECENT)
        """Those of the last steps with a gradient."""
        self.rewards: deque[float] = deque(maxlen=NUM_LOW)
        """Mean rewards of the last steps."""
        self.best_rewards: tuple[float, ...] = ()
        """The `NUM_LOW` rewards in a row with the highest mean."""
        self.used_lengths = deque([1.0] * NUM_LOW, maxlen=NUM_LOW)
        """Mean length of the replies used by the last steps, over that of all that were dispatched. Full from
        the beginning: one odd step is no selection."""
        for record in records:
            self.add(record)

    def add(self, metrics: Mapping[str, float]) -> None:
        """Take the numbers of the next step."""
        if len(self.first) < NUM_FIRST:
            self.first.append(dict(metrics))
        else:
            self.last.append(dict(metrics))
        # A step without signal has norm 0 and says nothing about the norms of others.
        if metrics.get("grad_norm"):
            self.grad_norms.append(metrics["grad_norm"])
        if "reply_tokens_mean" in metrics:
            self.used_lengths.append(metrics.get("used_length_ratio", 1.0))
        if "reward_mean" in metrics:
            self.rewards.append(metrics["reward_mean"])
            is_whole = len(self.rewards) == NUM_LOW
            if is_whole and (not self.best_rewards or fmean(self.rewards) > fmean(self.best_rewards)):
                self.best_rewards = tuple(self.rewards)

    def first_values(self, metric: str) -> list[float]:
        """Return a metric's values in the first steps."""
        return [metrics[metric] for metrics in self.first if metric in metrics]

    def compare(self, metric: str, metrics: Mapping[str, float], num_first: int = NUM_FIRST) -> Change | None:
        """Compare the last `NUM_LOW` steps, that of `metrics` among them, with the first `num_first`.

        None until `NUM_FIRST` steps lie before them, and where more than two steps of either lack the metric.
        """
        first = [step[metric] for step in self.first[:num_first] if metric in step]
        last = [step[metric] for step in (*self.last, metrics) if metric in step]
        is_early = len(self.last) < NUM_LOW - 1
        is_short = len(first) < min(_MIN_STEPS, num_first) or len(last) < _MIN_STEPS
        if is_early or metric not in metrics or is_short:
            return None
        return change_between(first, last)
