"""Cutting a step's groups into one share per rank, and seeing that no two ranks got the same."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from strop.errors import LearnerError, explain_refusal
from strop.policy.balancing import PositionCost, partition, plan_batch
from strop.policy.footprint import DEFAULT_MICRO_BATCH_POSITIONS
from strop.policy.packing import PackedGroup
from strop.policy.ranks import Ranks

T = TypeVar("T")


def split_shares(
    groups: Sequence[PackedGroup],
    num_ranks: int,
    *,
    max_positions: int = DEFAULT_MICRO_BATCH_POSITIONS,
    cost: PositionCost | None = None,
    keeps_groups: bool = False,
) -> list[list[PackedGroup]]:
    """Cut groups into one share per rank, of about as much work each; a share may be empty.

    A large group is split between replies, unless `keeps_groups`, as the terms do whose scope is a group.
    Weights of tokens are left as they are: they were fixed for the whole batch.
    """
    if keeps_groups:
        sizes = np.array([group.num_positions for group in groups], dtype=np.float64)
        bins = partition(sizes, num_ranks).tolist() if groups else []
        return [
            [group for group, chosen in zip(groups, bins, strict=True) if chosen == rank]
            for rank in range(num_ranks)
        ]
    plan = plan_batch(groups, num_ranks=num_ranks, max_positions=max_positions, cost=cost)
    return [[group for micro_batch in rank for group in micro_batch] for rank in plan.groups_W_K]


def restore_order(
    groups: Sequence[PackedGroup],
    shares: Sequence[Sequence[PackedGroup]],
    found: Sequence[Sequence[T]],
) -> list[T]:
    """Return what each rank found for the replies of its share in the order of the groups' replies.

    `shares` are those that `split_shares` made of the same groups.
    """
    by_reply: dict[int, T] = {}
    for share, values in zip(shares, found, strict=True):
        replies = [reply for group in share for reply in group.replies]
        by_reply |= {id(reply): value for reply, value in zip(replies, values, strict=True)}
    return [by_reply[id(reply)] for group in groups for reply in group.replies]


def require_disjoint(
    ranks: Ranks, names: Sequence[str], shares: Sequence[Sequence[PackedGroup]], *, step: int
) -> None:
    """See that all ranks take the same step, each on its own share. Every rank must call it.

    `names` and `shares` are those of the step's terms. Compared are whole shares: a single rollout may
    well have been sampled twice.

    Raises: LearnerError, on every rank.
    """
    if ranks.num_ranks == 1:
        return
    own = _digest([group for share in shares for group in share])
    given = ranks.gather((step, list(names), own))
    plans = [(at, terms) for at, terms, _ in given]
    if any(plan != plans[0] for plan in plans):
        listed = "; ".join(f"rank {rank} step {at} of {terms}" for rank, (at, terms) in enumerate(plans))
        raise _refuse(f"ranks take different steps: {listed}", "the same step and terms on every rank")
    owner: dict[str, int] = {}
    for rank, (_, _, digest) in enumerate(given):
        if digest is not None and digest in owner:
            raise _refuse(
                f"step {step} was given the same samples on ranks {owner[digest]} and {rank}",
                "shares that have no sample in common, as `split_shares` makes them",
            )
        if digest is not None:
            owner[digest] = rank


def _digest(groups: Sequence[PackedGroup]) -> str | None:
    """Hash what a share holds, None if it is empty."""
    if not groups:
        return None
    digest = hashlib.sha256()
    for group in groups:
        digest.update(group.prompt_ids.tobytes())
        for reply in group.replies:
            digest.update(reply.token_ids.tobytes())
            digest.update(reply.engine_logprobs.tobytes())
    return digest.hexdigest()


def _refuse(given: str, allowed: str) -> LearnerError:
    return LearnerError(
        explain_refusal(
            given,
            allowed=allowed,
            next_step="nothing was trained; report it, a driver that does this trains on wrong data",
        )
    )
