"""A step is cut into one share per rank, none of them missing, none of them twice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from strop.errors import LearnerError
from strop.policy.learner import Learner
from strop.policy.shares import require_disjoint, restore_order, split_shares
from strop.spec.optimizer import OptimizerSpec
from tests.policy.worlds import World, load_model, make_model, reinforce


def test_shares_are_balanced_and_may_be_empty() -> None:
    groups = [World(seed).packed(2, [length]) for seed, length in enumerate((9, 5, 4, 4))]
    # Positions 10, 6, 5, 5: 10 and 5 against 6 and 5, or 10 against 6, 5 and 5.
    shares = [sum(group.num_positions for group in share) for share in split_shares(groups, 2)]
    assert sum(shares) == 26
    assert max(shares) <= 16
    # One group of three replies, 2 + 3 * 3 = 11 positions, is cut between replies.
    whole = World(9).packed(2, [4, 4, 4])
    pieces = split_shares([whole], 2)
    assert sorted(sum(len(group.replies) for group in share) for share in pieces) == [1, 2]
    # A pair of replies, whose loss needs both, stays together.
    assert sorted(map(len, split_shares([whole], 2, keeps_groups=True))) == [0, 1]
    assert split_shares([], 2) == [[], []]
    assert sorted(len(share) for share in split_shares(groups[:1], 3)) == [0, 0, 1]


def test_what_ranks_find_comes_back_in_order() -> None:
    groups = [World(seed).packed(2, [3, 1 + seed, 2]) for seed in range(5)]
    shares = split_shares(groups, 3)
    found = [[reply.token_ids.tolist() for group in share for reply in group.replies] for share in shares]
    expected = [reply.token_ids.tolist() for group in groups for reply in group.replies]
    assert restore_order(groups, shares, found) == expected


class FirstOfTwo:
    """The first of two ranks, of which the other one says what a test makes of the first one's words."""

    index = 0
    num_ranks = 2

    def __init__(self, answer: Callable[[Any], Any]) -> None:
        self._answer = answer

    def gather(self, value: Any) -> list[Any]:
        return [value, self._answer(value)]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda own: own, r"step 4 was given the same samples on ranks 0 and 1"),
        (lambda own: (5, own[1], "other"), r"rank 0 step 4 of \['rl'\]; rank 1 step 5 of \['rl'\]"),
        (lambda own: (4, ["rl", "sft"], "other"), r"rank 1 step 4 of \['rl', 'sft'\]"),
    ],
)
def test_ranks_that_do_not_share_one_step_are_refused(answer: Callable[[Any], Any], message: str) -> None:
    shares = [[World(1).packed(2, [3])]]
    with pytest.raises(LearnerError, match=message):
        require_disjoint(FirstOfTwo(answer), ["rl"], shares, step=4)
    require_disjoint(FirstOfTwo(lambda own: (*own[:2], "other")), ["rl"], shares, step=4)
    # Where there is less than one group each, several have none.
    require_disjoint(FirstOfTwo(lambda own: own), ["rl"], [[]], step=4)


def test_a_step_is_taken_on_shares_that_have_nothing_in_common_alone(tmp_path: Path) -> None:
    """Two ranks that are given the whole batch would train on all of it twice."""
    model = load_model(make_model(tmp_path), "float32")
    learner = Learner(model, OptimizerSpec(lr=1e-3), ranks=FirstOfTwo(lambda own: own))
    with pytest.raises(LearnerError, match="the same samples on ranks 0 and 1"):
        learner.step([World(1).packed(2, [3])], temperature=1.0, token_terms=reinforce)
    assert learner.version == 0
