"""From judged groups to what the learner packs: credit assigned once, rows built once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from strop.algorithm import Algorithm, Credit, assign_credit
from strop.policy.packing import PackedGroup, PackedReply
from strop.rollout import Group, IntArray, Turn


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainBatch:
    """The input of one optimizer step."""

    groups: tuple[PackedGroup, ...]
    """Only rollouts that are forwarded."""
    credit: Credit


def build_batch(
    algorithm: Algorithm,
    groups: Sequence[Group],
    max_reply_tokens: int,
    limit_P: Sequence[int] | None = None,
) -> TrainBatch:
    """Assign credit over the complete batch, then pack what is forwarded. Limits: as `assign_credit`."""
    credit = assign_credit(
        algorithm,
        [[rollout.outcome.reward for rollout in group.rollouts] for group in groups],
        [[rollout.num_sampled_tokens for rollout in group.rollouts] for group in groups],
        [[rollout.outcome.truncated for rollout in group.rollouts] for group in groups],
        max_reply_tokens,
        limit_P,
    )
    packed: list[PackedGroup] = []
    for index, group in enumerate(groups):
        replies = [
            (turns[0].token_ids, pack_reply(turns, float(advantage), float(weight)))
            for rollout, advantage, weight, is_forwarded in zip(
                group.rollouts,
                credit.advantage_P_G[index],
                credit.weight_P_G[index],
                credit.is_forwarded_P_G[index],
                strict=True,
            )
            if is_forwarded
            for turns in rollout.samples
            if any(turn.is_sampled and len(turn.token_ids) for turn in turns)
        ]
        packed += share_prompts(replies)
    return TrainBatch(groups=tuple(packed), credit=credit)


def share_prompts(replies: Sequence[tuple[IntArray, PackedReply]]) -> list[PackedGroup]:
    """Hold each distinct prompt once, in order of appearance.

    The rollouts of a group usually have one, but a world may open differently; compared are the ids
    themselves.
    """
    by_prompt: dict[bytes, tuple[IntArray, list[PackedReply]]] = {}
    for prompt_ids, reply in replies:
        by_prompt.setdefault(prompt_ids.tobytes(), (prompt_ids, []))[1].append(reply)
    return [PackedGroup(prompt_ids=ids, replies=tuple(members)) for ids, members in by_prompt.values()]


def pack_reply(turns: Sequence[Turn], advantage: float, weight: float) -> PackedReply:
    """Join everything after the opening prompt of a sample; what the policy sampled is scored, and only that.

    What ended a reply was sampled too, terminator or stop string. A gradient without the tokens of a stop
    string is not the gradient of the expected reward: the choice to end there would go without credit.
    """
    replies = turns[1:]
    return PackedReply(
        token_ids=np.concatenate([turn.token_ids for turn in replies]),
        is_scored=np.concatenate([np.full(len(turn.token_ids), turn.is_sampled) for turn in replies]),
        engine_logprobs=np.concatenate([turn.logprobs for turn in replies if turn.logprobs is not None]),
        advantage=advantage,
        weight=weight,
    )
