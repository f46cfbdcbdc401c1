"""An optimizer step: its plan, its report, and the sums that the report is made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from strop.policy.objective import TokenTerms
from strop.rollout import FloatArray


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """Where an optimizer step stands in a run."""

    version: int | None = None
    """Which version the weights are after it; None: the next. The steps of one batch make one version."""
    place: int | None = None
    """How many optimizer steps the run plans before it, which its learning rate follows from; None: as many
    as were taken."""
    max_kl: float | None = None
    """Mean divergence (nats) from the policy that ratios start from above which the step is not taken."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TermReport:
    """The part of one term in a step, its weight included."""

    name: str
    loss: float
    grad_norm: float
    """L2 norm of this term's gradient alone, before clipping."""
    cosine: float | None
    """Between this gradient and the sum of those of the terms before; None for the first, and where
    either is 0."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepReport:
    """The result of one optimizer step."""

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
    """What it was computed from, old minus engine (nats)."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Total:
    """Sum and count of a mean, so that means of parts can be joined."""

    sum: float = 0.0
    count: int = 0

    def __add__(self, other: Total) -> Total:
        return Total(sum=self.sum + other.sum, count=self.count + other.count)

    @property
    def mean(self) -> float:
        """The mean of what was counted, of which there must be something."""
        return self.sum / self.count


def join_totals(parts: Iterable[Mapping[str, Total]]) -> dict[str, Total]:
    """Add up totals by name, those of names that count nothing left out."""
    joined: dict[str, Total] = {}
    for part in parts:
        for name, total in part.items():
            joined[name] = joined.get(name, Total()) + total
    return {name: joined[name] for name in sorted(joined) if joined[name].count}


@dataclass(kw_only=True, slots=True)
class Accumulator:
    """Sums of a step over the micro-batches of all terms, read from the device at its end."""

    loss: float = 0.0
    num_positions: int = 0
    num_micro_batches: int = 0
    drifts: list[FloatArray] = field(default_factory=list)
    corrections: list[FloatArray] = field(default_factory=list)
    log_ratios: list[FloatArray] = field(default_factory=list)
    ratios: list[FloatArray] = field(default_factory=list)

    sums: dict[str, float] = field(default_factory=dict)
    """Of the shares that a loss reports, weighted as it is."""
    totals: dict[str, Total] = field(default_factory=dict)
    """Of what a loss reports the mean over tokens of."""

    unread: list[tuple[list[FloatArray], torch.Tensor]] = field(default_factory=list)
    """Values of tokens that are still on the device, where reading them would wait, and where they belong."""
    unread_sums: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    unread_totals: list[tuple[str, torch.Tensor, int]] = field(default_factory=list)

    def add_terms(self, terms: TokenTerms, weight_N: torch.Tensor) -> None:
        """Keep the corrections and ratios of some tokens, and sum up what else is said of them."""
        if terms.correction_N is not None and terms.log_ratio_N is not None:
            self.unread += [(self.corrections, terms.correction_N), (self.log_ratios, terms.log_ratio_N)]
        if terms.ratio_N is not None:
            self.unread.append((self.ratios, terms.ratio_N))
        self.unread_sums += [(name, (weight_N * share_N).sum()) for name, share_N in terms.shares.items()]
        for name, values_N in terms.means.items():
            self.add_values(name, values_N)

    def add_values(self, name: str, values_N: torch.Tensor) -> None:
        """Sum up a metric that is the mean over tokens or positions."""
        self.unread_totals.append((name, values_N.sum(dtype=torch.float64), len(values_N)))

    def read_terms(self) -> None:
        """Fetch what was kept, when everything is under way."""
        for kept, values in self.unread:
            kept.append(values.float().cpu().numpy())
        for name, value in self.unread_sums:
            self.sums[name] = self.sums.get(name, 0.0) + float(value)
        for name, value, count in self.unread_totals:
            self.totals[name] = self.totals.get(name, Total()) + Total(sum=float(value), count=count)
        self.unread, self.unread_sums, self.unread_totals = [], [], []


def join(parts: Sequence[FloatArray]) -> FloatArray:
    """Return what all micro-batches noted in a row."""
    return np.concatenate([np.zeros(0, dtype=np.float32), *parts])


def add_up(parts: Sequence[Accumulator]) -> Accumulator:
    """Return the sums over all ranks."""
    return Accumulator(
        loss=sum(one.loss for one in parts),
        num_positions=sum(one.num_positions for one in parts),
        num_micro_batches=sum(one.num_micro_batches for one in parts),
        drifts=[array for one in parts for array in one.drifts],
        corrections=[array for one in parts for array in one.corrections],
        log_ratios=[array for one in parts for array in one.log_ratios],
        ratios=[array for one in parts for array in one.ratios],
        totals=join_totals(one.totals for one in parts),
        sums={
            name: sum(one.sums.get(name, 0.0) for one in parts)
            for name in sorted({name for one in parts for name in one.sums})
        },
    )
