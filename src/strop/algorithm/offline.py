"""Losses on offline data: demonstrations, and pairs of replies of which one is preferred.

The margin h of a pair is what the policy has gained over the reference on the preferred reply, minus what
it has gained on the other: sums of log-probabilities over the scored tokens, or their means. With the policy
as its own reference h = 0, and `dpo` starts at ln 2.

Shapes: h of one pair each; N scored tokens of any number of pairs.
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

    name: Literal["dpo", "cdpo", "pref_ipo"]
    beta: float
    label_noise_frac: float = 0.0
    """Of `cdpo`: how many labels are believed to be wrong."""
    is_per_token: bool = False
    """Whether a reply's gain is the mean over its tokens and not their sum."""

    def judge(self, margin: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of margins (nats), and its derivative with respect to them.

        Source: arXiv:2305.18290, equation 7 (dpo); arXiv:2310.12036, equation 17 (pref_ipo), whose authors
        mean log-probabilities per token.
        """
        if self.name == "pref_ipo":
            distance = margin - 1.0 / (2.0 * self.beta)
            return distance.square(), 2.0 * distance
        noise = self.label_noise_frac if self.name == "cdpo" else 0.0
        scaled = self.beta * margin
        # -log sigmoid(x) = log(1 + exp(-x)), from logaddexp, which overflows nowhere.
        nothing = scaled.new_zeros(scaled.shape)
        loss = (1 - noise) * nothing.logaddexp(-scaled) + noise * nothing.logaddexp(scaled)
        grad = self.beta * (noise * scaled.sigmoid() - (1 - noise) * (-scaled).sigmoid())
        return loss, grad

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
    """Return the weight of each trained token of every demonstration of one batch.

    Equal weights give the mean over all trained tokens of the batch: a_S / sum of a_S x tokens.
    Shapes: S demonstrations in and out. Weights are above 0, and a demonstration has a token.
    """
    weights, counts = np.asarray(weight_S, dtype=np.float64), np.asarray(num_trained_S, dtype=np.float64)
    shares: Float64Array = weights / np.sum(weights * counts)
    return shares
