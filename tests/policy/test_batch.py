"""From judged groups to packed ones: who is forwarded, with which prompt, weight and advantage."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from strop.algorithm import ALGORITHMS
from strop.policy.packing import PackedBatch
from strop.rollout import FailureOwner, Outcome
from strop.train.batch import build_batch
from tests.policy.worlds import REPLY_LIMIT, World, plain, ragged_groups


def test_a_member_that_never_began_does_not_hide_the_prompt() -> None:
    group = World().group(4, [[1], [2], [3]], [0.0, 1.0, 0.0])
    lost = replace(group.rollouts[0], turns=(), outcome=Outcome.lost(FailureOwner.INFRA, "OSError"))
    batch = build_batch(ALGORITHMS["grpo"], [replace(group, rollouts=(lost, *group.rollouts[1:]))], 8)
    (packed,) = batch.groups
    assert packed.prompt_ids.tolist() == group.rollouts[1].turns[0].token_ids.tolist()
    assert [len(reply.token_ids) for reply in packed.replies] == [2, 3]


def test_members_that_saw_other_prompts_do_not_share_one() -> None:
    world = World()
    group = world.group(4, [[1], [2], [3]], [0.0, 1.0, 0.0])
    other = world.told(world.ids(6))
    changed = replace(group.rollouts[1], turns=(other, *group.rollouts[1].turns[1:]))
    members = (group.rollouts[0], changed, group.rollouts[2])
    batch = build_batch(ALGORITHMS["grpo"], [replace(group, rollouts=members)], 8)
    assert [len(packed.prompt_ids) for packed in batch.groups] == [4, 6]
    assert [[len(reply.token_ids) for reply in packed.replies] for packed in batch.groups] == [[1, 3], [2]]


def test_advantages_and_weights_by_hand() -> None:
    group = World().group(2, [[3], [1, 2, 1], [2]], [1.0, 0.0, 0.0])
    (packed,) = build_batch(plain("dapo"), [group], 8).groups
    # Mean 1/3, spread sqrt(((2/3)^2 + 2 (1/3)^2) / 2) = 0.577350; tokens 3 + 2 + 2 = 7.
    spread = 0.577350 + 1e-4
    expected = [2 / 3 / spread, -1 / 3 / spread, -1 / 3 / spread]
    assert [reply.advantage for reply in packed.replies] == pytest.approx(expected, rel=1e-6)
    assert [reply.weight for reply in packed.replies] == pytest.approx([1 / 7] * 3)
    assert [int(reply.is_scored.sum()) for reply in packed.replies] == [3, 2, 2]
    batch = PackedBatch.of_groups([packed], torch.device("cpu"))
    assert float(batch.weight_M.sum()) == pytest.approx(1.0)


def test_cut_replies_can_be_left_out_of_the_loss() -> None:
    group = World().group(2, [[3], [5], [2]], [1.0, 0.0, 0.0], truncated=[1])
    masking = replace(plain("dapo"), overlong="mask")
    kept, masked = (build_batch(algorithm, [group], 8) for algorithm in (plain("dapo"), masking))
    assert [len(reply.token_ids) for reply in kept.groups[0].replies] == [3, 5, 2]
    assert [len(reply.token_ids) for reply in masked.groups[0].replies] == [3, 2]
    # It stays in the statistics, and its tokens leave the normaliser: 1 / (3 + 2).
    assert masked.groups[0].replies[0].advantage == kept.groups[0].replies[0].advantage
    assert masked.groups[0].replies[0].weight == pytest.approx(1 / 5)


def test_a_batch_without_signal_forwards_nothing_and_counts_all() -> None:
    groups = [World(seed).group(3, [[2], [4]], [1.0, 1.0]) for seed in range(3)]
    batch = build_batch(ALGORITHMS["grpo"], groups, 8)
    assert batch.groups == ()
    assert (batch.credit.num_counted_tokens, batch.credit.num_forwarded_tokens) == (18, 0)


def test_no_token_is_lost_or_made_up() -> None:
    groups = ragged_groups()
    batch = build_batch(replace(ALGORITHMS["grpo"], zero_variance="keep"), groups, REPLY_LIMIT)
    num_scored = sum(int(reply.is_scored.sum()) for group in batch.groups for reply in group.replies)
    assert num_scored == batch.credit.num_forwarded_tokens == batch.credit.num_counted_tokens
    # Groups of 1 + 2, 7 + 1, 2 + 7 + 4 + 0 + 9, 3 + 6 + 1, 7 + 3 sampled tokens; three of group 4's turns
    # were told, and the last group has one scored member only.
    assert num_scored == 3 + 8 + 22 + 10 + (7 + 3)
