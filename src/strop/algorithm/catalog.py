"""The algorithms by name. An algorithm is data: a few functions, two bounds and some policies.

Adding one is adding an entry to `ALGORITHMS` and a case to tests/algorithm/test_catalog.py.

An entry that acts on every token, whatever its advantage (a KL penalty, a teacher, a trust region),
may not skip rollouts without advantage; the others may, exactly (see credit.py). Which engine made a
token does not matter to them: the ratio between trainer and engine is corrected by `correction`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from strop.algorithm.advantages import AdvantageFn, center, leave_one_out, standardize
from strop.algorithm.aggregation import Aggregation
from strop.algorithm.corrections import CORRECTIONS, NO_CORRECTION, Correction
from strop.algorithm.kl import ESTIMATORS, KlPenalty
from strop.algorithm.losses import CISPO, CLIPPED, DPPO, IPO_MASK, TokenLoss
from strop.algorithm.own import load_algorithm
from strop.algorithm.sequences import mean_over
from strop.policy.objective import Scope, ScoredTokens, TokenTerms
from strop.user_code import find_algorithm

if TYPE_CHECKING:
    from torch import Tensor

    from strop.spec.algorithm import AlgorithmSpec
    from strop.spec.reference import ReferenceSpec

ZeroVariance = Literal["skip", "keep", "drop", "resample"]
Overlong = Literal["keep", "mask", "shape"]
FilterOn = Literal["task", "shaped"]
Mode = Literal["single", "decoupled", "bypass"]
MAX_SEQUENCE_TOKENS = 512
"""Scored tokens of a reply above which the product of its ratios says nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Algorithm:
    """What counts as better, and how a batch moves the policy towards it. Itself a picklable loss."""

    name: str
    advantage: AdvantageFn
    loss: TokenLoss
    aggregation: Aggregation
    clip_low: float
    """The ratio's range begins at 1 - clip_low."""
    clip_high: float
    """The ratio's range ends at 1 + clip_high."""
    has_sequence_ratio: bool = False
    """Whether all tokens of a sequence share the ratio of its mean log-ratio (GSPO)."""
    zero_variance: ZeroVariance = "skip"
    """Groups without any difference: skip (not forwarded but counted, the same gradient as keep),
    keep (forwarded), drop (neither forwarded nor counted, a different algorithm), resample (replaced
    by other examples' groups; one that could not be is dropped)."""
    filter_on: FilterOn = "shaped"
    """Which rewards show the difference that drop and resample look for: the task's own, or those after
    the shaping of overlong replies."""
    overlong: Overlong = "keep"
    """Rollouts cut at the limit: keep (ordinary) or mask (no token trained; they stay in the
    statistics of their group and remain one of the batch's rollouts). shape takes up to 1 from the
    reward of those that come near the limit."""
    overlong_buffer_tokens: int | None = None
    """Where `shape` begins, in tokens before the limit. None: a fifth of the limit."""
    mode: Mode = "single"
    """Whose log-probability a ratio starts from: the policy's own of this very step (single), that of
    the batch's first step (decoupled), or the engine's, which then needs no correction (bypass)."""
    correction: Correction = NO_CORRECTION
    correction_cap: float = 2.0
    """Upper bound of the correction weight; without meaning for `none`."""
    max_sequence_tokens: int | None = MAX_SEQUENCE_TOKENS
    """Longest reply under a correction by products over sequences. None: any."""
    kl: KlPenalty | None = None
    """Distance from a reference, as part of the loss; its token weights are the algorithm's."""
    teacher_weight: float = 0.0
    """Factor of (teacher's minus own log-probability) in the advantage of every token."""

    @property
    def acts_on_all_tokens(self) -> bool:
        """Whether a token without advantage has a gradient, so that it may not be skipped."""
        return self.loss.acts_on_all_tokens or self.kl is not None or self.teacher_weight != 0.0

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
            gap_M = tokens.teacher_logprob_M - tokens.logprob_M.detach()
            advantage_M = advantage_M + self.teacher_weight * gap_M
        terms = self.token_terms(
            tokens.logprob_M,
            tokens.engine_logprob_M,
            advantage_M,
            self._proximal(tokens),
            sequence_N=tokens.reply_M,
        )
        if self.kl is None:
            return terms
        value_M, grad_M = self.kl(tokens.logprob_M, tokens.reference_logprob_M, tokens.engine_logprob_M)
        return replace(terms, loss_N=terms.loss_N + value_M, grad_N=terms.grad_N + grad_M)

    def _proximal(self, tokens: ScoredTokens) -> Tensor | None:
        if self.mode == "bypass":
            return tokens.engine_logprob_M
        return tokens.proximal_logprob_M if self.mode == "decoupled" else None

    def token_terms(
        self,
        logp_N: Tensor,
        behavior_logp_N: Tensor,
        advantage_N: Tensor,
        proximal_logp_N: Tensor | None = None,
        *,
        sequence_N: Tensor | None = None,
    ) -> TokenTerms:
        """Compute loss and gradient of each token in closed form; nothing is differentiated.

        Shapes: N scored tokens; N may be 0.
        `proximal_logp_N` is the trainer's own log-probability at the start of the batch's first
        optimizer step. None means one step per batch: it is then `logp_N` itself, so the ratio is
        1, clipping never acts and the correction alone covers the gap to the engine.
        `sequence_N` numbers the sequences that tokens belong to; None: all are of one.
        """
        current_N = logp_N.detach()
        if sequence_N is None:
            sequence_N = current_N.new_zeros(current_N.shape).long()
        old_N = current_N if proximal_logp_N is None else proximal_logp_N.detach()
        log_ratio_N = old_N - behavior_logp_N
        correction_N = self.correction(log_ratio_N, advantage_N, self.correction_cap, sequence_N)
        if self.has_sequence_ratio:
            # With the mean for every token's own, the token loss is that of the sequence, and each
            # token's weight 1 / (sequences x tokens) makes the sum one term per sequence.
            old_N = current_N - mean_over(current_N - old_N, sequence_N)
        loss_N = self.loss.value(current_N, old_N, advantage_N, self.clip_low, self.clip_high)
        grad_N = self.loss.grad(current_N, old_N, advantage_N, self.clip_low, self.clip_high)
        return TokenTerms(
            loss_N=correction_N * loss_N,
            grad_N=correction_N * grad_N,
            correction_N=correction_N,
            log_ratio_N=log_ratio_N,
        )


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

ALGORITHMS: Mapping[str, Algorithm] = {
    entry.name: entry for entry in (GRPO, DR_GRPO, DAPO, RLOO, GSPO, CISPO_ENTRY, DPPO_ENTRY, IPO_MASK_ENTRY)
}


def build_algorithm(
    spec: AlgorithmSpec, reference: ReferenceSpec | None = None, *, is_off_policy: bool = False
) -> Algorithm:
    """Take an entry of `ALGORITHMS` and put the run's own settings in it.

    `is_off_policy` says whether rollouts may be older than the weights they train.
    The spec admits only names that exist here, and code of the user's; a test compares the two lists.
    Raises: ConfigError if code of the user's is no algorithm.
    """
    own = None if spec.name in ALGORITHMS else find_algorithm(spec.name)
    entry = ALGORITHMS[spec.name] if own is None else load_algorithm(own, GRPO)
    mode = entry.mode if spec.mode is None else spec.mode
    # A ratio that starts from the engine's value covers the gap itself.
    correction = NO_CORRECTION if mode == "bypass" else CORRECTIONS[spec.correction]
    built = replace(
        entry,
        clip_low=entry.clip_low if spec.clip_low is None else spec.clip_low,
        clip_high=entry.clip_high if spec.clip_high is None else spec.clip_high,
        overlong=entry.overlong if spec.overlong is None else spec.overlong,
        overlong_buffer_tokens=spec.overlong_buffer_tokens,
        filter_on=entry.filter_on if spec.filter_on is None else spec.filter_on,
        mode=mode,
        correction=correction,
        correction_cap=correction.cap if spec.correction_cap is None else spec.correction_cap,
        max_sequence_tokens=spec.max_sequence_tokens,
        kl=_build_penalty(reference, is_off_policy=is_off_policy or mode != "single"),
    )
    return replace(built, zero_variance=_choose_zero_variance(built, spec.zero_variance))


def _build_penalty(reference: ReferenceSpec | None, *, is_off_policy: bool) -> KlPenalty | None:
    if reference is None or reference.kl_beta == 0.0:
        return None
    wanted = reference.is_corrected
    return KlPenalty(
        beta=reference.kl_beta,
        estimate=ESTIMATORS[reference.kl_estimator],
        is_corrected=is_off_policy if wanted is None else wanted,
    )


def _choose_zero_variance(algorithm: Algorithm, wanted: ZeroVariance | None) -> ZeroVariance:
    """Return the run's choice, else the entry's own; skipping is exact only where nothing else acts."""
    chosen = algorithm.zero_variance if wanted is None else wanted
    return "keep" if chosen == "skip" and algorithm.acts_on_all_tokens else chosen
