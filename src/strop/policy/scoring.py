"""Log-probabilities of given tokens under the current weights, without gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from strop.policy.head import Head, token_logprobs
from strop.policy.language_model import LanguageModel
from strop.policy.packing import EMPTY_GROUP, PackedBatch, PackedGroup, PackedReply, cut_groups
from strop.policy.ranks import Ranks, count_missing
from strop.rollout import FloatArray, IntArray

Measure = Callable[[torch.Tensor, Head, PackedBatch, float], torch.Tensor]
"""What is computed of hidden states (U, D), head, batch and temperature, for its M scored tokens."""


@torch.no_grad()
def score_batch(
    model: LanguageModel, batch: PackedBatch, temperature: float, measure: Measure = token_logprobs
) -> torch.Tensor:
    """Return the log-probability (nats) of every scored token of a batch. Shapes: (M,), fp32.

    Another `measure` returns its own of each token, in the first dimension.
    """
    return measure(model.read(batch), model.head, batch, temperature)


def score_groups(
    model: LanguageModel,
    groups: Sequence[PackedGroup],
    temperature: float,
    *,
    max_positions: int | None = None,
) -> list[FloatArray]:
    """Return the log-probability (nats) of the scored tokens of each reply, in order of the groups.

    Groups are fed together up to `max_positions`, all at once without it. A temperature of 0 is scored
    at 1, as engines report it.
    """
    return score_parts(model, cut_groups(groups, max_positions, is_alone=model.is_alone), temperature)


def score_share(
    model: LanguageModel,
    groups: Sequence[PackedGroup],
    temperature: float,
    max_positions: int,
    ranks: Ranks,
    measure: Measure = token_logprobs,
) -> list[FloatArray]:
    """Score this rank's share, which may be empty, like `score_groups`. Every rank must call it."""
    parts = list(cut_groups(groups, max_positions, is_alone=model.is_alone))
    parts += [[EMPTY_GROUP]] * count_missing(ranks, len(parts))
    return score_parts(model, parts, temperature, measure)


def score_parts(
    model: LanguageModel,
    parts: Iterable[Sequence[PackedGroup]],
    temperature: float,
    measure: Measure = token_logprobs,
) -> list[FloatArray]:
    """Score groups like `score_groups`, those of a part in one forward."""
    found: list[FloatArray] = []
    for part in parts:
        batch = PackedBatch.of_groups(part, model.device)
        scores: FloatArray = score_batch(model, batch, temperature or 1.0, measure).cpu().numpy()
        # Scored tokens stand in the order of the positions that predict them, replies among each other.
        found += [scores[batch.reply_M == index] for index in range(sum(len(g.replies) for g in part))]
    return found


def pack_given(prompt_ids: IntArray, replies: Sequence[IntArray]) -> PackedGroup:
    """Pack replies that were given and not sampled, every token scored."""
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
    return PackedGroup(prompt_ids=prompt_ids, replies=packed)


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
    return score_groups(model, [pack_given(prompt_ids, replies)], temperature)
