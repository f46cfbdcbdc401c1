"""Weights that correct for tokens sampled by another distribution than the trained one.

The ratio is exp(old - engine): the trainer's log-probability at the start of the step against the one that
the engine recorded when it sampled the token. It covers both gaps, differing numerics and older weights. A
correction multiplies the policy term of a token. It is a constant: no gradient flows through it, and it does
not change the aggregation weight.

The ratio of a sequence is the product over its tokens, so it shrinks or grows with their number: the
corrections that use it refuse long replies (`algorithm.max_sequence_tokens`).

Engine log-probabilities are always finite here: a sampled `Turn` without them cannot be built.

Shapes: N = scored tokens. Log-ratios in nats, bounded to [-20, 20] before `exp`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from strop.algorithm.losses import clamp_log_ratio, mean_over, sum_over

if TYPE_CHECKING:
    from torch import Tensor

ICEPOP_FLOOR = 0.5
CORRECTION_SQUARE = "correction_square"
"""Name of the mean square of the corrections."""


class WeighFn(Protocol):
    """From log-ratios, advantages and a bound to one constant weight per token."""

    def __call__(self, log_ratio_N: Tensor, advantage_N: Tensor, cap: float, /) -> Tensor:
        """Return N numbers."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """A function of ratios to weights, and the level of these ratios: token or sequence."""

    name: str
    weigh: WeighFn
    cap: float
    """Default bound: a ratio, for `opsm` in nats."""
    level: Literal["token", "sum", "mean"] = "token"
    """The log-ratio of the token, or the sum or the mean over its sequence."""

    @property
    def is_of_sequence(self) -> bool:
        """Whether it needs all scored tokens of a reply."""
        return self.level != "token"

    def __call__(self, log_ratio_N: Tensor, advantage_N: Tensor, cap: float, sequence_N: Tensor) -> Tensor:
        """Return the weight of every token."""
        ratio_N = log_ratio_N.detach()
        if self.level == "sum":
            ratio_N = sum_over(ratio_N, sequence_N)
        elif self.level == "mean":
            ratio_N = mean_over(ratio_N, sequence_N)
        return self.weigh(ratio_N, advantage_N, cap)


def correct_nothing(log_ratio_N: Tensor, advantage_N: Tensor, cap: float) -> Tensor:
    """Return 1 for every token; the cap is unused."""
    return log_ratio_N.new_ones(log_ratio_N.shape)


def truncate(log_ratio_N: Tensor, advantage_N: Tensor, cap: float) -> Tensor:
    """Return each ratio, at most `cap`."""
    return clamp_log_ratio(log_ratio_N.detach()).exp().clamp(max=cap)


def mask_above(log_ratio_N: Tensor, advantage_N: Tensor, cap: float) -> Tensor:
    """Return each ratio, 0 for those above `cap`."""
    ratio_N = clamp_log_ratio(log_ratio_N.detach()).exp()
    return ratio_N.where(ratio_N <= cap, 0.0)


def mask_outside(log_ratio_N: Tensor, advantage_N: Tensor, cap: float, floor: float = ICEPOP_FLOOR) -> Tensor:
    """Return each ratio, 0 for those below `floor` or above `cap`."""
    ratio_N = clamp_log_ratio(log_ratio_N.detach()).exp()
    return ratio_N.where((ratio_N >= floor) & (ratio_N <= cap), 0.0)


def mask_unlikely(log_ratio_N: Tensor, advantage_N: Tensor, cap: float) -> Tensor:
    """Return 0 if the advantage is negative and the engine finds the sequence likelier by over `cap`, else 1.

    Units: `cap` in nats per token; `log_ratio_N` is the sequence's mean.
    """
    is_masked_N = (advantage_N < 0) & (-log_ratio_N.detach() > cap)
    return log_ratio_N.new_ones(log_ratio_N.shape).where(~is_masked_N, 0.0)


NO_CORRECTION = Correction(name="none", weigh=correct_nothing, cap=1.0)

CORRECTIONS: Mapping[str, Correction] = {
    entry.name: entry
    for entry in (
        NO_CORRECTION,
        Correction(name="tis_token", weigh=truncate, cap=2.0),
        Correction(name="tis_seq", weigh=truncate, cap=3.0, level="sum"),
        Correction(name="mis_token", weigh=mask_above, cap=3.0),
        Correction(name="mis_seq", weigh=mask_above, cap=3.0, level="sum"),
        Correction(name="icepop", weigh=mask_outside, cap=5.0),
        Correction(name="opsm", weigh=mask_unlikely, cap=0.1, level="mean"),
    )
}


def measure_correction(log_ratio_N: Tensor, correction_N: Tensor) -> dict[str, Tensor]:
    """Return metrics by name, each a mean over tokens: corrections, squares, what is truncated or masked.

    Shapes: all (N,). Units: `_frac` is 0 or 1.
    """
    ratio_N = clamp_log_ratio(log_ratio_N).exp()
    is_masked_N = correction_N == 0.0
    # A relative margin of 1e-5: the weights come out of float32 arithmetic.
    is_truncated_N = ~is_masked_N & (correction_N < ratio_N * (1.0 - 1e-5))
    return {
        "correction_mean": correction_N,
        CORRECTION_SQUARE: correction_N.square(),
        "correction_truncated_frac": is_truncated_N.float(),
        "correction_masked_frac": is_masked_N.float(),
    }
