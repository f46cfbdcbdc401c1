"""What is said of groups that were sampled on the way to a batch and not trained on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from strop.rollout import Group, Split
from strop.train.collecting import measure_discarded, plan_attempts
from strop.train.generation import Batch, Fate
from tests.fixtures.tiny_run import SpellTask, tiny_spec
from tests.train.test_generation import group_of


def group_of_length(number: int, num_tokens: int) -> Group:
    """Return a group of two replies of so many tokens."""
    group = group_of(number, 0)
    (turn,) = group.rollouts[0].turns
    ids, logprobs = np.full(num_tokens, 7, np.int32), np.full(num_tokens, -0.5, np.float32)
    longer = replace(turn, token_ids=ids, logprobs=logprobs)
    return replace(group, rollouts=tuple(replace(r, turns=(longer,)) for r in group.rollouts))


def batch_of(groups: list[Group], discarded: list[tuple[Fate, Group]]) -> Batch:
    return Batch(groups=groups, numbers=list(range(len(groups))), discarded=discarded, is_short=False)


def test_used_lengths_are_compared_with_those_of_all_that_were_dispatched() -> None:
    groups = [group_of_length(0, 10), group_of_length(1, 20)]
    discarded = [(Fate.EVICTED, group_of_length(2, 60)), (Fate.FILTERED, group_of_length(3, 30))]
    metrics = measure_discarded(batch_of(groups, discarded))
    assert (metrics["num_evicted_groups"], metrics["num_filtered_groups"]) == (1.0, 1.0)
    # 2 x 90 of 2 x 120 tokens; in time were 10, 20 and 30: 20 on average, 30 with the 60 that came late.
    assert metrics["wasted_token_frac"] == pytest.approx(90 / 120)
    assert metrics["used_length_ratio"] == pytest.approx(20 / 30)


def test_groups_that_were_replaced_for_their_rewards_are_no_selection_by_time() -> None:
    metrics = measure_discarded(batch_of([group_of_length(0, 10)], [(Fate.FILTERED, group_of_length(1, 90))]))
    assert metrics["wasted_token_frac"] == pytest.approx(0.9)
    assert "used_length_ratio" not in metrics


def test_a_batch_without_discarded_groups_says_nothing() -> None:
    assert measure_discarded(batch_of([group_of_length(0, 10)], [])) == {}


def test_what_is_sampled_follows_from_the_runs_seed_the_step_and_the_place_in_the_group() -> None:
    task = SpellTask(max_reply_tokens=9)
    (example, *_) = task.examples(Split.TRAIN)
    plans = plan_attempts(tiny_spec(seed=6), task, example, step=3, num_attempts=2, max_positions=40)
    assert [(plan.run_seed, plan.step, plan.sample_index) for plan in plans] == [(6, 3, 0), (6, 3, 1)]
    assert {(plan.example.example_id, plan.max_reply_tokens, plan.max_positions) for plan in plans} == {
        (example.example_id, 9, 40)
    }
