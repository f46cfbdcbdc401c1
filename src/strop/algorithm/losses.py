"""Policy losses of single tokens, each as a value that autograd differentiates.

The derivative with respect to `logp_N` is all that the language-model head needs to run its backward in
chunks. Only `logp_N` is differentiated.

Guard: every log-ratio is clamped to [-20, 20] before `exp`. Beyond it the value is constant and
the gradient therefore 0. A mask selects already clamped values; nothing here is multiplied by a mask,
because 0 times infinity is not a number.

For a ratio of whole sequences (GSPO) the catalog passes the same log-ratio for all tokens of a sequence.

Shapes: N = scored tokens, flat over all rollouts; `sequence_N` numbers each token's sequence (a packed reply)
from 0. Log-probabilities in nats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOG_RATIO_NATS = 20.0


class TokenFn(Protocol):
    """From log-probabilities and advantages to one number per token."""

    def __call__(
        self,
        logp_N: Tensor,
        old_logp_N: Tensor,
        advantage_N: Tensor,
        clip_low: float,
        clip_high: float,
    ) -> Tensor:
        """Return N numbers. The ratio's clip range is [1 - clip_low, 1 + clip_high]."""
        ...


class BoundFn(Protocol):
    """Marks the tokens that the clip range bounds; same arguments as a `TokenFn`."""

    def __call__(
        self,
        logp_N: Tensor,
        old_logp_N: Tensor,
        advantage_N: Tensor,
        clip_low: float,
        clip_high: float,
    ) -> tuple[Tensor, Tensor]:
        """Return N marks for its lower end and N for its upper one."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLoss:
    """One loss of single tokens."""

    name: str
    value: TokenFn
    """Loss of each token, differentiable in `logp_N`; nats times advantage units."""
    acts_on_all_tokens: bool = False
    """Whether a token without advantage has a gradient too; it may then not be skipped."""
    bounded: BoundFn | None = None
    """Marks tokens that the clip range stops, or whose weight it bounds. None: unknown, or no range."""
    has_range: bool = True
    """Whether the clip range is used."""

    def differentiate(
        self, logp_N: Tensor, old_logp_N: Tensor, advantage_N: Tensor, clip_low: float, clip_high: float
    ) -> tuple[Tensor, Tensor]:
        """Return the loss of each token, and its derivative with respect to `logp_N`."""
        import torch

        with torch.enable_grad():
            current_N = logp_N.detach().requires_grad_()
            loss_N = self.value(current_N, old_logp_N.detach(), advantage_N, clip_low, clip_high)
            (grad_N,) = torch.autograd.grad(loss_N.sum(), current_N)
        return loss_N.detach(), grad_N.detach()


@dataclass(frozen=True, slots=True)
class _Settled:
    """A function with its last arguments bound. Unlike `functools.partial` it equals its copy."""

    function: Callable[..., Any]
    bound: tuple[float, ...]

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.function(*arguments, *self.bound, **named)


def clamp_log_ratio(log_ratio_N: Tensor) -> Tensor:
    """Bound log-ratios so that `exp` stays finite in float32."""
    return log_ratio_N.clamp(-MAX_LOG_RATIO_NATS, MAX_LOG_RATIO_NATS)


def sum_over(values_N: Tensor, sequence_N: Tensor) -> Tensor:
    """Return, for every token, the sum over its sequence. Shapes: (N,) to (N,)."""
    num_sequences = int(sequence_N.max()) + 1 if len(sequence_N) else 0
    # float64: a sum of ten thousand log-ratios determines all their weights.
    totals = values_N.new_zeros(num_sequences).double().index_add_(0, sequence_N, values_N.double())
    return totals[sequence_N].to(values_N.dtype)


def mean_over(values_N: Tensor, sequence_N: Tensor) -> Tensor:
    """Return, for every token, the mean over its sequence. Shapes: (N,) to (N,)."""
    return sum_over(values_N, sequence_N) / sum_over(values_N.new_ones(values_N.shape), sequence_N)


def _ratio(logp_N: Tensor, old_logp_N: Tensor) -> Tensor:
    return clamp_log_ratio(logp_N - old_logp_N.detach()).exp()


def is_pg_value(
    logp_N: Tensor, old_logp_N: Tensor, advantage_N: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """Return minus ratio times A. The clip range is unused."""
    return -_ratio(logp_N, old_logp_N) * advantage_N


def clipped_value(
    logp_N: Tensor, old_logp_N: Tensor, advantage_N: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """Return minus the smaller of ratio times A and clipped ratio times A.

    Source: arXiv:1707.06347, equation 7, with the two sides of the range named apart as in
        arXiv:2503.14476.
    """
    ratio_N = _ratio(logp_N, old_logp_N)
    bounded_N = ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -(ratio_N * advantage_N).minimum(bounded_N * advantage_N)


def clipped_sides(
    logp_N: Tensor, old_logp_N: Tensor, advantage_N: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Mark tokens whose ratio has left the range to the better side."""
    ratio_N = _ratio(logp_N.detach(), old_logp_N)
    is_too_low_N = (advantage_N < 0) & (ratio_N < 1.0 - clip_low)
    return is_too_low_N, (advantage_N > 0) & (ratio_N > 1.0 + clip_high)


def _dual_value(
    logp_N: Tensor,
    old_logp_N: Tensor,
    advantage_N: Tensor,
    clip_low: float,
    clip_high: float,
    bound: float,
) -> Tensor:
    value_N = clipped_value(logp_N, old_logp_N, advantage_N, clip_low, clip_high)
    return value_N.where(advantage_N >= 0, value_N.minimum(-bound * advantage_N))


def _dual_sides(
    logp_N: Tensor,
    old_logp_N: Tensor,
    advantage_N: Tensor,
    clip_low: float,
    clip_high: float,
    bound: float,
) -> tuple[Tensor, Tensor]:
    is_low_N, is_high_N = clipped_sides(logp_N, old_logp_N, advantage_N, clip_low, clip_high)
    return is_low_N, is_high_N | ((advantage_N < 0) & (_ratio(logp_N.detach(), old_logp_N) > bound))


def dual_clipped(bound: float) -> TokenLoss:
    """Return the clipped loss whose tokens with A < 0 are stopped at a ratio above `bound` too.

    Source: arXiv:1912.09729, equation 5.
    """
    return TokenLoss(
        name="dual_clipped",
        value=_Settled(_dual_value, (bound,)),
        bounded=_Settled(_dual_sides, (bound,)),
    )


_SAPO_ABOVE = 1.0
_SAPO_BELOW = 1.05
"""Temperatures of the gate for A > 0 and else: the paper's, section 4."""


def _gate(ratio_N: Tensor, advantage_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return sigmoid(t (ratio - 1)) and the temperature t."""
    temperature_N = ratio_N.new_full(ratio_N.shape, _SAPO_BELOW).where(advantage_N <= 0, _SAPO_ABOVE)
    return (temperature_N * (ratio_N - 1.0)).sigmoid(), temperature_N


def sapo_value(
    logp_N: Tensor, old_logp_N: Tensor, advantage_N: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """Return -4 / t sigmoid(t (ratio - 1)) A: the gradient fades as the ratio leaves 1, without a bound.

    At a ratio of 1 its gradient is that of the policy. Source: arXiv:2511.20347, equations 5 and 6.
    """
    gate_N, temperature_N = _gate(_ratio(logp_N, old_logp_N), advantage_N)
    return -4.0 / temperature_N * gate_N * advantage_N


def cispo_value(
    logp_N: Tensor, old_logp_N: Tensor, advantage_N: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """Return minus clipped ratio (as a constant) times A times logp.

    `clip_high` is the distance from 1, so the cap is 1 + clip_high; `clip_low` of 1 means no floor.
    Source: arXiv:2506.13585, section 3.1.
    """
    bounded_N = _ratio(logp_N.detach(), old_logp_N).clamp(1.0 - clip_low, 1.0 + clip_high)
    return -bounded_N * advantage_N * logp_N


def cispo_sides(
    logp_N: Tensor, old_logp_N: Tensor, advantage_N: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Mark tokens whose weight is bounded, for any sign of A."""
    ratio_N = _ratio(logp_N.detach(), old_logp_N)
    return ratio_N < 1.0 - clip_low, ratio_N > 1.0 + clip_high


TRUST_WEIGHT = 1e-3
"""Factor of the squared log-ratio in the losses with a probability mask."""


def _mask_value(logp_N: Tensor, old_logp_N: Tensor, advantage_N: Tensor, is_kept_N: Tensor) -> Tensor:
    log_ratio_N = clamp_log_ratio(logp_N - old_logp_N.detach())
    policy_N = (-advantage_N * log_ratio_N.exp()).where(is_kept_N, 0.0)
    return policy_N + TRUST_WEIGHT * log_ratio_N.square()


def dppo_sides(
    logp_N: Tensor, old_logp_N: Tensor, advantage_N: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Mark tokens whose probability has moved too far to the better side."""
    gain_N = logp_N.detach().exp() - old_logp_N.detach().exp()
    return (advantage_N <= 0) & (gain_N < -clip_low), (advantage_N > 0) & (gain_N > clip_high)


def dppo_value(
    logp_N: Tensor, old_logp_N: Tensor, advantage_N: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """Return minus ratio times A, unless the probability has moved too far to the better side.

    The range bounds a difference of probabilities: a rare token may double, a frequent one may not. A
    small multiple of the squared log-ratio acts on every token, masked ones included.
    """
    is_low_N, is_high_N = dppo_sides(logp_N, old_logp_N, advantage_N, clip_low, clip_high)
    return _mask_value(logp_N, old_logp_N, advantage_N, ~(is_low_N | is_high_N))


def ipo_mask_sides(
    logp_N: Tensor, old_logp_N: Tensor, advantage_N: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Mark tokens whose probability has moved too far, for any sign of A."""
    gain_N = logp_N.detach().exp() - old_logp_N.detach().exp()
    return gain_N < -clip_low, gain_N > clip_high


def ipo_mask_value(
    logp_N: Tensor, old_logp_N: Tensor, advantage_N: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """Return the same as `dppo_value`, masked on both sides for any sign of A.

    Not the preference loss of that name (`offline.py`).
    """
    is_low_N, is_high_N = ipo_mask_sides(logp_N, old_logp_N, advantage_N, clip_low, clip_high)
    return _mask_value(logp_N, old_logp_N, advantage_N, ~(is_low_N | is_high_N))


IS_PG = TokenLoss(name="is_pg", value=is_pg_value, has_range=False)
CLIPPED = TokenLoss(name="clipped", value=clipped_value, bounded=clipped_sides)
CISPO = TokenLoss(name="cispo", value=cispo_value, bounded=cispo_sides)
SAPO = TokenLoss(name="sapo", value=sapo_value, has_range=False)
DPPO = TokenLoss(name="dppo", value=dppo_value, bounded=dppo_sides, acts_on_all_tokens=True)
IPO_MASK = TokenLoss(
    name="ipo_mask",
    value=ipo_mask_value,
    bounded=ipo_mask_sides,
    acts_on_all_tokens=True,
)


# Estimators of the KL divergence from a reference, u = logp - reference; tokens are drawn from the policy.
# As a loss, the expected gradient of `k2` and `k3+` is that of KL(policy || reference), the usual one;
# of `k3` that of KL(reference || policy); of `k1` zero: it measures without bias, and no run file offers it.
# Where the policy likes a token more than the reference, u > 0 and the gradient is positive: descent lowers
# its log-probability. Swapped arguments keep every value plausible and invert this. Where tokens come from
# another distribution, value and gradient are multiplied by the ratio to it as a constant. A bound on the
# value, and not on u, would bias the gradient. Source: http://joschu.net/blog/kl-approx.html for the values.

PenaltyFn = Callable[["Tensor", "Tensor"], "tuple[Tensor, Tensor]"]
"""From logp and reference log-probability to value and derivative with respect to logp."""


def penalize_k1(logp_N: Tensor, reference_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return u and 1."""
    gap_N = clamp_log_ratio(logp_N - reference_N)
    return gap_N, gap_N.new_ones(gap_N.shape)


def penalize_k2(logp_N: Tensor, reference_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return u^2 / 2 and u."""
    gap_N = clamp_log_ratio(logp_N - reference_N)
    return gap_N.square() / 2, gap_N


def penalize_k3(logp_N: Tensor, reference_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return exp(-u) - 1 + u, never negative, and 1 - exp(-u)."""
    gap_N = clamp_log_ratio(logp_N - reference_N)
    # expm1: for small u the value is u^2 / 2, which 1 - exp would drown in rounding.
    return (-gap_N).expm1() + gap_N, -(-gap_N).expm1()


def penalize_k3_plus(logp_N: Tensor, reference_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return the value of k3 and the gradient of k2."""
    return penalize_k3(logp_N, reference_N)[0], penalize_k2(logp_N, reference_N)[1]


ESTIMATORS: Mapping[str, PenaltyFn] = {
    "k1": penalize_k1,
    "k2": penalize_k2,
    "k3": penalize_k3,
    "k3+": penalize_k3_plus,
}


def measure_kl(logp_N: Tensor, reference_N: Tensor, engine_N: Tensor | None) -> Tensor:
    """Return each token's part of KL(policy || reference), as k3 (nats).

    With `engine_N` tokens are weighed by the ratio of the policy to the engine that sampled them.
    """
    value_N, _ = penalize_k3(logp_N, reference_N)
    return value_N if engine_N is None else value_N * clamp_log_ratio(logp_N - engine_N).exp()


@dataclass(frozen=True, kw_only=True, slots=True)
class KlPenalty:
    """The penalty that a run adds to its policy loss."""

    beta: float
    """Its factor, above 0."""
    estimate: PenaltyFn = penalize_k3_plus
    is_corrected: bool = False
    """Whether tokens are weighed by the ratio of the policy to the engine that sampled them."""

    def __call__(self, logp_N: Tensor, reference_N: Tensor, engine_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return value and gradient of every token, beta included. Nothing is differentiated."""
        value_N, grad_N = self.estimate(logp_N.detach(), reference_N)
        factor = self.beta
        if not self.is_corrected:
            return factor * value_N, factor * grad_N
        ratio_N = clamp_log_ratio(logp_N.detach() - engine_N).exp()
        return factor * ratio_N * value_N, factor * ratio_N * grad_N
