"""Estimators of the KL divergence from a reference, per sampled token, in value and gradient.

u = logp - reference. Tokens are drawn from the policy. As a loss, the expected gradient is that of

- `k2` and `k3+`: KL(policy || reference), the one that is usually meant;
- `k3`: KL(reference || policy), the other direction;
- `k1`: zero. It measures without bias and teaches nothing, so no run file offers it as a loss.

Signs: where the policy likes a token more than the reference does, u > 0 and the gradient is positive,
so descent lowers its log-probability. Swapped arguments keep every value plausible and invert this.

Where tokens come from another distribution, value and gradient are multiplied by the ratio to it as a
constant. For `k3+` that is the derivative of ratio times k3 with the ratio differentiated.

Shapes: N scored tokens. u is bounded to [-20, 20]; a bound on the value would bias the gradient.
Source: http://joschu.net/blog/kl-approx.html for the three values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from strop.algorithm.losses import clamp_log_ratio

if TYPE_CHECKING:
    from torch import Tensor

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

    `engine_N` weighs tokens that another distribution drew by the ratio to it; None: the policy's own.
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
    """Whether tokens are weighed by the ratio of the policy to the engine that drew them."""

    def __call__(self, logp_N: Tensor, reference_N: Tensor, engine_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return value and gradient of every token, beta included. Nothing is differentiated."""
        value_N, grad_N = self.estimate(logp_N.detach(), reference_N)
        factor = self.beta
        if not self.is_corrected:
            return factor * value_N, factor * grad_N
        ratio_N = clamp_log_ratio(logp_N.detach() - engine_N).exp()
        return factor * ratio_N * value_N, factor * ratio_N * grad_N


_POLICY = (0.5, 0.3, 0.2)
_REFERENCE = (0.6, 0.3, 0.1)
_TOY_RATE = 0.5


def find_penalty_flaw(penalty: KlPenalty) -> str | None:
    """Say what is wrong with a penalty, None where nothing is: by its effect on three known tokens.

    It must be 0 where policy and reference agree, and one step down its gradient, averaged over all
    tokens, must come closer to a reference that differs. Swapped arguments keep its values and fail here.
    """
    import torch

    policy_V, reference_V = (
        torch.tensor(probabilities, dtype=torch.float64).log() for probabilities in (_POLICY, _REFERENCE)
    )
    value_V, grad_V = penalty(policy_V, policy_V, policy_V)
    if float(value_V.abs().max()) > 0.0 or float(grad_V.abs().max()) > 0.0:
        return "the penalty is not 0 between a policy and itself"
    before = _divergence(policy_V, reference_V)
    _, grad_V = penalty(policy_V, reference_V, policy_V)
    # d logp_v / d logits = onehot(v) - policy, averaged over tokens drawn from the policy.
    weighed_V = policy_V.exp() * grad_V / penalty.beta
    step_V = weighed_V - policy_V.exp() * weighed_V.sum()
    after = _divergence((policy_V - _TOY_RATE * step_V).log_softmax(dim=0), reference_V)
    if after < before:
        return None
    return f"a step down the penalty moves away from the reference: from {before:.4f} to {after:.4f} nats"


def _divergence(logp_V: Tensor, reference_V: Tensor) -> float:
    return float((logp_V.exp() * (logp_V - reference_V)).sum())
