"""Losses without rewards: on demonstrations, on preference pairs, and distances from a teacher.

The gain of a reply is its log-probability under the policy minus that under the reference, summed over the
scored tokens or as their mean. The margin h of a pair is the gain of the preferred reply minus that of the
other. With the policy as its own reference h = 0, and `dpo` starts at ln 2.

A divergence of a teacher's and a policy's whole distributions returns its value and its gradient on the
policy's logits, at the policy's temperature. Nothing is differentiated or held for later, so the caller may
process positions in chunks. For the teacher's most likely tokens alone there are two sound definitions:
`tail` compares the rest of both sides in one bucket, a lower bound of the whole divergence; `renorm` scales
both sides up to 1 on those tokens. A scaled teacher against the unscaled policy is not offered: it is not 0
where both agree.

Shapes: h of one pair each; N scored tokens of any number of pairs; U positions, V vocabulary, K kept tokens.
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
    beta: float = 0.5
    """For `jsd`: the teacher's share, in the weights and in the mixture. 0 and 1 are the two KLs."""

    def __call__(self, student_logp_U_V: Tensor, teacher_logp_U_V: Tensor) -> tuple[Tensor, Tensor]:
        """Return the divergence of each position, and its gradient on the student's logits.

        Shapes: two (U, V) to (U,) and (U, V). V may be any set of categories that both sides share.
        Source: arXiv:2306.13649, section 3, for the orientation of beta.
        """
        student, teacher = student_logp_U_V.clamp(min=_MIN_LOGP), teacher_logp_U_V.clamp(min=_MIN_LOGP)
        if self.name == "forward_kl" or (self.name == "jsd" and self.beta == 0.0):
            return forward_kl(student, teacher)
        if self.name == "reverse_kl" or self.beta == 1.0:
            return reverse_kl(student, teacher)
        return jensen_shannon(student, teacher, self.beta)


@dataclass(frozen=True, kw_only=True, slots=True)
class TopDivergence:
    """A divergence on the teacher's most likely tokens alone; a picklable rule, like `Divergence`."""

    divergence: Divergence
    top_k: int
    rest: Literal["tail", "renorm"] = "tail"

    def __call__(self, student_logp_U_V: Tensor, teacher_logp_U_V: Tensor) -> tuple[Tensor, Tensor]:
        """Return the divergence of each position, and its gradient on the student's logits."""
        kept = min(self.top_k, teacher_logp_U_V.shape[-1])
        teacher_U_K, ids_U_K = teacher_logp_U_V.topk(kept, dim=-1)
        return compare_top(self.divergence, student_logp_U_V, teacher_U_K, ids_U_K, self.rest)


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


def jensen_shannon(student_logp_U_V: Tensor, teacher_logp_U_V: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Return beta KL(t || m) + (1 - beta) KL(p || m), m = beta t + (1 - beta) p, and its gradient."""
    student, teacher = student_logp_U_V.exp(), teacher_logp_U_V.exp()
    mixture = (beta * teacher + (1 - beta) * student).log().clamp(min=_MIN_LOGP)
    gap = student_logp_U_V - mixture
    mean_U = (student * gap).sum(dim=-1)
    value_U = beta * (teacher * (teacher_logp_U_V - mixture)).sum(dim=-1) + (1 - beta) * mean_U
    return value_U, (1 - beta) * student * (gap - mean_U[..., None])


def compare_top(
    divergence: Divergence,
    student_logp_U_V: Tensor,
    teacher_logp_U_K: Tensor,
    ids_U_K: Tensor,
    rest: Literal["tail", "renorm"],
) -> tuple[Tensor, Tensor]:
    """Compare on the teacher's kept tokens alone.

    Shapes: (U, V), (U, K), int64 (U, K) to (U,) and (U, V). `teacher_logp_U_K` are log-probabilities
        among all tokens; `rest` may rescale them.
    """
    student_U_K = student_logp_U_V.gather(-1, ids_U_K)
    if rest == "renorm":
        scaled = [logp - logp.logsumexp(dim=-1, keepdim=True) for logp in (student_U_K, teacher_logp_U_K)]
        value_U, grad_U_K = divergence(*scaled)
        grad_U_V = student_logp_U_V.new_zeros(student_logp_U_V.shape).scatter_(-1, ids_U_K, grad_U_K)
        return value_U, grad_U_V
    tail_U = _log_rest(student_U_K)
    buckets = [_with_rest(student_U_K), _with_rest(teacher_logp_U_K)]
    value_U, grad = divergence(*buckets)
    # The bucket's gradient is spread over its tokens by their share of it.
    share = (student_logp_U_V - tail_U[..., None]).clamp(max=0.0).exp()
    return value_U, (share * grad[..., -1:]).scatter_(-1, ids_U_K, grad[..., :-1])


def _log_rest(logp_U_K: Tensor) -> Tensor:
    """Return the logarithm of the remaining probability."""
    left = 1.0 - logp_U_K.exp().sum(dim=-1)
    return left.clamp(min=1e-30).log()


def _with_rest(logp_U_K: Tensor) -> Tensor:
    """Append the bucket of all other tokens. Shapes: (U, K) to (U, K + 1)."""
    # By tensor methods: this room does not import torch.
    bucketed = logp_U_K.new_empty((*logp_U_K.shape[:-1], logp_U_K.shape[-1] + 1))
    bucketed[..., :-1] = logp_U_K
    bucketed[..., -1] = _log_rest(logp_U_K)
    return bucketed
