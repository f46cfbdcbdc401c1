"""The algorithms by name. An algorithm is data: four functions, two bounds and three policies.

Adding one is adding an entry to `ALGORITHMS` and a case to tests/algorithm/test_catalog.py.

All entries have in common: no KL term, no entropy bonus, no other loss on the same tokens. That is
what makes skipping a rollout without advantage exact (see credit.py). Which engine made a token
does not matter to them: the ratio between trainer and engine is corrected by `correction`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from strop.algorithm.advantages import AdvantageFn, center, leave_one_out, standardize
from strop.algorithm.aggregation import Aggregation
from strop.algorithm.corrections import CORRECTIONS, CorrectionFn, correct_nothing
from strop.algorithm.losses import CLIPPED, TokenLoss

if TYPE_CHECKING:
    from torch import Tensor

    from strop.spec.algorithm import AlgorithmSpec

ZeroVariance = Literal["skip", "keep", "drop"]
Overlong = Literal["keep", "mask"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenTerms:
    """What the backward pass needs of each token, before its aggregation weight."""

    loss_N: Tensor
    """Correction times loss; nats times advantage units."""
    grad_N: Tensor
    """Correction times derivative of the loss with respect to the log-probability."""
    correction_N: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Algorithm:
    """What counts as better, and how a batch moves the policy towards it."""

    name: str
    advantage: AdvantageFn
    loss: TokenLoss
    aggregation: Aggregation
    clip_low: float
    """The ratio's range begins at 1 - clip_low."""
    clip_high: float
    """The ratio's range ends at 1 + clip_high."""
    zero_variance: ZeroVariance = "skip"
    """Groups without any difference: skip (not forwarded but counted, the same gradient as keep),
    keep (forwarded), drop (neither forwarded nor counted, a different algorithm)."""
    overlong: Overlong = "keep"
    """Rollouts cut at the limit: keep (ordinary) or mask (no token trained; they stay in the
    statistics of their group and remain one of the batch's rollouts)."""
    correction: CorrectionFn = correct_nothing
    correction_cap: float = 2.0
    """Upper bound of the correction weight; without meaning for `correct_nothing`."""

    def token_terms(
        self,
        logp_N: Tensor,
        behavior_logp_N: Tensor,
        advantage_N: Tensor,
        proximal_logp_N: Tensor | None = None,
    ) -> TokenTerms:
        """Compute loss and gradient of each token in closed form; nothing is differentiated.

        Shapes: N scored tokens; N may be 0.
        `proximal_logp_N` is the trainer's own log-probability at the start of the batch's first
        optimizer step. None means one step per batch: it is then `logp_N` itself, so the ratio is
        1, clipping never acts and the correction alone covers the gap to the engine.
        """
        current_N = logp_N.detach()
        old_N = current_N if proximal_logp_N is None else proximal_logp_N.detach()
        correction_N = self.correction(old_N - behavior_logp_N, self.correction_cap)
        loss_N = self.loss.value(current_N, old_N, advantage_N, self.clip_low, self.clip_high)
        grad_N = self.loss.grad(current_N, old_N, advantage_N, self.clip_low, self.clip_high)
        return TokenTerms(
            loss_N=correction_N * loss_N, grad_N=correction_N * grad_N, correction_N=correction_N
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
)
"""The clip-higher range and the token mean of DAPO. Source: arXiv:2503.14476.

Not the whole of it: dynamic sampling (generating until every group shows a difference) and soft
overlong punishment are not offered. Groups without difference are skipped as in the others.
"""

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

ALGORITHMS: Mapping[str, Algorithm] = {entry.name: entry for entry in (GRPO, DR_GRPO, DAPO, RLOO)}


def build_algorithm(spec: AlgorithmSpec) -> Algorithm:
    """Take an entry of `ALGORITHMS` and put the run's own settings in it.

    The spec admits only names that exist here; a test compares the two lists.
    """
    entry = ALGORITHMS[spec.name]
    return replace(
        entry,
        clip_low=entry.clip_low if spec.clip_low is None else spec.clip_low,
        clip_high=entry.clip_high if spec.clip_high is None else spec.clip_high,
        zero_variance=entry.zero_variance if spec.zero_variance is None else spec.zero_variance,
        overlong=spec.overlong,
        correction=CORRECTIONS[spec.correction],
        correction_cap=spec.correction_cap,
    )
