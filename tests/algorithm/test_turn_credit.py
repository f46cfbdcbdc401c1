"""Credit per turn: each turn is compared with the turns of other attempts that are as late."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from strop.algorithm import assign_credit, build_algorithm
from strop.algorithm.advantages import center, compare_turns
from strop.errors import ConfigError
from strop.rollout import Example, Group, Outcome, Rollout, Sampling, Turn
from strop.spec.algorithm import AlgorithmSpec
from strop.train.batch import build_batch
from strop.train.measure import measure_batch
from tests.fixtures.builders import rollout_of, spoken_turn
from tests.fixtures.tiny_run import tiny_spec

REWARDS = [1.0, 0.4, None, 0.5]
EARNED = [[0.2, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0], [0.5]]
# Returns at a discount of 0.5: 0.2 + 0.5 * 0.8 and 0.8; 0.1, 0.2 and 0.4; none; 0.5. The mean of first turns
# is 0.4, of second ones 0.5; one attempt alone has a third.
BY_HAND = [[0.2, 0.3], [-0.3, -0.3, 0.0], [0.0, 0.0], [0.1]]
CENTERED = build_algorithm(AlgorithmSpec(name="dr_grpo", credit="turn", turn_discount=0.5))


def test_a_turn_is_compared_with_those_that_are_as_late() -> None:
    found = compare_turns(center, REWARDS, EARNED, 0.5)
    for advantage_K, by_hand in zip(found, BY_HAND, strict=True):
        np.testing.assert_allclose(advantage_K, by_hand, atol=1e-12)


def test_without_discount_and_turn_rewards_a_turn_has_the_reward_of_its_attempt() -> None:
    found = compare_turns(center, [1.0, 0.0], [[0.0, 0.0], [0.0, 0.0]], 1.0)
    assert [one.tolist() for one in found] == [[0.5, 0.5], [-0.5, -0.5]]


def test_equal_rewards_earned_in_other_turns_are_a_difference() -> None:
    earned = [[[1.0, 0.0], [0.0, 1.0]]]
    credit = assign_credit(CENTERED, [[1.0, 1.0]], [[4, 4]], [[False, False]], 8, None, earned)
    # First turns: 1 and 0.5. Second ones: 0 and 1.
    assert credit.turn_advantage_P_G_K is not None
    assert [one.tolist() for one in credit.turn_advantage_P_G_K[0]] == [[0.25, -0.5], [-0.25, 0.5]]
    assert credit.num_zero_variance_groups == 0
    assert credit.is_forwarded_P_G[0].all()


def played(index: int, num_tokens: list[int], reward: float | None, earned: list[float]) -> Rollout:
    turns: list[Turn] = []
    for number in num_tokens:
        ids = np.arange(number, dtype=np.int32)
        turns += [
            Turn(role="prompt", text="", token_ids=np.zeros(2, np.int32)),
            spoken_turn("", ids),
        ]
    outcome = Outcome(parts={"reward": reward}, turn_rewards=tuple(earned))
    example = Example(task="game", example_id="1", fields={}, answer=None)
    sampling = Sampling(temperature=1.0)
    return rollout_of(example, turns, outcome, sample_index=index, sampling=sampling)


@pytest.mark.parametrize("is_restarted", [False, True])
def test_each_token_has_the_advantage_of_its_turn(is_restarted: bool) -> None:
    lengths = [[3, 1], [1, 2, 2], [1, 1], [2]]
    rollouts = [
        played(index, lengths[index], reward, EARNED[index] if any(EARNED[index]) else [])
        for index, reward in enumerate(REWARDS)
    ]
    if is_restarted:
        # The history was rendered anew behind the first turn: two samples, and the turns count on.
        first = rollouts[0]
        anew = replace(first.turns[2], role="restart")
        rollouts[0] = replace(first, turns=(*first.turns[:2], anew, first.turns[3]))
        assert len(rollouts[0].samples) == 2
    batch = build_batch(CENTERED, [Group(example=rollouts[0].example, rollouts=tuple(rollouts))], 8)
    found: dict[int, list[float]] = {}
    replies = [reply for group in batch.groups for reply in group.replies]
    for (_, member), reply in zip(batch.places, replies, strict=True):
        assert reply.token_advantages is not None
        found.setdefault(member, []).extend(reply.token_advantages.tolist())
    for member, values in found.items():
        expected = np.repeat(BY_HAND[member], lengths[member])
        np.testing.assert_allclose(values, expected, atol=1e-6)
    assert sorted(found) == [0, 1, 3]
    assert measure_batch(batch)["num_signal_tokens"] == 4 + 3 + 2


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"advantage": "rpp_baseline"}, "compares rewards over the whole batch"),
        ({"advantage": "batch_std"}, "compares rewards over the whole batch"),
        ({"name": "dapo"}, "zero_variance='resample'"),
        ({"zero_variance": "drop"}, "zero_variance='drop'"),
    ],
)
def test_what_looks_at_whole_attempts_is_refused_beside_it(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build_algorithm(AlgorithmSpec(credit="turn", **settings))


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"algorithm": {"credit": "turn"}}, "there are no turns"),
        ({"algorithm": {"turn_discount": 0.9}}, "all turns share the reward"),
    ],
)
def test_a_setting_without_effect_is_refused(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(Exception, match=said):
        tiny_spec(**sections)
