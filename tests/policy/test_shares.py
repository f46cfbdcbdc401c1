"""A step is cut into one share per rank, none of them missing, none of them twice."""

from __future__ import annotations

from strop.policy.shares import restore_order, split_shares
from tests.policy.worlds import World


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
