"""What the page tells of a run, read from its record.

It reads and selects; nothing is formatted here. A run that is going on, was killed or has no evaluation is as
readable as a finished one: missing records are absent.
"""

from __future__ import annotations

import json
import tomllib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.errors import CorruptRecord
from strop.evaluate import EvalResult, Interval, compare_results
from strop.evaluate.result import PROTOCOL_FIELDS
from strop.record import Event, EventKind, RunState
from strop.record.files import RecordFiles
from strop.record.prediction import PREDICTION_NAME, Prediction, parse_prediction
from strop.rollout import Rollout
from strop.view.live import LiveRun

EXAMPLES_SHOWN = 3
NOTED_KINDS = frozenset({EventKind.RESUME, EventKind.NOTICE, EventKind.STOP})


@dataclass(frozen=True, kw_only=True, slots=True)
class BeforeAfter:
    """The first and the last evaluation of one protocol."""

    before: EvalResult
    after: EvalResult
    change: Interval | None
    """Paired difference of greedy accuracy over the same examples; None if it cannot be computed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutsAtStep:
    """A few rollouts of one example of one step."""

    step: int
    """Steps completed when they were sampled."""
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """The record of a run."""

    path: Path
    state: RunState
    spec_text: str
    spec: Mapping[str, Any]
    metrics: Sequence[Mapping[str, float]]
    events: Sequence[Event]
    evals: Sequence[EvalResult]
    """By step; only of the protocol measured most often."""
    prediction: Prediction | None = None
    """The plan's predicted time and memory."""
    audit: Mapping[str, Any] | None = None
    """The report of the task's audit, `audit.json`."""

    @property
    def num_steps(self) -> int:
        """Recorded steps."""
        return int(self.metrics[-1]["step"]) if self.metrics else 0


def read_live(live: LiveRun, events: Sequence[Event] | None = None) -> RunRecord:
    """Read a live run, without rollouts. `events`: the events, if the caller has read them."""
    live.read_metrics()
    files = live.record
    spec_text = (files.read("spec.toml") or b"").decode(errors="replace")
    prediction, audit = files.read(PREDICTION_NAME), files.read("audit.json")
    try:
        audited = None if audit is None else json.loads(audit)
        if audited is not None and not isinstance(audited, dict):
            raise TypeError("it is no JSON object")
    except (ValueError, TypeError) as error:
        raise CorruptRecord(
            f"{files.describe('audit.json')} is damaged ({error})",
            allowed="the JSON that strop wrote",
            next_step="remove it: `strop audit` makes another one",
        ) from error
    return RunRecord(
        path=Path(live.key),
        state=live.read_state(),
        spec_text=spec_text,
        spec=tomllib.loads(spec_text),
        metrics=live.metrics,
        events=live.read_events()[0] if events is None else events,
        evals=choose_results(live.read_results()),
        prediction=None
        if prediction is None
        else parse_prediction(prediction, files.describe(PREDICTION_NAME)),
        audit=audited,
    )


def choose_at_step(files: RecordFiles, step: int) -> RolloutsAtStep | None:
    """Choose a few rollouts of a step; None if a resume has removed them meanwhile."""
    # Imported here: pyarrow is heavy, and a run without rollouts does not need it.
    from strop.record.rows import list_rows, read_row

    name = f"rollouts/step-{step:06d}.parquet"
    data, place = files.read(name), files.describe(name)
    if data is None:
        return None
    chosen = choose_rows([(row.example_id, row.reward) for row in list_rows(data, place)])
    rollouts = tuple(read_row(data, place, index).rollout for index in chosen)
    return RolloutsAtStep(step=rollouts[0].step, rollouts=rollouts) if rollouts else None


def choose_results(results: Sequence[EvalResult]) -> list[EvalResult]:
    """Return the largest set of evaluations that can be compared with each other, by step."""
    by_protocol: dict[str, list[EvalResult]] = defaultdict(list)
    for result in results:
        by_protocol[result.protocol_digest].append(result)
    largest = max(by_protocol.values(), key=len, default=[])
    return sorted(largest, key=lambda result: result.step)


def choose_rows(rows: Sequence[tuple[str, float | None]]) -> list[int]:
    """Choose a few rollouts of the example whose rewards differ most; return their indices.

    `rows`: example and reward of each rollout. The example's best, worst and a middle rollout are chosen.
    Ties go to the first; unscored rollouts are chosen only if an example has no scored ones.
    """
    groups: dict[str, list[int]] = defaultdict(list)
    for index, (example_id, _) in enumerate(rows):
        groups[example_id].append(index)
    if not groups:
        return []

    def spread(group: Sequence[int]) -> float:
        rewards = [reward for index in group if (reward := rows[index][1]) is not None]
        return max(rewards) - min(rewards) if rewards else -1.0

    group = max(groups.values(), key=spread)
    scored = [index for index in group if rows[index][1] is not None] or group
    ranked = sorted(scored, key=lambda index: -(rows[index][1] or 0.0))
    positions = dict.fromkeys((0, len(ranked) // 2, len(ranked) - 1))
    return [ranked[position] for position in positions][:EXAMPLES_SHOWN]


def compare_ends(evals: Sequence[EvalResult]) -> BeforeAfter | None:
    """Compare the first evaluation with the last; None if there are not two of different steps."""
    if len(evals) < 2 or evals[0].step == evals[-1].step:
        return None
    before, after = evals[0], evals[-1]
    change = None
    # Invalid results are shown, but not compared.
    if before.is_valid and after.is_valid:
        change = compare_results(before, after).greedy
    return BeforeAfter(before=before, after=after, change=change)


def describe_protocol(result: EvalResult) -> dict[str, str]:
    """Return the fields of an evaluation's protocol, with which it can be repeated."""
    values = result.model_dump(mode="json", include=set(PROTOCOL_FIELDS))
    return {name: str(values[name]) for name in PROTOCOL_FIELDS}
