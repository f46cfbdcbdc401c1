"""Whether a run keeps the pace that was planned for it (PRC-9).

A model on the wrong device, a wait for the device at every token, or ranks that all do the whole work
cost nothing but time, so nothing else shows them. Stages are compared one by one, and the alarm names
the one that is slow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median

from strop.record.events import Event, EventKind
from strop.record.prediction import NUM_WARM_UP, Prediction, scale_to_work

NUM_STEPS = 3
"""Steps whose median counts: one slow step is the machine's affair."""
MIN_EXCESS_S = 2.0
"""A stage that lasts less than so much longer than planned is too short to be compared."""
ASSUMED_FACTOR = 2.0
"""The bound counts so many times where the machine's speed was assumed and not measured."""
_STAGES = ("generate", "learn", "sync")
"""Judging is not among them: how long a task's judge takes is not planned, only assumed."""
_CAUSES = {
    "generate": "look on which device the engine computes, and how many rows it decodes",
    "learn": "look on which device the learner computes, and whether each rank is given its own share",
    "sync": "look at the disk or link that the weights go over",
}


class PaceWatch:
    """Compares the stages of a process's steps with the plan. Without a prediction it watches nothing."""

    def __init__(self, prediction: Prediction | None, max_slowdown_ratio: float | None) -> None:
        self._prediction = prediction
        self._max_ratio = max_slowdown_ratio
        self._num_seen = 0
        self._excess: dict[str, deque[tuple[float, float]]] = {
            stage: deque(maxlen=NUM_STEPS) for stage in _STAGES
        }

    def find_slow(self, step: int, metrics: Mapping[str, float]) -> list[Event]:
        """Take the numbers of a step; return an alarm for each stage that keeps being slower than planned."""
        self._num_seen += 1
        if self._prediction is None or self._max_ratio is None or self._num_seen <= NUM_WARM_UP:
            return []
        bound = self._max_ratio * (1.0 if self._prediction.is_measured else ASSUMED_FACTOR)
        planned = scale_to_work(self._prediction, metrics)
        alarms = []
        for stage, seen in self._excess.items():
            if f"seconds_{stage}" not in metrics or stage not in planned:
                continue
            seen.append((metrics[f"seconds_{stage}"], planned[stage]))
            if len(seen) < NUM_STEPS:
                continue
            took_s, planned_s = (median(values) for values in zip(*seen, strict=True))
            if took_s > bound * planned_s and took_s > planned_s + MIN_EXCESS_S:
                alarms.append(self._alarm(step, stage, took_s, planned_s))
        return alarms

    def _alarm(self, step: int, stage: str, took_s: float, planned_s: float) -> Event:
        plan = self._prediction
        assert plan is not None
        basis = "" if plan.is_measured else f" (twice, because its speed is {plan.basis})"
        detail = (
            f"{stage} took {took_s:.3g} s in the last {NUM_STEPS} steps, and {planned_s:.3g} s were planned"
            f" on {plan.hardware}: more than tripwires.max_slowdown_ratio={self._max_ratio:g} times as long"
            f"{basis}; {_CAUSES[stage]}, and whether others use the machine"
        )
        return Event(kind=EventKind.TRIPWIRE, step=step, cause="slower_than_plan", detail=detail)
