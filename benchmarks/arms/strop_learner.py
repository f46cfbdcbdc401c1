"""The learning half of strop's arm: credit, packing and one optimizer step of the real learner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from benchmarks import cases
from benchmarks.arms.worker import Record
from benchmarks.cases import Case
from strop.algorithm.catalog import DAPO
from strop.algorithm.credit import Credit, assign_credit
from strop.engine.contract import Completion
from strop.policy.language_model import LanguageModel
from strop.policy.learner import Learner, StepReport
from strop.policy.packing import PackedGroup, PackedReply
from strop.rollout import FinishReason, IntArray
from strop.spec.optimizer import OptimizerSpec

ALGORITHM = replace(DAPO, clip_low=cases.CLIP_LOW, clip_high=cases.CLIP_HIGH)
"""Token mean and clip range as in TRL's arm; TRL's `loss_type="dapo"` is this loss."""


def token_terms(
    logprob: torch.Tensor, engine_logprob: torch.Tensor, advantage: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return loss and gradient of each token by the algorithm's closed forms."""
    terms = ALGORITHM.token_terms(logprob, engine_logprob, advantage)
    return terms.loss_N, terms.grad_N


def pack_groups(
    prompt_ids_P: Sequence[IntArray], completions_P_G: Sequence[Sequence[Completion]], credit: Credit
) -> list[PackedGroup]:
    """Lay out the forwarded replies of each group under their shared prompt."""
    groups = []
    for index, (prompt_ids, completions_G) in enumerate(zip(prompt_ids_P, completions_P_G, strict=True)):
        replies = tuple(
            PackedReply(
                token_ids=completion.token_ids,
                is_scored=np.ones(len(completion.token_ids), dtype=np.bool_),
                engine_logprobs=completion.logprobs,
                advantage=float(credit.advantage_P_G[index][member]),
                weight=float(credit.weight_P_G[index][member]),
            )
            for member, completion in enumerate(completions_G)
            if credit.is_forwarded_P_G[index][member]
        )
        if replies:
            groups.append(PackedGroup(prompt_ids=prompt_ids, replies=replies))
    return groups


class StropLearner:
    """strop's learner, with its start weights kept so that every step is the same work."""

    def __init__(self, model: LanguageModel, case: Case) -> None:
        spec = OptimizerSpec(lr=cases.LEARNING_RATE, max_grad_norm=cases.MAX_GRAD_NORM, weight_decay=0.0)
        self._case = case
        self._model = model
        self._learner = Learner(model, spec)
        # The learner's own tensors: no public way leads to the masters alone, and none should.
        self._masters = self._learner._masters
        self._start = {name: master.detach().clone() for name, master in self._masters.items()}

    @torch.no_grad()
    def restore_weights(self) -> None:
        """Put the start's weights back into masters and compute copies. Adam's moments stay."""
        for name, parameter in self._model.named_parameters():
            self._masters[name].copy_(self._start[name])
            parameter.copy_(self._start[name])

    @torch.no_grad()
    def update_norm(self) -> float:
        """Return the L2 distance of the masters from the start's weights."""
        norms = [(self._masters[name] - start).norm() for name, start in self._start.items()]
        return float(torch.stack(norms).norm())

    def _step(self, groups: Sequence[PackedGroup]) -> StepReport:
        return self._learner.step(groups, temperature=1.0, token_terms=token_terms)

    def learn(
        self,
        prompt_ids_P: Sequence[IntArray],
        completions_PG: Sequence[Completion],
        rewards_PG: Sequence[float],
    ) -> Record:
        """Turn judged replies into one optimizer step and return its share of the record."""
        size = self._case.group_size
        starts = range(0, len(completions_PG), size)
        completions_P_G = [completions_PG[start : start + size] for start in starts]
        rewards_P_G = [rewards_PG[start : start + size] for start in starts]
        credit = assign_credit(
            ALGORITHM,
            rewards_P_G,
            [[len(completion.token_ids) for completion in group] for group in completions_P_G],
            [[completion.finish_reason is FinishReason.LENGTH for completion in g] for g in completions_P_G],
            self._case.max_new_tokens,
        )
        report = self._step(pack_groups(prompt_ids_P, completions_P_G, credit))
        drift = report.drift_M
        return {
            "positions_forwarded": report.num_positions,
            "positions_real": report.num_positions,
            "head_positions": credit.num_forwarded_tokens,
            "grad_norm": report.grad_norm,
            "mismatch_mean": float(drift.mean()) if len(drift) else None,
            "mismatch_p99": float(np.quantile(drift, 0.99)) if len(drift) else None,
        }
