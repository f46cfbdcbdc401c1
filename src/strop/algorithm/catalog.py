"""The algorithms by name. An algorithm is data: a few functions, two bounds and some policies.

Adding one is adding an entry to `ALGORITHMS`, its name to `strop.spec.algorithm`, and a case to
tests/algorithm/test_catalog.py.

An entry that acts on every token, even without advantage (a KL penalty, an entropy bonus, a teacher, a trust
region), may not skip rollouts without advantage; for the others skipping is exact (see credit.py). The gap
between trainer and engine is corrected by `correction`, for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from strop.algorithm.advantages import (
    AdvantageFn,
    Aggregation,
    OverBatch,
    center,
    keep_reward,
    leave_one_out,
    standardize,
)
from strop.algorithm.corrections import NO_CORRECTION, Correction, measure_correction
from strop.algorithm.losses import (
    CISPO,
    CLIPPED,
    DPPO,
    IPO_MASK,
    SAPO,
    KlPenalty,
    TokenLoss,
    clamp_log_ratio,
    mean_over,
    measure_kl,
)
from strop.policy.objective import APPROX_KL, Scope, ScoredTokens, TokenTerms
from strop.spec.objectives import Mode

if TYPE_CHECKING:
    from torch import Tensor


ZeroVariance = Literal["skip", "keep", "drop", "resample"]
Overlong = Literal["keep", "mask", "shape"]
FilterOn = Literal["task", "shaped"]
MAX_SEQUENCE_TOKENS = 512
"""Scored tokens of a reply above which the product of its ratios is meaningless."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Algorithm:
    """Advantage, loss, aggregation and policies of an RL algorithm. Itself a picklable loss."""

    name: str
    advantage: AdvantageFn
    loss: TokenLoss
    aggregation: Aggregation
    clip_low: float
    """The ratio's range begins at 1 - clip_low."""
    clip_high: float
    """The ratio's range ends at 1 + clip_high."""
    over_batch: OverBatch = "none"
    """Scaling of the advantages over the batch, after all groups were compared."""
    is_relative: bool = True
    """Whether a rollout is compared with others of its group."""
    has_turn_credit: bool = False
    """Whether each turn has a separate advantage (see `advantages.compare_turns`)."""
    turn_discount: float = 1.0
    """Weight of the next turn's return in this turn's; for credit per turn."""
    has_sequence_ratio: bool = False
    """Whether all tokens of a sequence share the ratio of its mean log-ratio (GSPO)."""
    zero_variance: ZeroVariance = "skip"
    """Groups with equal rewards: skip (not forwarded but counted, the same gradient as keep),
    keep (forwarded), drop (neither forwarded nor counted, a different algorithm), resample (replaced
    by other examples' groups; dropped where that failed)."""
    filter_on: FilterOn = "shaped"
    """Rewards that drop and resample compare: the task's, or those after the shaping of overlong replies."""
    overlong: Overlong = "keep"
    """Rollouts cut at the limit: keep (ordinary) or mask (no token trained; they stay in the
    statistics of their group and remain one of the batch's rollouts). shape subtracts up to 1 from the
    reward of replies near the limit."""
    mode: Mode = "single"
    """The log-probability that a ratio starts from: the policy's of the same optimizer step (single), that of
    the weights that the batch began with (decoupled), or the engine's, which then needs no correction
    (bypass)."""
    correction: Correction = NO_CORRECTION
    correction_cap: float = 2.0
    """Upper bound of the correction weight; unused for `none`."""
    max_sequence_tokens: int | None = MAX_SEQUENCE_TOKENS
    """Longest reply under a correction by products over sequences. None: any."""
    kl: KlPenalty | None = None
    """Distance from a reference, as part of the loss; its token weights are the algorithm's."""
    reward_kl_beta: float = 0.0
    """Factor of the same distance, as k1, in the reward of a token and of all earlier ones."""
    entropy_weight: float = 0.0
    """Factor of the entropy bonus at every scored position, which the head computes."""
    teacher_weight: float = 0.0
    """Factor of (teacher's minus own log-probability) in the advantage of every token."""

    @property
    def needs_reference(self) -> bool:
        """Whether it uses log-probabilities of a reference."""
        return self.kl is not None or self.reward_kl_beta != 0.0

    @property
    def whitens_tokens(self) -> bool:
        """Whether advantages differ from token to token and are whitened token by token."""
        return self.reward_kl_beta != 0.0 and self.over_batch == "whiten"

    @property
    def acts_on_all_tokens(self) -> bool:
        """Whether a token without advantage has a gradient, so that it may not be skipped."""
        weights = (self.reward_kl_beta, self.entropy_weight, self.teacher_weight)
        return self.loss.acts_on_all_tokens or self.kl is not None or any(weights)

    @property
    def scope(self) -> Scope:
        """How much of a batch the loss must see at once."""
        is_of_sequence = self.has_sequence_ratio or self.correction.is_of_sequence
        return Scope.REPLY if is_of_sequence else Scope.TOKEN

    def __call__(self, tokens: ScoredTokens, /) -> TokenTerms:
        """Compute loss and gradient of each token. Missing log-probabilities make them NaN.

        Shapes: m scored tokens, whole replies if `scope` says so.
        """
        advantage_M = tokens.advantage_M
        if self.teacher_weight != 0.0:
            # Over several optimizer steps of a batch, advantages are those of the first step.
            is_fixed = self.mode == "decoupled"
            own_M = tokens.old_logprob_M if is_fixed else tokens.logprob_M.detach()
            advantage_M = advantage_M + self.teacher_weight * (tokens.teacher_logprob_M - own_M)
        old_M = tokens.engine_logprob_M if self.mode == "bypass" else None
        if self.mode == "decoupled":
            old_M = tokens.old_logprob_M
        terms = self.token_terms(
            tokens.logprob_M,
            tokens.engine_logprob_M,
            advantage_M,
            old_M,
            sequence_N=tokens.reply_M,
        )
        if not self.needs_reference:
            return terms
        current_M, reference_M = tokens.logprob_M.detach(), tokens.reference_logprob_M
        is_corrected = self.kl is not None and self.kl.is_corrected
        distance_M = measure_kl(current_M, reference_M, tokens.engine_logprob_M if is_corrected else None)
        terms = replace(terms, means={**terms.means, "reference_kl_nats": distance_M})
        if self.kl is None:
            return terms
        value_M, grad_M = self.kl(current_M, reference_M, tokens.engine_logprob_M)
        return replace(terms, loss_N=terms.loss_N + value_M, grad_N=terms.grad_N + grad_M)

    def token_terms(
        self,
        logp_N: Tensor,
        engine_logp_N: Tensor,
        advantage_N: Tensor,
        old_logp_N: Tensor | None = None,
        *,
        sequence_N: Tensor | None = None,
    ) -> TokenTerms:
        """Compute loss and gradient of each token.

        Shapes: N scored tokens; N may be 0.
        `old_logp_N` is the trainer's own log-probability at the start of the first optimizer
        step on rollouts of the same weights. None means there is one such step: it is then `logp_N`
        itself, so the ratio is 1, clipping never acts and the correction alone covers the gap to the
        engine.
        `sequence_N` numbers the sequences that tokens belong to; None: all are of one.
        """
        current_N = logp_N.detach()
        if sequence_N is None:
            sequence_N = current_N.new_zeros(current_N.shape).long()
        old_N = current_N if old_logp_N is None else old_logp_N.detach()
        log_ratio_N = old_N - engine_logp_N
        correction_N = self.correction(log_ratio_N, advantage_N, self.correction_cap, sequence_N)
        if self.has_sequence_ratio:
            # With the sequence's mean as every token's log-ratio, the token loss is that of the sequence, and
            # each token's weight 1 / (sequences x tokens) makes the sum one term per sequence.
            old_N = current_N - mean_over(current_N - old_N, sequence_N)
        inputs = (current_N, old_N, advantage_N, self.clip_low, self.clip_high)
        loss_N, grad_N = self.loss.differentiate(*inputs)
        terms = TokenTerms(
            loss_N=correction_N * loss_N,
            grad_N=correction_N * grad_N,
            means=measure_correction(log_ratio_N, correction_N),
        )
        if old_logp_N is None:
            return terms
        # Estimates KL(old || new) from samples of the old policy; never below 0.
        moved_N = clamp_log_ratio(current_N - old_logp_N)
        means = {**terms.means, APPROX_KL: moved_N.expm1() - moved_N}
        if self.loss.bounded is not None:
            is_low_N, is_high_N = self.loss.bounded(*inputs)
            means |= {"clip_low_frac": is_low_N.float(), "clip_high_frac": is_high_N.float()}
        return replace(terms, ratio_N=clamp_log_ratio(current_N - old_N).exp(), means=means)


GRPO = Algorithm(
    name="grpo",
    advantage=standardize,
    loss=CLIPPED,
    aggregation=Aggregation.SEQ_MEAN,
    clip_low=0.2,
    clip_high=0.2,
)
"""Standardised rewards, one vote per rollout. Source: arXiv:2402.03300; no KL term."""

DR_GRPO = Algorithm(
    name="dr_grpo",
    advantage=center,
    loss=CLIPPED,
    aggregation=Aggregation.CONST,
    clip_low=0.2,
    clip_high=0.2,
)
"""Centered rewards, a constant normaliser: the reply limit. Source: arXiv:2503.20783."""

DAPO = Algorithm(
    name="dapo",
    advantage=standardize,
    loss=CLIPPED,
    aggregation=Aggregation.TOKEN_MEAN,
    clip_low=0.2,
    clip_high=0.28,
    zero_variance="resample",
    filter_on="task",
    overlong="shape",
)
"""A wider upper bound, the token mean, dynamic sampling and soft overlong punishment.

Source: arXiv:2503.14476, all four parts of it.
"""

GSPO = Algorithm(
    name="gspo",
    advantage=standardize,
    loss=CLIPPED,
    aggregation=Aggregation.SEQ_MEAN,
    clip_low=3e-4,
    clip_high=4e-4,
    has_sequence_ratio=True,
)
"""The clipped ratio of whole replies, per token of their length. Source: arXiv:2507.18071."""

CISPO_ENTRY = Algorithm(
    name="cispo",
    advantage=standardize,
    loss=CISPO,
    aggregation=Aggregation.TOKEN_MEAN,
    clip_low=1.0,
    clip_high=4.0,
)
"""Weights are clipped, at 5 and without a floor, gradients never. Source: arXiv:2506.13585."""

DPPO_ENTRY = Algorithm(
    name="dppo",
    advantage=center,
    loss=DPPO,
    aggregation=Aggregation.TOKEN_MEAN,
    clip_low=0.2,
    clip_high=0.2,
    zero_variance="keep",
    mode="bypass",
)
"""A bound on the difference of probabilities to the engine's, on the better side only."""

IPO_MASK_ENTRY = replace(DPPO_ENTRY, name="ipo_mask", loss=IPO_MASK, clip_low=0.1, clip_high=0.1)
"""The same with a bound of 0.1 on both sides. Not the preference loss IPO."""

RLOO = Algorithm(
    name="rloo",
    advantage=leave_one_out,
    loss=CLIPPED,
    aggregation=Aggregation.TOKEN_MEAN,
    clip_low=0.2,
    clip_high=0.2,
)
"""The mean of the others as baseline. Source: arXiv:2402.14740.

The paper sums each rollout's tokens and averages over rollouts; the token mean points in the same
direction and is smaller by the batch's mean length, which keeps one learning rate and one gradient
bound useful for all entries.
"""

SAPO_ENTRY = replace(GRPO, name="sapo", loss=SAPO, clip_low=1.0, clip_high=1.0)
"""A gate that closes softly as the ratio leaves 1, faster for worse rollouts, in place of a range.

Source: arXiv:2511.20347.
"""

RPP = replace(
    RLOO,
    name="reinforce_pp",
    advantage=keep_reward,
    over_batch="whiten",
    is_relative=False,
    zero_variance="keep",
)
"""Rewards whitened over all tokens of the batch, a KL penalty among them. Source: arXiv:2501.03262."""

RPP_BASELINE = replace(RPP, name="reinforce_pp_baseline", advantage=center, is_relative=True)
"""The same with the group's mean as baseline, and a penalty in the loss."""

ALGORITHMS: Mapping[str, Algorithm] = {
    entry.name: entry
    for entry in (
        *(GRPO, DR_GRPO, DAPO, RLOO, GSPO, CISPO_ENTRY, SAPO_ENTRY, DPPO_ENTRY, IPO_MASK_ENTRY),
        *(RPP, RPP_BASELINE),
    )
}
