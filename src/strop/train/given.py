"""What a run learns from that is given and not sampled: demonstrations, or pairs of replies.

How much of it a step takes and how long it is, for whoever plans memory and time. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from strop.policy.footprint import DEFAULT_MICRO_BATCH_POSITIONS
from strop.spec.run import RunSpec
from strop.tasks import Task
from strop.train.pairs import read_pairs
from strop.train.sft_source import read_demonstrations


class Given(Protocol):
    """What is given, read from its source."""

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens of each row, its prompt included."""
        ...

    @property
    def num_scored(self) -> int:
        """Tokens of all rows that the loss counts."""
        ...

    def describe(self) -> str:
        """Return how many rows there are, and what became of the others."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenSource:
    """What a run file says is given."""

    kind: str
    """'demonstrations' or 'pairs'."""
    setting: str
    """Which names the source."""
    source: str | None
    per_step: int
    """Rows that a step takes."""


def find_given(spec: RunSpec) -> GivenSource | None:
    """Return what a run is given, None where it is nothing."""
    if spec.train.terms == "dpo":
        return GivenSource(
            kind="pairs", setting="dpo.source", source=spec.dpo.source, per_step=spec.dpo.pairs_per_step
        )
    if spec.has_demonstrations:
        return GivenSource(
            kind="demonstrations",
            setting="sft.source",
            source=spec.sft.source,
            per_step=spec.sft.rows_per_step,
        )
    return None


def read_given(spec: RunSpec, task: Task, model_dir: Path) -> Given | None:
    """Read what is given; None where nothing is. Raises: as `read_pairs` and `read_demonstrations`."""
    return read_pairs(spec, task, model_dir) or read_demonstrations(spec, task, model_dir)


def count_given_positions(spec: RunSpec, found: Given | None) -> int:
    """Return the positions of the largest micro-batch of what is given; 0 where nothing is.

    A full one where it is not known: `found` is None, and the run is given something.
    """
    wanted = find_given(spec)
    if wanted is None:
        return 0
    budget = spec.train.micro_batch_tokens or DEFAULT_MICRO_BATCH_POSITIONS
    if found is None:
        return budget
    longest = max(found.lengths)
    # One that alone exceeds the budget is a micro-batch of its own.
    return max(longest, min(budget, wanted.per_step * longest))
