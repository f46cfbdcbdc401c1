"""The terms of a step's loss: what the rollouts say, and what the demonstrations say.

Both go through the same packed forward, head and optimizer step. Each is normalised over its own
complete batch; only then does `sft.weight` act.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from strop.algorithm import Algorithm
from strop.algorithm.supervised import cross_entropy_terms, weigh_demonstrations
from strop.policy.learner import LossTerm
from strop.policy.packing import PackedGroup, PackedReply
from strop.train.batch import TrainBatch, share_prompts
from strop.train.demonstrations import Demonstration

SFT_TEMPERATURE = 1.0
"""Demonstrations were drawn from no distribution of this run: logits are taken as they are."""


def rl_term(algorithm: Algorithm, batch: TrainBatch, temperature: float) -> LossTerm:
    """Return the policy-gradient term of a credited batch."""

    def token_terms(
        logprob: torch.Tensor, engine_logprob: torch.Tensor, advantage: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        terms = algorithm.token_terms(logprob, engine_logprob, advantage)
        return terms.loss_N, terms.grad_N

    return LossTerm(name="rl", groups=batch.groups, temperature=temperature, token_terms=token_terms)


def sft_term(members: Sequence[Demonstration], weight: float) -> LossTerm:
    """Return the mean cross-entropy of demonstrations, `weight` times."""

    def token_terms(
        logprob: torch.Tensor, engine_logprob: torch.Tensor, advantage: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return cross_entropy_terms(logprob)

    return LossTerm(
        name="sft",
        groups=pack_demonstrations(members),
        temperature=SFT_TEMPERATURE,
        token_terms=token_terms,
        weight=weight,
    )


def pack_demonstrations(members: Sequence[Demonstration]) -> list[PackedGroup]:
    """Pack the demonstrations of one step; those that share a prompt hold it once."""
    weights = weigh_demonstrations(
        [member.weight for member in members], [int(member.is_trained.sum()) for member in members]
    )
    replies = [
        PackedReply(
            token_ids=member.reply_ids,
            is_scored=member.is_trained,
            engine_logprobs=np.full(int(member.is_trained.sum()), np.nan, dtype=np.float32),
            advantage=0.0,
            weight=float(weight),
        )
        for member, weight in zip(members, weights, strict=True)
    ]
    prompts = [member.prompt_ids for member in members]
    return share_prompts(list(zip(prompts, replies, strict=True)))
