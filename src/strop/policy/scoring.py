"""Log-probabilities of given tokens under the current weights, without gradients."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from strop.policy.head import token_logprobs
from strop.policy.language_model import LanguageModel
from strop.policy.packing import PackedBatch, PackedGroup, PackedReply
from strop.policy.prefix_attention import PrefixSharedAttention
from strop.rollout import FloatArray, IntArray


@torch.no_grad()
def score_batch(model: LanguageModel, batch: PackedBatch, temperature: float) -> torch.Tensor:
    """Return the log-probability (nats) of every scored token of a batch. Shapes: (M,), fp32."""
    attention = PrefixSharedAttention(batch.layout, model.device)
    hidden = model.trunk(batch.token_ids_N, batch.position_ids_N, attention)
    return token_logprobs(hidden[batch.scored_positions_U], model.head_weight, batch, temperature)


def score_reply(
    model: LanguageModel, prompt_ids: IntArray, reply_ids: IntArray, temperature: float
) -> FloatArray:
    """Return the log-probability (nats) of each token of one reply. Shapes: (T,) to (T,).

    A temperature of 0 is scored at 1, as engines report it.
    """
    return score_replies(model, prompt_ids, [reply_ids], temperature)[0]


def score_replies(
    model: LanguageModel, prompt_ids: IntArray, replies: Sequence[IntArray], temperature: float
) -> list[FloatArray]:
    """Score several replies to one prompt, which is fed once. Shapes: (T,) each, like the replies."""
    packed = tuple(
        PackedReply(
            token_ids=reply_ids,
            is_scored=np.ones(len(reply_ids), dtype=np.bool_),
            engine_logprobs=np.zeros(len(reply_ids), dtype=np.float32),
            advantage=0.0,
            weight=0.0,
        )
        for reply_ids in replies
    )
    batch = PackedBatch.of_groups([PackedGroup(prompt_ids=prompt_ids, replies=packed)], model.device)
    scores: FloatArray = score_batch(model, batch, temperature or 1.0).cpu().numpy()
    # Scored tokens stand in the order of the positions that predict them, replies among each other.
    return [scores[batch.reply_M == index] for index in range(len(replies))]
