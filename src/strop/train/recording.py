"""What a step leaves: how each of its rollouts ended, what its tokens were worth, and when who did what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from strop.hardware.busy_clock import BusyClock
from strop.record import RunDir
from strop.record.rollouts import StoredRollout, write_trained
from strop.record.timeline import ENVIRONMENTS, VERIFIER, Timeline
from strop.rollout import Group
from strop.tasks.judging import TimedJudge
from strop.train.batch import TrainBatch, TurnAdvantages
from strop.train.generation import Batch, Collector, GroupStatus, age_of, sort_by_status

MAX_ENGINE_SPANS = 128
"""In a line, over all engines."""
MAX_VERIFIER_SPANS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledStep:
    """The rollouts that were sampled for one step."""

    trained: tuple[StoredRollout, ...] = ()
    """Those of the batch, whether or not they gave a gradient."""
    discarded: tuple[StoredRollout, ...] = ()
    """Those of groups that were replaced on the way to it."""
    statuses: tuple[GroupStatus, ...] = ()
    """Of each group of the batch."""

    def write(self, run_dir: RunDir, step: int) -> None:
        """Write the rollouts of a step; none where there are none.

        Raises: UnfitRecord if a text is not valid Unicode; StoreError if the disk fails.
        """
        if self.trained:
            write_trained(run_dir.rollouts_path(step), self.trained)
        if self.discarded:
            path = run_dir.discarded_path(step)
            path.parent.mkdir(exist_ok=True)
            write_trained(path, self.discarded)


def tell_fates(
    collected: Batch, batch: TrainBatch, advantages: Sequence[Sequence[TurnAdvantages]], *, version: int
) -> SampledStep:
    """Return a step's rollouts with what became of them. `version` is that of the weights that they meet."""
    statuses = sort_by_status(collected.groups, batch)
    trained = [
        _store(group, status, version, of_group)
        for group, status, of_group in zip(collected.groups, statuses, advantages, strict=True)
    ]
    discarded = [_store(group, status, version) for status, group in collected.discarded]
    return SampledStep(
        trained=tuple(one for members in trained for one in members),
        discarded=tuple(one for members in discarded for one in members),
        statuses=tuple(statuses),
    )


def _store(
    group: Group, status: GroupStatus, version: int, advantages: Sequence[TurnAdvantages] | None = None
) -> list[StoredRollout]:
    return [
        StoredRollout(
            rollout=rollout,
            advantages=of_turns,
            status=status.value,
            staleness=age_of(rollout, version),
        )
        for rollout, of_turns in zip(group.rollouts, advantages or [()] * len(group.rollouts), strict=True)
    ]


def add_lanes(
    timeline: Timeline,
    collector: Collector,
    judge: TimedJudge,
    collected: Batch | None,
    statuses: Sequence[GroupStatus],
) -> None:
    """Add when a step's groups were attempted, and when engines and verifier were asked since the last."""
    if collected is not None:
        ended = zip(collected.numbers, collected.groups, statuses, strict=True)
        gone = zip(collected.discarded_numbers, collected.discarded, strict=True)
        for number, group, status in (*ended, *((number, group, status) for number, (status, group) in gone)):
            interval = collector.take_interval(number)
            if interval is not None:
                detail = {"number": number, "example": group.example.example_id, "status": status.value}
                timeline.add(ENVIRONMENTS, "group", *interval, detail)
    clocks: dict[str, BusyClock | TimedJudge] = dict(collector.busy)
    verifiers = [judge, *([clocks.pop(VERIFIER)] if VERIFIER in clocks else [])]
    for name, clock in clocks.items():
        for interval in clock.take_intervals(max(MAX_ENGINE_SPANS // len(clocks), 1)):
            timeline.add(name.replace("-", " "), "generate", *interval)
    for clock in verifiers:
        for interval in clock.take_intervals(MAX_VERIFIER_SPANS // len(verifiers)):
            timeline.add(VERIFIER, "verify", *interval)
