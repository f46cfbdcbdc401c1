"""What an optimizer step is within a run, and what it did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from strop.policy.tally import Total
from strop.rollout import FloatArray


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """What an optimizer step is within a run."""

    version: int | None = None
    """Which version the weights are after it; None: the next. The steps of one batch make one version."""
    place: int | None = None
    """How many optimizer steps the run plans before it, which its learning rate follows from; None: as many
    as were taken."""
    max_kl: float | None = None
    """Mean divergence (nats) from the policy that ratios start from above which the step is not taken."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TermReport:
    """What one term gave to a step, its weight included."""

    name: str
    loss: float
    grad_norm: float
    """L2 norm of this term's gradient alone, before clipping."""
    cosine: float | None
    """Between this gradient and the sum of those of the terms before; None for the first, and where
    either is 0."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepReport:
    """What one optimizer step did."""

    loss: float
    """Sum of the weighted terms."""
    grad_norm: float
    """L2 norm of the whole gradient before clipping."""
    lr: float
    changed_frac: float
    """Share of compute copies that the step changed. Small steps change few bf16 copies at a time."""
    master_changed_frac: float | None
    """Share of masters with a gradient that the step changed: near 1, unless updates vanish in the
    rounding of the masters. None if no sampled master has a gradient."""
    drift_M: FloatArray
    """abs(trainer - engine) log-probability (nats) of every trained token that an engine sampled."""
    num_positions: int
    """Positions that were forwarded: each prompt once per micro-batch, or of families whose sequences are
    computed by themselves, once per reply, with the padding behind."""
    num_micro_batches: int
    terms: tuple[TermReport, ...] = ()
    correction_M: FloatArray = field(default_factory=lambda: np.zeros(0, dtype=np.float32))
    """Off-policy correction of every token whose loss has one."""
    log_ratio_M: FloatArray = field(default_factory=lambda: np.zeros(0, dtype=np.float32))
    """What it was computed from, proximal minus engine (nats)."""
    sums: Mapping[str, float] = field(default_factory=dict)
    """What else the losses report, by metric."""
    totals: Mapping[str, Total] = field(default_factory=dict)
    """Of what the losses report the mean over tokens of, by metric."""
    ratio_M: FloatArray = field(default_factory=lambda: np.zeros(0, dtype=np.float32))
    """Probability ratio of every token whose loss has one that is not 1 by construction."""
    update_ratio: float = 0.0
    """L2 norm of the step's change of the trained weights over that of the weights."""
    is_taken: bool = True
    """Whether the weights were moved; False where the policy was too far from where it began."""
    compute_s: float = 0.0
    """Wall time of the step where it was computed; of the slowest rank."""
