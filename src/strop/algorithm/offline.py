"""Losses without rewards: on demonstrations, on preference pairs, and distances from a teacher.

The gain of a reply is its log-probability under the policy minus that under the reference, summed over the
scored tokens or as their mean. The margin h of a pair is the gain of the preferred reply minus that of the
other. With the policy as its own reference h = 0, and `dpo` starts at ln 2.

A divergence of a teacher's and a policy's whole distributions returns its value and its gradient on the
policy's logits, at the policy's temperature. Nothing is differentiated or held for later, so the caller may
process positions in chunks.

Shapes: h of one pair each; N scored tokens of any number of pairs; U positions, V vocabulary.
Log-probabilities in nats, float32 or wider.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from strop.algorithm.advantages import Float64Array
from strop.algorithm.losses import sum_over
from strop.policy.objective import ScoredTokens, TokenTerms

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Preference:
    """A loss on pairs; itself a picklable loss of scored tokens, with the scope of a group.

    A pair is a packed group whose preferred reply has advantage 1 and the other one -1. The mean over
    pairs is the sum over tokens if every token weighs 1 / pairs.
    """

    name: Literal["dpo", "pref_ipo"]
    beta: float

    @property
    def is_per_token(self) -> bool:
        """Whether a reply's gain is the mean over its tokens instead of their sum, as the authors intend."""
        return self.name == "pref_ipo"

    def judge(self, margin: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of margins (nats), and its derivative with respect to them.

        Source: arXiv:2305.18290, equation 7 (dpo); arXiv:2310.12036, equation 17 (pref_ipo).
        """
        if self.name == "pref_ipo":
            distance = margin - 1.0 / (2.0 * self.beta)
            return distance.square(), 2.0 * distance
        scaled = self.beta * margin
        # -log sigmoid(x) = log(1 + exp(-x)), by logaddexp, which never overflows.
        return scaled.new_zeros(scaled.shape).logaddexp(-scaled), -self.beta * (-scaled).sigmoid()

    def __call__(self, tokens: ScoredTokens, /) -> TokenTerms:
        """Return every token's share of its pair's loss, and its gradient. Nothing is differentiated."""
        sign_M, is_better_M = tokens.advantage_M, tokens.advantage_M > 0
        one_M = tokens.advantage_M.new_ones(tokens.advantage_M.shape)
        share_M = 1.0 / sum_over(one_M, tokens.reply_M) if self.is_per_token else one_M
        gain_M = share_M * (tokens.logprob_M.detach() - tokens.reference_logprob_M)
        margin_M = sum_over(sign_M * gain_M, tokens.group_M)
        loss_M, grad_M = self.judge(margin_M)
        num_tokens_M = sum_over(one_M, tokens.group_M)
        return TokenTerms(
            loss_N=loss_M / num_tokens_M,
            grad_N=sign_M * share_M * grad_M,
            # Both replies of a pair may become less likely while the margin grows.
            shares={
                "pair_accuracy": (margin_M > 0).to(gain_M.dtype) / num_tokens_M,
                "pair_margin_nats": margin_M / num_tokens_M,
                "pair_better_gain_nats": gain_M * is_better_M,
                "pair_worse_gain_nats": gain_M * ~is_better_M,
            },
        )


def cross_entropy_terms(logp_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return each demonstrated token's cross-entropy and its derivative with respect to the log-probability.

    Shapes: (N,) to two of (N,). Units: nats.
    """
    current_N = logp_N.detach()
    return -current_N, -current_N.new_ones(current_N.shape)


def weigh_demonstrations(weight_S: Sequence[float], num_trained_S: Sequence[int]) -> Float64Array:
    """Return the weight of each trained token of every demonstration of one batch: a_S / sum of a_S x tokens.

    Equal weights give the mean over all trained tokens of the batch.
    Shapes: S demonstrations in and out. Weights are above 0, and a demonstration has a token.
    """
    weights, counts = np.asarray(weight_S, dtype=np.float64), np.asarray(num_trained_S, dtype=np.float64)
    shares: Float64Array = weights / np.sum(weights * counts)
    return shares


_MIN_LOGP = -1e4
"""Stands for the logarithm of 0: its exponential is 0, and 0 times it is 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Divergence:
    """A divergence of a policy from its teacher."""

    name: Literal["forward_kl", "reverse_kl", "jsd"]

    def __call__(self, student_logp_U_V: Tensor, teacher_logp_U_V: Tensor) -> tuple[Tensor, Tensor]:
        """Return the divergence of each position, and its gradient on the student's logits.

        Shapes: two (U, V) to (U,) and (U, V).
        """
        student, teacher = student_logp_U_V.clamp(min=_MIN_LOGP), teacher_logp_U_V.clamp(min=_MIN_LOGP)
        compare = {"forward_kl": forward_kl, "reverse_kl": reverse_kl, "jsd": jensen_shannon}[self.name]
        return compare(student, teacher)


def forward_kl(student_logp_U_V: Tensor, teacher_logp_U_V: Tensor) -> tuple[Tensor, Tensor]:
    """Return KL(teacher || policy) and its gradient, p - t."""
    teacher = teacher_logp_U_V.exp()
    value_U = (teacher * (teacher_logp_U_V - student_logp_U_V)).sum(dim=-1)
    return value_U, student_logp_U_V.exp() - teacher


def reverse_kl(student_logp_U_V: Tensor, teacher_logp_U_V: Tensor) -> tuple[Tensor, Tensor]:
    """Return KL(policy || teacher) and its gradient, p (log p - log t - value)."""
    student, gap = student_logp_U_V.exp(), student_logp_U_V - teacher_logp_U_V
    value_U = (student * gap).sum(dim=-1)
    return value_U, student * (gap - value_U[..., None])


def jensen_shannon(student_logp_U_V: Tensor, teacher_logp_U_V: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean of KL(t || m) and KL(p || m), m the mean of t and p, and its gradient."""
    student, teacher = student_logp_U_V.exp(), teacher_logp_U_V.exp()
    mixture = (0.5 * teacher + 0.5 * student).log().clamp(min=_MIN_LOGP)
    gap = student_logp_U_V - mixture
    mean_U = (student * gap).sum(dim=-1)
    value_U = 0.5 * (teacher * (teacher_logp_U_V - mixture)).sum(dim=-1) + 0.5 * mean_U
    return value_U, 0.5 * student * (gap - mean_U[..., None])
