"""The learning rate of every optimizer step of a run. Loads no torch: a plan asks as well."""

from __future__ import annotations

import math

from strop.spec.train import OptimizerSpec


def lr_at(spec: OptimizerSpec, place: int, num_places: int | None) -> float:
    """Return the learning rate of the optimizer step that has `place` others before it in the run.

    `num_places` are those of the whole run; a constant schedule asks for none. Like transformers' own
    schedules, the first step after warm-up has the full rate, and one behind the last would have the final
    one.
    """
    if place < spec.warmup_steps:
        return spec.lr * (place + 1) / (spec.warmup_steps + 1)
    if spec.schedule == "constant":
        return spec.lr
    assert num_places is not None, "a decay knows how long the run is"
    passed = min((place - spec.warmup_steps) / max(num_places - spec.warmup_steps, 1), 1.0)
    kept = 1.0 - passed if spec.schedule == "linear" else (1.0 + math.cos(math.pi * passed)) / 2
    return spec.lr * (spec.final_frac + (1.0 - spec.final_frac) * kept)
