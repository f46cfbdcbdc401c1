"""What a step sums up over micro-batches and ranks, and reads from the device at its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from strop.policy.objective import TokenTerms
from strop.rollout import FloatArray


@dataclass(kw_only=True, slots=True)
class Tally:
    """Sums over the micro-batches of all terms."""

    loss: float = 0.0
    num_positions: int = 0
    num_micro_batches: int = 0
    drifts: list[FloatArray] = field(default_factory=list)
    corrections: list[FloatArray] = field(default_factory=list)
    log_ratios: list[FloatArray] = field(default_factory=list)

    sums: dict[str, float] = field(default_factory=dict)
    """Of the shares that a loss reports, weighted as it is."""

    unread: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Corrections and log ratios that are still on the device, where reading them would wait."""
    unread_sums: list[tuple[str, torch.Tensor]] = field(default_factory=list)

    def add_terms(self, terms: TokenTerms, weight_N: torch.Tensor) -> None:
        """Keep the corrections of some tokens, and sum up what else is said of them."""
        if terms.correction_N is not None and terms.log_ratio_N is not None:
            self.unread.append((terms.correction_N, terms.log_ratio_N))
        self.unread_sums += [(name, (weight_N * share_N).sum()) for name, share_N in terms.shares.items()]

    def read_terms(self) -> None:
        """Fetch what was kept, when everything is under way."""
        for correction, log_ratio in self.unread:
            self.corrections.append(correction.float().cpu().numpy())
            self.log_ratios.append(log_ratio.float().cpu().numpy())
        for name, value in self.unread_sums:
            self.sums[name] = self.sums.get(name, 0.0) + float(value)
        self.unread, self.unread_sums = [], []


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
        sums={
            name: sum(tally.sums.get(name, 0.0) for tally in tallies)
            for name in sorted({name for tally in tallies for name in tally.sums})
        },
    )
