"""Runs every watch on the numbers of a step, and logs why rollouts were lost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from strop.record import Event, EventKind
from strop.record.prediction import Prediction
from strop.rollout import PROMPT_TOO_LONG, Group
from strop.spec.run import RunSpec
from strop.tasks import Task, epoch_order_of
from strop.tasks.failures import FailureCause, describe_failure, find_causes, find_failures
from strop.train.watch.process import MemoryWatch, PaceWatch
from strop.train.watch.replies import with_samples
from strop.train.watch.trends import CollapseWatch, History, find_trend_alarms
from strop.train.watch.tripwires import find_alarms, find_format_drift, find_impossible


class StepWatch:
    """Looks at the numbers of each step of one run, in order: bounds, trends, the plan and memory."""

    def __init__(self, spec: RunSpec, task: Task, prediction: Prediction | None) -> None:
        self._wires = spec.tripwires
        if spec.train.terms == "distill":
            # There is no reward, and entropy falls on purpose where the teacher is surer than the policy.
            no_pay = {"max_unearned_ratio": None, "min_entropy_kept_frac": None}
            self._wires = spec.tripwires.model_copy(update=no_pay)
        self._history = History()
        self._pace = PaceWatch(prediction, spec.tripwires.max_slowdown_ratio)
        self._memory = MemoryWatch(spec.tripwires.max_memory_growth_bytes)
        self.collapse = CollapseWatch(is_ordered=epoch_order_of(task) is not None)
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


class CauseLog:
    """Publishes why rollouts were lost: each cause once, with its traceback, and not each rollout."""

    def __init__(self, publish: Callable[[Event], None]) -> None:
        self._publish = publish
        self._published: set[tuple[str, str, str | None]] = set()

    def note(self, step: int, causes: Sequence[FailureCause]) -> None:
        """Publish the causes that are new."""
        for cause in causes:
            if cause.key in self._published:
                continue
            self._published.add(cause.key)
            self._publish(
                Event(
                    kind=EventKind.ROLLOUT_LOST,
                    step=step,
                    cause=cause.failure.kind,
                    detail=f"{describe_failure(cause.failure)}; {cause.num} times until now",
                    trace=cause.failure.detail,
                )
            )

    def note_groups(self, step: int, groups: Sequence[Group]) -> None:
        """Publish the new causes among the rollouts of groups."""
        outcomes = (rollout.outcome for group in groups for rollout in group.rollouts)
        self.note(step, find_causes(find_failures(outcomes)))

    def note_too_long(self, step: int, groups: Sequence[Group]) -> int:
        """Publish the examples whose prompts left no room for a reply; return how many were attempted."""
        too_long = [group for group in groups if all(r.outcome.is_too_long for r in group.rollouts)]
        if too_long:
            ids = tuple(group.example.example_id for group in too_long)
            failure = too_long[0].rollouts[0].outcome.failure
            detail = f"{len(ids)} examples were not attempted: {failure.detail if failure else ''}"
            self._publish(
                Event(
                    kind=EventKind.ROLLOUT_LOST,
                    step=step,
                    cause=PROMPT_TOO_LONG,
                    detail=detail,
                    example_ids=ids,
                )
            )
        return len(groups) - len(too_long)
