"""Credit of whole batches: advantages, weights, and who is forwarded, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.algorithm.advantages import Aggregation
from strop.algorithm.building import build_algorithm
from strop.algorithm.catalog import ALGORITHMS, DAPO, DR_GRPO, GRPO, Algorithm
from strop.algorithm.credit import Credit, assign_credit, needs_replacement, shape_rewards
from strop.algorithm.losses import KlPenalty
from strop.errors import DataError
from strop.spec.algorithm import AlgorithmSpec


def listed(arrays: tuple[Any, ...]) -> list[list[Any]]:
    return [array.tolist() for array in arrays]


def sum_of_weights(credit: Credit, num_scored_P_G: list[list[int]]) -> float:
    pairs = zip(credit.weight_P_G, num_scored_P_G, strict=True)
    return float(sum(np.dot(weights, counts) for weights, counts in pairs))


@pytest.mark.parametrize(
    ("aggregation", "expected_P_G"),
    [
        # 8 tokens, 4 rollouts, 2 groups of 4 tokens each; reply limit 5
        (Aggregation.TOKEN_MEAN, [[1 / 8, 1 / 8], [1 / 8, 1 / 8]]),
        (Aggregation.SEQ_MEAN, [[1 / 4, 1 / 12], [1 / 8, 1 / 8]]),
        (Aggregation.CONST, [[1 / 20, 1 / 20], [1 / 20, 1 / 20]]),
    ],
)
def test_opt_3_weights_by_hand(aggregation: Aggregation, expected_P_G: list[list[float]]) -> None:
    algorithm = replace(GRPO, aggregation=aggregation)
    credit = assign_credit(algorithm, [[1, 0], [1, 0]], [[1, 3], [2, 2]], [[False] * 2] * 2, 5)
    for weights, expected in zip(credit.weight_P_G, expected_P_G, strict=True):
        assert weights.tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("zero_variance", "weight", "is_forwarded", "num_dropped"),
    # 2 + 2 tokens count with skip and keep, 2 with drop
    [("skip", 1 / 4, False, 0), ("keep", 1 / 4, True, 0), ("drop", 1 / 2, False, 1)],
)
def test_groups_without_difference(
    zero_variance: Any, weight: float, is_forwarded: bool, num_dropped: int
) -> None:
    algorithm = replace(DAPO, zero_variance=zero_variance)
    credit = assign_credit(algorithm, [[1, 0], [1, 1]], [[1, 1], [1, 1]], [[False] * 2] * 2, 4)
    assert credit.weight_P_G[0].tolist() == [weight] * 2
    assert credit.is_forwarded_P_G[0].tolist() == [True, True]
    assert credit.advantage_P_G[1].tolist() == [0.0, 0.0]
    assert credit.is_forwarded_P_G[1].tolist() == [is_forwarded] * 2
    assert credit.num_zero_variance_groups == 1
    assert credit.num_dropped_groups == num_dropped
    assert credit.num_counted_tokens == round(1 / weight)


@pytest.mark.parametrize(
    ("algorithm", "rewards_P_G", "num_scored_P_G", "expected"),
    [
        # The mean reward is skipped alone: three rollouts x limit 9, all counted.
        (DR_GRPO, [[0, 0.5, 1]], [[1, 1, 1]], {
            "advantage_P_G": [[-0.5, 0.0, 0.5]], "weight_P_G": [[1 / 27] * 3],
            "is_forwarded_P_G": [[True, False, True]], "num_zero_variance_groups": 0,
        }),
        # One without score is in no normaliser: 2 rollouts of 2 tokens.
        (GRPO, [[1, 0, None]], [[2, 2, 9]], {
            "weight_P_G": [[1 / 4, 1 / 4, 0.0]], "is_forwarded_P_G": [[True, True, False]],
            "num_unscored": 1, "num_counted_tokens": 4,
        }),
        # One scored member is no group.
        (GRPO, [[1, None], [1, 0]], [[5, 5], [1, 1]], {
            "advantage_P_G": [[0.0, 0.0], pytest.approx([0.707007, -0.707007], abs=1e-6)],
            "weight_P_G": [[0.0, 0.0], [0.5, 0.5]], "num_dropped_groups": 1, "num_zero_variance_groups": 0,
        }),
        # Nor are less than half of its members.
        (GRPO, [[1, 0, None, None, None], [1, 0, None, None]], [[2] * 5, [2] * 4], {
            "is_forwarded_P_G": [[False] * 5, [True, True, False, False]],
            "num_dropped_groups": 1, "num_counted_tokens": 4,
        }),
        # An empty reply counts as a rollout: the one token of the other has weight 1 / (2 x 1), and not 1.
        (GRPO, [[1, 0]], [[1, 0]], {
            "weight_P_G": [[0.5, 0.0]], "is_forwarded_P_G": [[True, False]], "num_empty": 1,
        }),
        (GRPO, [[None, None]], [[3, 3]], {"num_counted_tokens": 0, "num_forwarded": 0, "num_unscored": 2}),
        (GRPO, [], [], {"num_counted_tokens": 0}),
        # All is equal: the loop takes a normal optimizer step with a zero policy gradient.
        (GRPO, [[1, 1]], [[3, 3]], {"num_counted_tokens": 6, "num_forwarded_tokens": 0}),
    ],
)  # fmt: skip
def test_opt_5_who_counts_by_hand(
    algorithm: Algorithm, rewards_P_G: list[Any], num_scored_P_G: list[list[int]], expected: dict[str, Any]
) -> None:
    cut_P_G = [[False] * len(rewards_G) for rewards_G in rewards_P_G]
    credit = assign_credit(algorithm, rewards_P_G, num_scored_P_G, cut_P_G, 9)
    for name, value in expected.items():
        found = getattr(credit, name)
        assert (listed(found) if isinstance(found, tuple) else found) == value, name


def test_masked_overlong_replies_stay_in_the_baseline() -> None:
    rewards_P_G, num_scored_P_G = [[1, 0, 0, 0]], [[2, 2, 2, 8]]
    truncated_P_G = [[False, False, False, True]]
    plain = replace(DAPO, overlong="keep")
    masking = replace(plain, overlong="mask")
    masked = assign_credit(masking, rewards_P_G, num_scored_P_G, truncated_P_G, 8)
    kept = assign_credit(plain, rewards_P_G, num_scored_P_G, truncated_P_G, 8)
    assert listed(masked.advantage_P_G) == listed(kept.advantage_P_G)
    assert listed(masked.weight_P_G) == [[1 / 6, 1 / 6, 1 / 6, 0.0]]  # 2 + 2 + 2 tokens
    assert listed(kept.weight_P_G) == [[1 / 14] * 4]
    assert listed(masked.is_forwarded_P_G) == [[True, True, True, False]]
    assert (masked.num_masked_overlong, kept.num_masked_overlong) == (1, 0)
    assert masked.num_empty == 0


batches = st.lists(
    st.lists(
        st.tuples(st.sampled_from([None, 0.0, 0.5, 1.0]), st.integers(0, 9), st.booleans()),
        min_size=1,
        max_size=5,
    ),
    max_size=5,
)


@settings(deadline=None)
@given(batch_P_G=batches, name=st.sampled_from(sorted(ALGORITHMS)), aggregation=st.sampled_from(Aggregation))
def test_what_is_forwarded_is_counted_and_has_a_weight(
    batch_P_G: list[list[tuple[float | None, int, bool]]], name: str, aggregation: Aggregation
) -> None:
    for overlong in ("keep", "mask"):
        algorithm: Algorithm = replace(ALGORITHMS[name], aggregation=aggregation, overlong=overlong)
        rewards_P_G = [[row[0] for row in group] for group in batch_P_G]
        num_scored_P_G = [[row[1] for row in group] for group in batch_P_G]
        truncated_P_G = [[row[2] for row in group] for group in batch_P_G]
        credit = assign_credit(algorithm, rewards_P_G, num_scored_P_G, truncated_P_G, 9)
        for p, group in enumerate(batch_P_G):
            for g, (reward, num_scored, truncated) in enumerate(group):
                if credit.is_forwarded_P_G[p][g]:
                    assert reward is not None
                    assert num_scored > 0
                    assert not (truncated and overlong == "mask")
                    assert credit.weight_P_G[p][g] > 0
                    is_kept = algorithm.acts_on_all_tokens or algorithm.zero_variance == "keep"
                    assert credit.advantage_P_G[p][g] != 0 or is_kept
                if reward is None:
                    assert credit.advantage_P_G[p][g] == credit.weight_P_G[p][g] == 0
        if aggregation is Aggregation.TOKEN_MEAN and credit.num_counted_tokens:
            assert sum_of_weights(credit, num_scored_P_G) == pytest.approx(1.0)
        assert credit.num_forwarded_tokens <= credit.num_counted_tokens


def test_streams_of_different_shape_are_refused() -> None:
    with pytest.raises(DataError, match=r"rewards \[2\]; token counts \[1\]; truncation flags \[2\]\. All"):
        assign_credit(GRPO, [[1, 0]], [[1]], [[False, False]], 9)


def test_replies_near_the_limit_lose_reward_by_hand() -> None:
    # Limit 20, a fifth of it is 4: from 16 tokens on a quarter per token.
    lengths = [15, 16, 17, 18, 20, 21]
    assert shape_rewards(DAPO, [0.0] * 6, lengths, 20) == [0, 0, -0.25, -0.5, -1, -1]
    assert shape_rewards(DAPO, [1.0, None], [18, 18], 20) == [0.5, None]
    # At least one token.
    assert shape_rewards(DAPO, [0.0], [2], 2) == [-1]
    assert shape_rewards(GRPO, [0.5], [20], 20) == [0.5]


def test_every_group_is_shaped_by_its_own_limit_and_normalised_by_the_widest() -> None:
    # Both second replies are cut, at 16 and at 64 tokens; what is left of their rewards is the same.
    shaping = replace(DR_GRPO, overlong="shape")
    lengths_P_G, cut_P_G = [[1, 16], [1, 64]], [[False, True]] * 2
    credit = assign_credit(shaping, [[1, 1]] * 2, lengths_P_G, cut_P_G, 64, [16, 64])
    assert listed(credit.advantage_P_G) == [[0.5, -0.5], [0.5, -0.5]]
    assert listed(credit.weight_P_G) == [[1 / (4 * 64)] * 2] * 2
    # Where nothing else is said, all have the widest.
    credit = assign_credit(shaping, [[1, 1]] * 2, lengths_P_G, cut_P_G, 64)
    assert listed(credit.advantage_P_G) == [[0.0, 0.0], [0.5, -0.5]]


def test_shaped_rewards_are_compared_and_the_filter_may_look_at_the_tasks_own() -> None:
    # Rewards 1 and 1; the second is at the limit and loses 1. The mean is 0.5, the spread 0.707107.
    rewards_P_G, lengths_P_G, cut_P_G = [[1, 1]], [[2, 20]], [[False, True]]
    shaped = replace(DAPO, filter_on="shaped")
    credit = assign_credit(shaped, rewards_P_G, lengths_P_G, cut_P_G, 20)
    assert listed(credit.advantage_P_G)[0] == pytest.approx([0.707007, -0.707007], abs=1e-6)
    assert credit.num_dropped_groups == 0
    credit = assign_credit(DAPO, rewards_P_G, lengths_P_G, cut_P_G, 20)
    assert (credit.num_dropped_groups, credit.num_zero_variance_groups) == (1, 1)


@pytest.mark.parametrize(
    ("rewards_G", "is_replaced"),
    [
        ([1, 0, 0], False),
        # The only loser must keep its group: the statistics are those of all members.
        ([1, 1, 1, 0], False),
        ([1, 1], True),
        ([0, None, 0], True),
        # Fewer than two scores are a failure, and no reason to sample another.
        ([1, None], False),
        ([], False),
    ],
)
def test_what_shows_no_difference_is_replaced(rewards_G: list[float | None], is_replaced: bool) -> None:
    lengths_G = [1] * len(rewards_G)
    assert needs_replacement(DAPO, rewards_G, lengths_G, 20) == is_replaced
    assert not needs_replacement(GRPO, rewards_G, lengths_G, 20)


def test_what_has_a_gradient_without_advantage_is_never_skipped() -> None:
    """N5: beside a KL penalty a group without difference has a gradient too."""
    rewards_P_G, lengths_P_G, cut_P_G = [[1, 1], [1, 0]], [[2, 2], [2, 2]], [[False] * 2] * 2
    beside_kl = replace(GRPO, kl=KlPenalty(beta=0.04))
    for algorithm, forwarded in ((GRPO, 2), (beside_kl, 4), (ALGORITHMS["dppo"], 4)):
        assert assign_credit(algorithm, rewards_P_G, lengths_P_G, cut_P_G, 20).num_forwarded == forwarded


def credit_of(advantage: str, rewards_P_G: list[list[Any]], lengths_P_G: list[list[int]]) -> Credit:
    algorithm = build_algorithm(AlgorithmSpec.model_validate({"advantage": advantage}))
    cut_P_G = [[False] * len(rewards_G) for rewards_G in rewards_P_G]
    return assign_credit(algorithm, rewards_P_G, lengths_P_G, cut_P_G, 9)


def test_whitening_weighs_by_tokens_and_moves_a_group_without_difference() -> None:
    """A5: centered [0.5, -0.5] and [0, 0], over 1, 3, 2 and 2 tokens: mean -0.125, spread 0.330719."""
    credit = credit_of("rpp_baseline", [[1, 0], [1, 1]], [[1, 3], [2, 2]])
    found = np.concatenate(credit.advantage_P_G)
    assert found == pytest.approx([1.889822, -1.133893, 0.377964, 0.377964], abs=1e-6)
    assert credit.num_forwarded == 4
    assert credit.num_zero_variance_groups == 1


def test_rewards_are_whitened_without_any_group() -> None:
    # [1, 1, 0, 0] over tokens: mean and spread 0.5. A rollout without score takes no part.
    credit = credit_of("rpp", [[1], [0], [None], [0]], [[2], [1], [5], [1]])
    assert listed(credit.advantage_P_G) == [[1.0], [-1.0], [0.0], [-1.0]]
    assert (credit.num_dropped_groups, credit.num_forwarded, credit.num_counted_tokens) == (1, 3, 4)
    # Nobody is better than anybody: the literal 0, although it is forwarded.
    equal = credit_of("rpp", [[0.9], [0.9], [0.9]], [[1], [2], [4]])
    assert listed(equal.advantage_P_G) == [[0.0], [0.0], [0.0]]


def test_the_spread_of_the_batch_leaves_zeros_where_they_are() -> None:
    # Rewards [1, 0, 0, 0, 1, 1]: spread sqrt(1.5 / 5) = 0.547723. 0.75 and -0.25 over 0.547823.
    credit = credit_of("batch_std", [[1, 0, 0, 0], [1, 1]], [[1] * 4, [1] * 2])
    assert credit.advantage_P_G[0] == pytest.approx([1.369056, -0.456352, -0.456352, -0.456352], abs=1e-6)
    assert credit.advantage_P_G[1].tolist() == [0.0, 0.0]
    assert (credit.num_forwarded, credit.num_counted_tokens) == (4, 6)


@pytest.mark.parametrize("advantage", ["rpp", "rpp_baseline", "batch_std"])
def test_rollouts_out_of_the_batch_take_no_part_in_its_statistics(advantage: str) -> None:
    kept = credit_of(advantage, [[1, 0, 0.5]], [[1, 3, 2]])
    more = credit_of(advantage, [[1, 0, 0.5, None]], [[1, 3, 2, 7]])
    assert more.advantage_P_G[0][:3].tolist() == kept.advantage_P_G[0].tolist()
    assert more.advantage_P_G[0][3] == 0.0
