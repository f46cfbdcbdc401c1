"""What a step sums up over micro-batches and ranks, and reads from the device at its end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from strop.policy.objective import TokenTerms
from strop.rollout import FloatArray


@dataclass(frozen=True, kw_only=True, slots=True)
class Total:
    """What a mean is made of, so that means of parts can be joined."""

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
class Tally:
    """Sums over the micro-batches of all terms."""

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


def add_up(tallies: Sequence[Tally]) -> Tally:
    """Return the sums over all ranks."""
    return Tally(
        loss=sum(tally.loss for tally in tallies),
        num_positions=sum(tally.num_positions for tally in tallies),
        num_micro_batches=sum(tally.num_micro_batches for tally in tallies),
        drifts=[part for tally in tallies for part in tally.drifts],
        corrections=[part for tally in tallies for part in tally.corrections],
        log_ratios=[part for tally in tallies for part in tally.log_ratios],
        ratios=[part for tally in tallies for part in tally.ratios],
        totals=join_totals(tally.totals for tally in tallies),
        sums={
            name: sum(tally.sums.get(name, 0.0) for tally in tallies)
            for name in sorted({name for tally in tallies for name in tally.sums})
        },
    )
