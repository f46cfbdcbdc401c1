"""The interface through which a run reports its progress; terminals and pages implement it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from strop.record.events import Event
from strop.tasks.failures import FailureCause


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalSummary:
    """The result of one evaluation, as an observer shows it."""

    step: int
    """Steps behind the evaluated weights."""
    num_examples: int
    greedy_accuracy: float
    greedy_low: float
    """Lower end of the 95 % interval."""
    greedy_high: float
    sampled_accuracy: float | None
    invalid_cause: str | None = None
    """Why the numbers may not be believed, None where they may."""
    causes: tuple[FailureCause, ...] = ()
    """Why rollouts could not be judged, the commonest cause first."""
    best_step: int | None = None
    """Step of the best earlier evaluation of the run; None where there is none to compare with."""
    change: float | None = None
    """Change of greedy accuracy since `best_step`, on the same examples."""
    change_high: float | None = None
    """Upper end of its 95 % interval."""


Evaluator = Callable[[int, Callable[[], None]], Awaitable[EvalSummary]]
"""Evaluates the policy after that many steps, records the result and sums it up.

It calls its second argument on progress, so that a long evaluation does not count as a stall.
"""


class Observer(Protocol):
    """Receives the progress of a run."""

    def on_start(self, *, run: str, first_step: int, num_steps: int) -> None:
        """Begin with the run directory, the steps already done and the steps asked for."""
        ...

    def on_step(self, metrics: Mapping[str, float]) -> None:
        """Take the metrics of one completed step."""
        ...

    def on_event(self, event: Event) -> None:
        """Take an event: an alarm or a notice."""
        ...

    def on_eval(self, summary: EvalSummary) -> None:
        """Take the result of an evaluation."""
        ...

    def on_end(self, *, cause: str) -> None:
        """End, with the cause in a word."""
        ...
