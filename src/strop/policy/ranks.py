"""The ranks that share a learner's work, as far as one step must know about them.

Everything that is not a gradient or a weight crosses ranks as a plain value, and every rank computes
the same result from the same list of them; so all ranks report, refuse and go on alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from strop.errors import StropError

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


class Ranks(Protocol):
    """The ranks of a learner, this one among them."""

    index: int
    num_ranks: int

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, in order of rank. Every rank must call it."""
        ...


class SingleRank:
    """One process that holds the whole learner."""

    index = 0
    num_ranks = 1

    def gather(self, value: T) -> list[T]:
        """Return the one value."""
        return [value]


def count_missing(ranks: Ranks, num_forwards: int) -> int:
    """Return how many empty forwards this rank must add to its own. Every rank must call it.

    Every forward and backward is a collective of all ranks: all run as many as the busiest.
    """
    return max(ranks.gather(num_forwards)) - num_forwards


def run_alike(ranks: Ranks, work: Callable[[], T]) -> list[T]:
    """Run a function on every rank, and return all results.

    Raises: on every rank, the error of the first rank that failed.
    """
    given: T | StropError
    try:
        given = work()
    except StropError as error:
        given = error
    made: list[T] = []
    for value in ranks.gather(given):
        if isinstance(value, StropError):
            raise value
        made.append(value)
    return made


def run_on_first(ranks: Ranks, work: Callable[[], T]) -> T:
    """Run a function on the first rank while the others wait, and return its result on all of them.

    Raises: on every rank, what the function raised.
    """
    made = run_alike(ranks, lambda: [work()] if ranks.index == 0 else [])
    return made[0][0]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TensorShard:
    """A rank's rows of a tensor."""

    name: str
    part: Tensor
    """A run of rows of it, in the type to be written; none of them on a rank that has no share."""
    first: int
    """Index of the first one."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
