"""What a run learns from that is given and not sampled: demonstrations, or pairs of replies.

How much of it a step takes and how long it is, for whoever plans memory and time. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
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


def given_source(spec: RunSpec) -> tuple[str, str | None]:
    """Return the setting that says what is given, and its value; ("", None) where nothing is."""
    if spec.train.terms == "dpo":
        return "dpo.source", spec.dpo.source
    return ("sft.source", spec.sft.source) if spec.has_demonstrations else ("", None)


def given_per_step(spec: RunSpec) -> int:
    """Return how many rows a step takes."""
    if spec.train.terms == "dpo":
        return spec.dpo.pairs_per_step
    return spec.sft.rows_per_step if spec.has_demonstrations else 0


def read_given(spec: RunSpec, task: Task, model_dir: Path) -> Given | None:
    """Read what is given; None where nothing is. Raises: as `read_pairs` and `read_demonstrations`."""
    return read_pairs(spec, task, model_dir) or read_demonstrations(spec, task, model_dir)


def count_given_positions(spec: RunSpec, found: Given | None) -> int:
    """Return the positions of the largest micro-batch of what is given; 0 where nothing is."""
    if found is None:
        return 0
    longest = max(found.lengths)
    budget = spec.train.micro_batch_tokens or DEFAULT_MICRO_BATCH_POSITIONS
    # One that alone exceeds the budget is a micro-batch of its own.
    return max(longest, min(budget, given_per_step(spec) * longest))
