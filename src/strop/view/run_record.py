"""What a report tells, read from a run directory with the readers of the rooms that wrote it.

Only reading and choosing; nothing is formatted here. A run that is going on, was killed or has no
evaluation is as readable as a finished one: what is not there yet is absent, not invented.
"""

from __future__ import annotations

import tomllib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.evaluate import EvalResult, Interval, compare_results, read_result
from strop.evaluate.result import PROTOCOL_FIELDS
from strop.record import Event, EventKind, RunDir, RunState
from strop.record.prediction import Prediction, read_prediction
from strop.rollout import Rollout
from strop.view.terminal import ALARM_KINDS

EXAMPLES_SHOWN = 3
NOTED_KINDS = frozenset({EventKind.RESUME, EventKind.NOTICE, EventKind.STOP})
STAGES = ("generate", "verify", "learn", "sync", "other")
"""The parts of a step, in the order they happen; metric `seconds_<stage>` holds each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BeforeAfter:
    """The first and the last evaluation of one protocol."""

    before: EvalResult
    after: EvalResult
    change: Interval | None
    """Paired difference of greedy accuracy over the same examples; None if it cannot be given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AlarmCount:
    """All events of one cause."""

    kind: str
    cause: str
    num_times: int
    first_step: int
    last_step: int
    detail: str
    """The sentence of the last one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutsAtStep:
    """A few rollouts of one example of one step."""

    step: int
    """Steps completed when the model wrote them."""
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """A run as its directory tells it."""

    path: Path
    state: RunState
    spec_text: str
    spec: Mapping[str, Any]
    metrics: Sequence[Mapping[str, float]]
    events: Sequence[Event]
    evals: Sequence[EvalResult]
    """By step; one protocol only, the one measured most often."""
    early: RolloutsAtStep | None
    late: RolloutsAtStep | None
    prediction: Prediction | None = None
    """What the run was expected to take."""

    @property
    def num_steps(self) -> int:
        """Steps that are recorded."""
        return int(self.metrics[-1]["step"]) if self.metrics else 0


def read_run_record(run_dir: Path) -> RunRecord:
    """Read a run directory.

    Raises: StoreError if it is not one; CorruptRecord if a record in it is damaged.
    """
    run = RunDir.open(run_dir)
    spec_text = run.spec_path.read_text(encoding="utf-8")
    early, late = _read_rollouts(run_dir)
    evals = [read_result(path) for path in sorted((run_dir / "eval").glob("*.json"))]
    return RunRecord(
        path=run_dir,
        state=run.state,
        spec_text=spec_text,
        spec=tomllib.loads(spec_text),
        metrics=run.metrics.read(),
        events=run.events.read(),
        evals=choose_results(evals),
        early=early,
        late=late,
        prediction=read_prediction(run_dir),
    )


def choose_results(results: Sequence[EvalResult]) -> list[EvalResult]:
    """Return the evaluations that can be compared with each other, the largest such set, by step."""
    by_protocol: dict[str, list[EvalResult]] = defaultdict(list)
    for result in results:
        by_protocol[result.protocol_digest].append(result)
    largest = max(by_protocol.values(), key=len, default=[])
    return sorted(largest, key=lambda result: result.step)


def _read_rollouts(run_dir: Path) -> tuple[RolloutsAtStep | None, RolloutsAtStep | None]:
    """Read examples of the first and of the last recorded step; one of them alone counts as early."""
    paths = sorted((run_dir / "rollouts").glob("step-*.parquet"))
    if not paths:
        return None, None
    # Here, because pyarrow is heavy and a run without rollouts does not need it.
    from strop.record.rollouts import read_rollouts

    early = choose_rollouts(read_rollouts(paths[0]))
    late = choose_rollouts(read_rollouts(paths[-1])) if len(paths) > 1 else None
    return early, late


def choose_rollouts(rollouts: Sequence[Rollout]) -> RolloutsAtStep | None:
    """Choose a few rollouts of the most telling example: the one whose rewards differ most.

    Of its rollouts the best, the worst and one between are taken. Ties go to the first; unscored
    rollouts are taken only where an example has no scored ones.
    """
    groups: dict[str, list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        groups[rollout.example.example_id].append(rollout)
    if not groups:
        return None

    def spread(group: Sequence[Rollout]) -> float:
        rewards = [r.outcome.reward for r in group if r.outcome.reward is not None]
        return max(rewards) - min(rewards) if rewards else -1.0

    group = max(groups.values(), key=spread)
    ranked = sorted(group, key=lambda r: (r.outcome.reward is None, -(r.outcome.reward or 0.0)))
    scored = [rollout for rollout in ranked if rollout.outcome.is_scored] or ranked
    positions = dict.fromkeys((0, len(scored) // 2, len(scored) - 1))
    chosen = [scored[position] for position in positions][:EXAMPLES_SHOWN]
    return RolloutsAtStep(step=chosen[0].step, rollouts=tuple(chosen))


def compare_ends(evals: Sequence[EvalResult]) -> BeforeAfter | None:
    """Compare the first evaluation with the last; None if there are not two of different steps."""
    if len(evals) < 2 or evals[0].step == evals[-1].step:
        return None
    before, after = evals[0], evals[-1]
    change = None
    # Invalid results are shown as such, but nothing is concluded from them.
    if before.is_valid and after.is_valid:
        change = compare_results(before, after).greedy
    return BeforeAfter(before=before, after=after, change=change)


def count_alarms(events: Sequence[Event]) -> list[AlarmCount]:
    """Count alarms by cause, in order of their first appearance.

    A cause that repeats is thinned out in the log; its last entry's `occurrence` restores the count
    within one process, so the sum over restarts is a lower bound.
    """
    by_cause: dict[tuple[str, str], list[Event]] = defaultdict(list)
    for event in events:
        if event.kind in ALARM_KINDS:
            by_cause[event.kind.value, event.cause].append(event)
    return [
        AlarmCount(
            kind=kind,
            cause=cause,
            num_times=max(len(group), *(event.occurrence for event in group)),
            first_step=group[0].step,
            last_step=group[-1].step,
            detail=group[-1].detail,
        )
        for (kind, cause), group in by_cause.items()
    ]


def sum_stages(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the seconds that each stage took over all steps; stages never measured are left out."""
    totals: dict[str, float] = {}
    for stage in STAGES:
        seconds = [line[f"seconds_{stage}"] for line in metrics if f"seconds_{stage}" in line]
        if seconds:
            totals[stage] = sum(seconds)
    return totals


def describe_protocol(result: EvalResult) -> dict[str, str]:
    """Return what an evaluation was measured by, for a reader who wants to repeat it."""
    values = result.model_dump(mode="json", include=set(PROTOCOL_FIELDS))
    return {name: str(values[name]) for name in PROTOCOL_FIELDS}
