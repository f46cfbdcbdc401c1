"""Everything that looks at a step's numbers: bounds, trends, the plan, memory, and what they say together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from strop.record.events import Event
from strop.record.prediction import Prediction
from strop.rollout import Group
from strop.spec.run import RunSpec
from strop.tasks import Ordered, Task
from strop.train.collapse import CollapseWatch
from strop.train.history import History
from strop.train.impossible import find_impossible
from strop.train.pace import PaceWatch
from strop.train.replies import with_samples
from strop.train.room import MemoryWatch
from strop.train.trends import find_trend_alarms
from strop.train.tripwires import find_alarms, find_format_drift


class StepWatch:
    """Watches the steps of one run, in their order."""

    def __init__(self, spec: RunSpec, task: Task, prediction: Prediction | None) -> None:
        self._wires = spec.tripwires
        if spec.train.terms == "distill":
            # Nobody is paid there, and a teacher that is surer of itself is what was asked for.
            no_pay = {"max_unearned_ratio": None, "min_entropy_kept_frac": None}
            self._wires = spec.tripwires.model_copy(update=no_pay)
        self._history = History()
        self._pace = PaceWatch(prediction, spec.tripwires.max_slowdown_ratio)
        self._memory = MemoryWatch(spec.tripwires.max_memory_growth_bytes)
        self.collapse = CollapseWatch(is_ordered=isinstance(task, Ordered))
        """What the alarms of the last steps are together."""

    def recall(self, records: Iterable[Mapping[str, float]]) -> None:
        """Take the steps that were done before, by an earlier attempt or another process."""
        for metrics in records:
            self._compare(int(metrics["step"]), metrics)

    def find_alarms(self, step: int, metrics: Mapping[str, float], groups: Sequence[Group]) -> list[Event]:
        """Return the alarms of the next step; `groups` are what it sampled."""
        alarms = find_impossible(step, metrics) + self._compare(step, metrics)
        alarms += self._pace.find_slow(step, metrics)
        alarms += find_format_drift(step, metrics, self._history.first[0])
        if "memory_bytes" in metrics:
            alarms += self._memory.find_growth(step, metrics["memory_bytes"])
        return with_samples(alarms, groups)

    def _compare(self, step: int, metrics: Mapping[str, float]) -> list[Event]:
        """Compare a step with bounds and with the steps before, and keep it for later ones."""
        alarms = find_alarms(self._wires, step, metrics)
        alarms += find_trend_alarms(self._wires, step, metrics, self._history)
        self.collapse.note([alarm.cause for alarm in alarms], metrics, self._history)
        self._history.add(metrics)
        return alarms
