"""A task around another: what it does not change is the inner one's, traits beside the contract too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from strop.rollout import Example, Message, Outcome, Split
from strop.tasks.contract import Task, TaskLimits
from strop.tasks.traits import (
    ProgramForm,
    choices_of,
    counts_of,
    judge_digests_of,
    limits_of,
    part_of,
    problem_of,
    program_form_of,
    prompt_fields_of,
    variant_of,
    verify_quick,
)


class TaskWrapper:
    """Passes on everything but an order of its own, which only some tasks have."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self.name = task.name
        self.limits: TaskLimits = task.limits

    @property
    def version(self) -> str:
        """The task's own."""
        return self._task.version

    @property
    def variant(self) -> str | None:
        """The task's own."""
        return variant_of(self._task)

    @property
    def counts(self) -> Mapping[str, int]:
        """Those of the task; reads its data."""
        return counts_of(self._task)

    @property
    def judge_digests(self) -> Sequence[str]:
        """Those of the task."""
        return judge_digests_of(self._task)

    def examples(self, split: Split) -> Sequence[Example]:
        """Return the task's examples. Raises: DataError as the task does."""
        return self._task.examples(split)

    def limits_of(self, example: Example) -> TaskLimits:
        """Return the limits that the task gives the example."""
        return limits_of(self._task, example)

    def part_of(self, example: Example) -> str | None:
        """Return the part that the task counts the example to."""
        return part_of(self._task, example)

    def problem_of(self, example: Example) -> str | None:
        """Return the problem that the task counts the example to."""
        return problem_of(self._task, example)

    def prompt_fields(self, example: Example) -> Mapping[str, Any]:
        """Return what the task's prompts may name of the example."""
        return prompt_fields_of(self._task, example)

    def render(self, example: Example) -> tuple[Message, ...]:
        """Pose the example as the task does."""
        return self._task.render(example)

    def verify(self, example: Example, text: str) -> Outcome:
        """Judge as the task does."""
        return self._task.verify(example, text)

    def verify_quick(self, example: Example, text: str) -> Outcome | None:
        """Judge as the task does, where it is quick."""
        return verify_quick(self._task, example, text)

    def program_form(self, example: Example) -> ProgramForm | None:
        """Return how the task uses the program of a reply."""
        return program_form_of(self._task, example)

    def choices(self, example: Example) -> tuple[str, ...]:
        """Return the replies to choose from, where the task has them."""
        return choices_of(self._task, example)

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        """Return what the task calls right."""
        return self._task.gold_replies(example)
