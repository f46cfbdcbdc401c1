"""The plan's prediction of time, memory and price, kept in the run's directory as `plan.json`.

Written before the first step, from the plan; read by the loop, which names a stage that is slower than
planned, and by the report. Numbers of stages are seconds of one step, under the names of the metrics.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median

from strop.errors import CorruptRecord
from strop.io.atomic import write_bytes_atomically

PREDICTION_NAME = "plan.json"
PRICE_VARIABLE = "STROP_USD_PER_HOUR"
"""What an hour of the whole job costs; the launcher sets it where the site's profile says."""
NUM_WARM_UP = 1
"""Steps of a process that are no measure: caches fill, kernels are compiled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """The plan's numbers that a run can be held to."""

    hardware: str
    basis: str
    """Where the speeds are from."""
    is_measured: bool
    """Whether they were measured on this machine."""
    is_overlapped: bool
    """Rollouts are sampled while the learner works: the loop waits for what is left of generating."""
    seconds: Mapping[str, float]
    """By stage: generate, verify, learn, sync."""
    step_s: float
    scored_tokens_per_s: float
    num_reply_tokens: float
    """Sampled in a step, and positions forwarded: what the seconds were worked out for."""
    num_positions: float
    memory_bytes: float
    """Of the run's own process at its peak."""
    bottleneck: str
    total_s: float = 0.0
    """All steps and evaluations; 0 in files of older versions."""
    usd_per_hour: float | None = None
    """Of the whole job; None where it is not known."""


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
        """Measured by planned; None where nothing was planned."""
        return self.measured / self.planned if self.planned else None


def read_usd_per_hour(environ: Mapping[str, str]) -> float | None:
    """Return what an hour of this job costs; None where the variable is not set or is no price."""
    try:
        found = float(environ.get(PRICE_VARIABLE, ""))
    except ValueError:
        return None
    return found if math.isfinite(found) and found >= 0.0 else None


def write_prediction(run_path: Path, prediction: Prediction) -> None:
    """Write it into a run's directory. Raises: StoreError if the disk fails."""
    content = json.dumps(asdict(prediction), indent=1).encode()
    write_bytes_atomically(run_path / PREDICTION_NAME, content)


def read_prediction(run_path: Path) -> Prediction | None:
    """Return the prediction of a run, or None where there is none. Raises: CorruptRecord if it is none."""
    path = run_path / PREDICTION_NAME
    try:
        return parse_prediction(path.read_bytes(), str(path))
    except FileNotFoundError:
        return None


def parse_prediction(data: bytes, place: str) -> Prediction:
    """Return the prediction in a file's bytes; `place` names it. Raises: CorruptRecord if it is none."""
    try:
        return Prediction(**json.loads(data))
    except (ValueError, TypeError) as error:
        raise CorruptRecord(
            f"{place} is no prediction: {error}",
            allowed=f"JSON with the keys {', '.join(field.name for field in fields(Prediction))}",
            next_step="remove the file: the run goes on without it",
        ) from error


def compare_prediction(prediction: Prediction, metrics: Sequence[Mapping[str, float]]) -> list[Comparison]:
    """Return planned and measured numbers of the steps behind the first one, medians of steps.

    A number that was not measured is left out. Empty without such steps.
    """
    steps = metrics[NUM_WARM_UP:]
    stages = dict(prediction.seconds)
    if prediction.is_overlapped:
        hidden_s = stages.pop("verify", 0.0) + stages.get("learn", 0.0) + stages.get("sync", 0.0)
        stages["generate"] = max(prediction.step_s - hidden_s, 0.0)
    names = {"generate": "wait for rollouts"} if prediction.is_overlapped else {}
    wanted = [(f"seconds_{stage}", names.get(stage, stage), "s", value) for stage, value in stages.items()]
    wanted += [
        ("seconds_step", "step", "s", prediction.step_s),
        ("scored_tokens_per_s", "scored tokens", "tokens/s", prediction.scored_tokens_per_s),
    ]
    found = []
    for key, name, unit, planned in wanted:
        values = [line[key] for line in steps if key in line]
        if values:
            found.append(Comparison(name=name, unit=unit, planned=planned, measured=median(values)))
    if prediction.usd_per_hour is not None:
        found += [
            Comparison(
                name=f"price of a {one.name}",
                unit="USD",
                planned=prediction.usd_per_hour * one.planned / 3600.0,
                measured=prediction.usd_per_hour * one.measured / 3600.0,
            )
            for one in found
            if one.name == "step"
        ]
    peaks = [line["peak_memory_bytes"] for line in steps if "peak_memory_bytes" in line]
    if peaks and prediction.memory_bytes:
        peak = Comparison(
            name="memory peak", unit="bytes", planned=prediction.memory_bytes, measured=max(peaks)
        )
        found.append(peak)
    return found


def scale_to_work(prediction: Prediction, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the planned seconds of each stage for the work of a step that had more of it than planned.

    Replies get longer and shorter while a model learns, which is no fault of the machine. Less work than
    planned does not lower the bound: part of every stage is overhead.
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
