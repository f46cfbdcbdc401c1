"""Base of tasks that draw their problems, in any number."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import islice

from pydantic import Field

from strop.errors import ConfigError
from strop.rollout import Example, Split
from strop.spec.task import TaskSection
from strop.tasks.task import Task, TaskLimits
from strop.tasks.version import fit_limits

_DRAWS_PER_EXAMPLE = 50


class DrawnSection(TaskSection):
    """Settings of how many problems are drawn."""

    num_train: int = Field(default=500, ge=1, le=10**7, description="Examples to train on.")
    num_held_out: int = Field(
        default=100, ge=1, le=10**7, description="Examples kept out of training for evaluation."
    )


class DrawnTask(Task):
    """A task with as many examples as are asked for."""

    def __init__(self, spec: TaskSection, limits: TaskLimits) -> None:
        self.limits = fit_limits(limits, spec)
        self.num_train, self.num_held_out = spec.num_train or 0, spec.num_held_out or 0

    @abstractmethod
    def draws(self) -> Iterator[Example]:
        """Yield problems, the same ones in every process; they may repeat each other, and never end."""

    def examples(self, split: Split) -> Sequence[Example]:
        """Return the problems of a split; held-out ones stay the same when `num_train` changes.

        Raises: ConfigError if there are too few different ones; any exception of `draws`.
        """
        is_held_out = split is Split.HELD_OUT
        return self._examples[: self.num_held_out] if is_held_out else self._examples[self.num_held_out :]

    @cached_property
    def _examples(self) -> tuple[Example, ...]:
        """Different examples, held-out ones first; no other one poses a problem of theirs."""
        num_wanted = self.num_held_out + self.num_train
        found: dict[str, Example] = {}
        held_out: set[str | None] = set()
        for example in islice(self.draws(), _DRAWS_PER_EXAMPLE * num_wanted):
            if len(found) < self.num_held_out:
                held_out.add(self.problem_of(example))
            elif self.problem_of(example) in held_out:
                continue
            found.setdefault(example.example_id, example)
            if len(found) == num_wanted:
                return tuple(found.values())
        raise ConfigError(
            f"task.num_train={self.num_train} and task.num_held_out={self.num_held_out} ask for"
            f" {num_wanted} different problems",
            allowed=f"about {len(found)} in all with these settings",
            next_step="lower task.num_train, or let the task's own settings allow more",
        )
