"""Which settings of a run cannot matter, because every probability ratio is 1 in it.

Where a batch takes one optimizer step, a ratio that starts at that step's own weights is 1 in value. No
range stops anything then, and some algorithms are the same one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop.algorithm.catalog import build_algorithm

if TYPE_CHECKING:
    from strop.spec.run import RunSpec

_RANGE = ("clip_low", "clip_high", "dual_clip", "sapo_temperature_pos", "sapo_temperature_neg")
_TWINS = {
    "gspo": "'grpo'",
    "sapo": "'grpo'",
    "cispo": "'grpo' with every token weighing the same",
}
"""Entries of which only the form of the ratio sets them apart, and what they are without it."""


def find_idle_settings(spec: RunSpec) -> str | None:
    """Say which settings that a run was given cannot matter, and what to do; None where all can.

    Raises: ConfigError if an algorithm of the user's cannot be built.
    """
    if spec.train.terms not in ("rl", "rl+sft"):
        return None
    chosen = spec.algorithm
    if build_algorithm(chosen, spec.reference, spec.train).mode != "single":
        return None
    given = {name: getattr(chosen, name) for name in _RANGE}
    idle = [f"algorithm.{name}={value:g} stops nothing" for name, value in given.items() if value is not None]
    if chosen.name in _TWINS:
        idle.append(f"algorithm.name={chosen.name!r} learns as {_TWINS[chosen.name]} does")
    if chosen.mode == "decoupled":
        idle.append("algorithm.mode='decoupled' is 'single', and its forward pass is left out")
    if not idle:
        return None
    return (
        f"{'; '.join(idle)}: a step takes one optimizer step on rollouts of the newest weights"
        " (train.mini_batches=1, train.epochs=1), so every probability ratio is 1. Set train.mini_batches or"
        " train.epochs to take several, or leave these settings out"
    )
