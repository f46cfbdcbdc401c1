"""The ranks of a process group."""

from __future__ import annotations

from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


class GroupRanks:
    """All ranks of the default process group, which must be initialised."""

    def __init__(self) -> None:
        self.index = dist.get_rank()
        self.num_ranks = dist.get_world_size()

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, in order of rank. Every rank must call it."""
        values: list[T | None] = [None] * self.num_ranks
        dist.all_gather_object(values, value)
        return values  # type: ignore[return-value]
