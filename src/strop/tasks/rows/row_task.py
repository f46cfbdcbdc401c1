"""What tasks share whose problems are the rows of a published data set."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from strop.errors import DataError, explain_refusal
from strop.rollout import Example, Message, Outcome, Split
from strop.spec.task import RowTaskSpec
from strop.spec.task_base import FewShot
from strop.tasks.contract import TaskLimits
from strop.tasks.prompt import join_shots, pose
from strop.tasks.rows.reading import RowReading, SplitExamples, read_examples
from strop.tasks.version import fit_limits, hash_version


class RowTask(ABC):
    """A task whose examples are the rows of a data set; what is left is to ask and to judge."""

    def __init__(
        self,
        spec: RowTaskSpec,
        reading: RowReading,
        limits: TaskLimits,
        *,
        source: str,
        prompt: str,
        base_prompt: str = "",
        verifier: str,
    ) -> None:
        """Build the task; no data is read yet.

        The two prompts are templates, of the chat and of plain text. A task that renders by itself gives
        in them all that it writes: they are part of the version.
        """
        self.name: str = spec.name
        self.limits = fit_limits(limits, spec)
        self._spec = spec
        self._reading = reading
        self._source = source
        self._prompt = prompt
        self._base_prompt = base_prompt
        self._verifier = verifier
        self._num_few_shot = spec.num_few_shot if isinstance(spec, FewShot) else 0

    @cached_property
    def version(self) -> str:
        """Hash over settings, prompt, verifier, limits and the ids of all examples; reads the data."""
        return hash_version(
            self.name,
            self._prompt + self._base_prompt,
            self._verifier,
            self.limits,
            self._spec,
            self._splits.digest,
        )

    @property
    def left_out(self) -> Mapping[str, int]:
        """How many rows of the data are no examples, by reason; reads the data."""
        return self._splits.left_out

    @property
    def counts(self) -> Mapping[str, int]:
        """How many rows are left out, by reason; reads the data."""
        return {f"rows left out, {reason}": count for reason, count in self.left_out.items()}

    def examples(self, split: Split) -> Sequence[Example]:
        """Return the problems of a split, in the order of the data.

        Raises: DataError if the data is missing, empty or malformed, a question is in both splits, or
            the task is for evaluation only and training examples are asked for.
        """
        if split is Split.TRAIN and not self._reading.layout.train:
            raise DataError(
                explain_refusal(
                    f"training examples of task {self.name}",
                    allowed="held-out examples: the data set is for evaluation only",
                    next_step="train on another task, and name this one in an evaluation",
                )
            )
        return self._splits.of(split)

    def render(self, example: Example) -> tuple[Message, ...]:
        """Give the problem and say how the answer is to be written."""
        asked = self.prompt_fields(example)
        return pose(
            self._prompt.format(**asked),
            base=self._shots + self._base_prompt.format(**asked),
            thinking=self._spec.thinking,
        )

    @abstractmethod
    def verify(self, example: Example, text: str) -> Outcome:
        """Judge a reply; see the task."""

    @abstractmethod
    def gold_replies(self, example: Example) -> tuple[str, ...]:
        """Return replies that deserve full marks, the asked-for form first."""

    def prompt_fields(self, example: Example) -> Mapping[str, Any]:
        """Return what the two prompts, or one of the run's own, may name of an example."""
        return example.fields

    def _shot_target(self, shot: Example) -> str:
        """Return what stands behind the prompt of a solved example."""
        return f" {shot.fields['solution']}"

    @cached_property
    def _shots(self) -> str:
        """What stands before a problem in plain text; of the data, so it is in the version by its ids."""
        if not self._num_few_shot:
            return ""
        return join_shots(
            [
                (self._base_prompt.format(**self.prompt_fields(shot)), self._shot_target(shot))
                for shot in self._splits.shots
            ]
        )

    @cached_property
    def _splits(self) -> SplitExamples:
        return self._read_splits()

    def _read_splits(self) -> SplitExamples:
        """Read the data. Raises: DataError like `examples`."""
        spec = self._spec
        return read_examples(
            self._reading, self._source, num_train=spec.num_train, num_held_out=spec.num_held_out
        )


def gold_of(example: Example) -> str:
    """Return what replies to an example are compared with.

    Raises: DataError if it has no answer: nothing can be said of a reply then, not even that it is wrong.
    """
    if example.answer is None:
        raise DataError(
            explain_refusal(
                f"example {example.example_id} of task {example.task}, which has no answer",
                allowed="the task's own examples, each with its answer",
                next_step="take the example from the task",
            )
        )
    return example.answer
