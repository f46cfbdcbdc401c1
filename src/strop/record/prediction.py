"""The plan's prediction of time, memory and price, kept in the run's directory as `plan.json`.

Written from the plan before the first step; read by the loop, which reports a stage that is slower than
planned, and by the report. Stage times are seconds of one step, under the names of the metrics.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median

from strop.errors import CorruptRecord
from strop.io.atomic import write_bytes_atomically

PREDICTION_NAME = "plan.json"
PRICE_VARIABLE = "STROP_USD_PER_HOUR"
"""Price of an hour of the whole job; the launcher sets it from the site's profile."""
NUM_WARM_UP = 1
"""First steps of a process, which are not measured: caches fill, kernels are compiled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """The plan's numbers that are compared with the run's."""

    hardware: str
    basis: str
    """Source of the speeds."""
    is_measured: bool
    """Whether they were measured on this machine."""
    is_overlapped: bool
    """Rollouts are sampled while the learner works: the loop waits for the rest of the generation."""
    seconds: Mapping[str, float]
    """By stage: generate, verify, learn, sync."""
    step_s: float
    scored_tokens_per_s: float
    num_reply_tokens: float
    """Tokens sampled in a step; the seconds are for these and `num_positions`."""
    num_positions: float
    """Positions forwarded in a step."""
    memory_bytes: float
    """Peak of the run's process."""
    bottleneck: str
    total_s: float = 0.0
    """All steps and evaluations; 0 in files of older versions."""
    usd_per_hour: float | None = None
    """Price of the whole job; None if unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One number of the plan and its measured value."""

    name: str
    unit: str
    """'s', 'bytes', 'tokens/s' or 'USD'."""
    planned: float
    measured: float

    @property
    def ratio(self) -> float | None:
        """Measured by planned; None if 0 was planned."""
        return self.measured / self.planned if self.planned else None


def read_usd_per_hour(environ: Mapping[str, str]) -> float | None:
    """Return the price of an hour of this job; None if the variable is not set or is no price."""
    try:
        price = float(environ.get(PRICE_VARIABLE, ""))
    except ValueError:
        return None
    return price if math.isfinite(price) and price >= 0.0 else None


def write_prediction(run_path: Path, prediction: Prediction) -> None:
    """Write a prediction into a run's directory. Raises: StoreError if the disk fails."""
    content = json.dumps(asdict(prediction), indent=1).encode()
    write_bytes_atomically(run_path / PREDICTION_NAME, content)


def read_prediction(run_path: Path) -> Prediction | None:
    """Return the prediction of a run, or None if it has none. Raises: CorruptRecord if it is damaged."""
    path = run_path / PREDICTION_NAME
    try:
        return parse_prediction(path.read_bytes(), str(path))
    except FileNotFoundError:
        return None


def parse_prediction(data: bytes, place: str) -> Prediction:
    """Parse a prediction; `place` names its file. Raises: CorruptRecord if it is damaged."""
    try:
        return Prediction(**json.loads(data))
    except (ValueError, TypeError) as error:
        raise CorruptRecord(
            f"{place} is no prediction: {error}",
            allowed=f"JSON with the keys {', '.join(field.name for field in fields(Prediction))}",
            next_step="remove the file: the run goes on without it",
        ) from error


def compare_prediction(prediction: Prediction, metrics: Sequence[Mapping[str, float]]) -> list[Comparison]:
    """Return planned and measured numbers, as medians over the steps after the first.

    Numbers without a measurement are left out.
    """
    found: list[Comparison] = []

    def add(
        name: str,
        unit: str,
        planned: float,
        key: str,
        scale: float = 1.0,
        of: Callable[[list[float]], float] = median,
    ) -> None:
        if values := [scale * line[key] for line in metrics[NUM_WARM_UP:] if key in line]:
            found.append(Comparison(name=name, unit=unit, planned=planned, measured=of(values)))

    stages, wait = dict(prediction.seconds), "generate"
    if prediction.is_overlapped:
        hidden_s = stages.pop("verify", 0.0) + stages.get("learn", 0.0) + stages.get("sync", 0.0)
        stages["generate"], wait = max(prediction.step_s - hidden_s, 0.0), "wait for rollouts"
    for stage, planned in stages.items():
        add(wait if stage == "generate" else stage, "s", planned, f"seconds_{stage}")
    add("step", "s", prediction.step_s, "seconds_step")
    add("scored tokens", "tokens/s", prediction.scored_tokens_per_s, "scored_tokens_per_s")
    if (usd := prediction.usd_per_hour) is not None:
        add("price of a step", "USD", usd * prediction.step_s / 3600.0, "seconds_step", usd / 3600.0)
    if prediction.memory_bytes:
        add("memory peak", "bytes", prediction.memory_bytes, "peak_memory_bytes", of=max)
    return found


def scale_to_work(prediction: Prediction, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the planned seconds of each stage, scaled up if the step had more work than planned.

    Replies get longer and shorter while a model learns, whatever the machine. Less work than planned does
    not lower the bound: part of every stage is overhead.
    """
    tokens = metrics.get("num_scored_tokens", 0.0)
    scales = {
        "generate": _excess(tokens, prediction.num_reply_tokens),
        "verify": 1.0,
        "learn": _excess(metrics.get("num_positions", 0.0), prediction.num_positions),
        "sync": 1.0,
    }
    return {stage: scales.get(stage, 1.0) * planned for stage, planned in prediction.seconds.items()}


def _excess(found: float, planned: float) -> float:
    return max(found / planned, 1.0) if planned else 1.0
