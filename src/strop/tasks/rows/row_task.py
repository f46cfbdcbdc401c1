"""Base of tasks whose problems are rows of a data set: reading, splits, prompt and version."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from strop.errors import DataError
from strop.rollout import Example, Message, Split
from strop.spec.task import TaskSpec
from strop.tasks.overlap import normal_text
from strop.tasks.prompt import pose
from strop.tasks.rows.layout import DataLayout, Row, bad_row, read_split_rows
from strop.tasks.task import Task, TaskLimits
from strop.tasks.version import fit_limits, hash_version


class RowTask(Task):
    """A task whose examples are the rows of a data set; subclasses judge."""

    def __init__(
        self,
        spec: TaskSpec,
        reading: RowReading,
        limits: TaskLimits,
        *,
        source: str,
        prompt: str,
        base_prompt: str = "",
        verifier: str,
    ) -> None:
        """Build the task; no data is read yet.

        The two prompts are templates, of the chat and of plain text. They are part of the version, so a
        task with its own `render` puts all of its wording into them.
        """
        self.name: str = spec.name
        self.limits = fit_limits(limits, spec)
        self._spec = spec
        self._reading = reading
        self._source = source
        self._prompt = prompt
        self._base_prompt = base_prompt
        self._verifier = verifier

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
    def counts(self) -> Mapping[str, int]:
        """How many rows are left out, by reason; reads the data."""
        return {f"rows left out, {reason}": count for reason, count in self._splits.left_out.items()}

    def row_keys(self) -> Mapping[str, str | None]:
        """Map the number of each training row, from 0, to its example id; None: the row is left out.

        A row with the question of an earlier one has that one's example. Raises: DataError like `examples`.
        """
        reading = self._reading
        ids = {_question(reading, example): example.example_id for example in self._splits.train}
        train, _ = read_split_rows(self._source, reading.layout, split_key=reading.split_key)
        return {
            str(row.index): ids.get(_question(reading, reading.to_example(row)))
            if reading.why_left_out(row, Split.TRAIN) is None
            else None
            for row in train
        }

    def examples(self, split: Split) -> Sequence[Example]:
        """Return the problems of a split, in the order of the data.

        Raises: DataError if the data is missing, empty or malformed, a question is in both splits, or
            the split is for training and the task for evaluation only.
        """
        if split is Split.TRAIN and not self._reading.layout.train:
            raise DataError(
                f"training examples of task {self.name}",
                allowed="held-out examples: the data set is for evaluation only",
                next_step="train on another task, and name this one in an evaluation",
            )
        return self._splits.of(split)

    def render(self, example: Example) -> tuple[Message, ...]:
        """Pose the problem and describe the form of the answer."""
        fields = self.prompt_fields(example)
        return pose(
            self._prompt.format(**fields),
            base=self._base_prompt.format(**fields),
            thinking=self._spec.thinking,
        )

    def prompt_fields(self, example: Example) -> Mapping[str, Any]:
        """Return the fields of an example that the prompts may use."""
        return example.fields

    @cached_property
    def _splits(self) -> SplitExamples:
        return self._read_splits()

    def _read_splits(self) -> SplitExamples:
        """Read the data. Raises: DataError like `examples`."""
        numbers = {"num_train": self._spec.num_train, "num_held_out": self._spec.num_held_out}
        return read_examples(self._reading, self._source, **numbers)


def gold_of(example: Example) -> str:
    """Return an example's answer. Raises: DataError if it has none."""
    if example.answer is None:
        raise DataError(f"example {example.example_id} of task {example.task}, which has no answer")
    return example.answer


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitExamples:
    """All examples of a task, in the order of the data."""

    train: tuple[Example, ...]
    held_out: tuple[Example, ...]
    left_out: Mapping[str, int] = field(default_factory=dict)
    """How many rows became no example, by reason. Repeated questions are not counted."""

    def of(self, split: Split) -> tuple[Example, ...]:
        """Return the examples of one split."""
        return self.train if split is Split.TRAIN else self.held_out

    @property
    def digest(self) -> str:
        """Hash over all ids, which are hashes of content; for the task's version."""
        ids = [example.example_id for example in (*self.train, *self.held_out)]
        return hashlib.sha256("".join(ids).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class RowReading:
    """How rows become examples."""

    layout: DataLayout
    to_example: Callable[[Row], Example]
    """Raises DataError naming the row, if a column is missing or malformed."""
    question: Callable[[Example], str]
    """Examples with the same question, except for white space, are one example."""
    why_left_out: Callable[[Row, Split], str | None] = lambda row, split: None
    """Reason to leave a row out of a split, which is counted; None keeps it."""
    split_key: Callable[[Row], str] | None = None
    """If the data has no splits, all rows with the same key are in the same split. None: the whole row."""
    drops_shared: bool = False
    """Whether a training question that is also held out, compared by `normal_text`, is left out and counted
    instead of refused: for published data with overlapping splits."""


def read_examples(
    reading: RowReading, source: str, *, num_train: int | None = None, num_held_out: int | None = None
) -> SplitExamples:
    """Read the examples of both splits, each question once; the numbers limit them, None: all.

    Raises: DataError if a file is missing, empty or malformed, or a question is in both splits.
    """
    train_rows, held_out_rows = read_split_rows(
        source, reading.layout, num_held_out=num_held_out, split_key=reading.split_key
    )
    left_out: Counter[str] = Counter()
    held_out = _by_question(reading, held_out_rows, Split.HELD_OUT, left_out)
    train = _by_question(reading, train_rows, Split.TRAIN, left_out)
    if reading.drops_shared:
        texts = set(map(normal_text, held_out))
        kept = {question: one for question, one in train.items() if normal_text(question) not in texts}
        left_out.update({"held out too": len(train) - len(kept)} if len(kept) < len(train) else {})
        train = kept
    train, held_out = (
        dict(list(examples.items())[:number])
        for examples, number in ((train, num_train), (held_out, num_held_out))
    )
    if shared := sorted(train.keys() & held_out.keys()):
        raise DataError(
            f"{len(shared)} of {len(held_out)} held-out questions of {source} are training questions too, for"
            f" example {shared[0]!r:.80}",
            allowed="no question in both splits: its score would measure memory",
            next_step="remove these rows from one of the two files",
        )
    return SplitExamples(
        train=tuple(train.values()), held_out=tuple(held_out.values()), left_out=dict(left_out)
    )


def require_both(splits: SplitExamples, source: str) -> SplitExamples:
    """Return the examples. Raises: DataError if a split has none, with the rows that were left out."""
    if splits.train and splits.held_out:
        return splits
    left = ", ".join(f"{number} {why}" for why, number in splits.left_out.items())
    raise DataError(
        f"task.source={source} has {len(splits.train)} training and {len(splits.held_out)} held-out"
        f" examples; rows left out: {left or 'none'}",
        allowed="at least one row in each split",
        next_step="add rows, or the answers that are missing",
    )


def _question(reading: RowReading, example: Example) -> str:
    return " ".join(reading.question(example).split())


def require_texts(row: Row, *columns: str) -> tuple[str, ...]:
    """Return the values of columns that must hold text.

    Raises: DataError naming the row, if one is absent, not a text, or empty.
    """
    values = tuple(row.values.get(column) for column in columns)
    texts = tuple(value for value in values if isinstance(value, str) and value.strip())
    if len(texts) < len(columns):
        types = {key: type(value).__name__ for key, value in row.values.items()}
        raise DataError(
            f"{row.place} has columns {types}",
            allowed=f"{' and '.join(columns)}, texts that are not empty",
            next_step="mend or remove the row, or map the columns when the file is written",
        )
    return texts


def optional_text(row: Row, column: str) -> str:
    """Return the text of a column; '' if it is missing.

    Raises: DataError naming the row, if it is no text.
    """
    value = row.values.get(column)
    if value is not None and not isinstance(value, str):
        raise wrong_type(row, column, "a text, or nothing")
    return value or ""


def wrong_type(row: Row, column: str, allowed: str) -> DataError:
    """Return the error for a row whose column has a value of another type."""
    return bad_row(
        f"{row.place} has a {column} of type {type(row.values.get(column)).__name__}", allowed=allowed
    )


def _by_question(
    reading: RowReading, rows: Sequence[Row], split: Split, left_out: Counter[str]
) -> dict[str, Example]:
    """Return the examples of rows by question, the first of each; count rows that are left out by reason."""
    found: dict[str, Example] = {}
    for row in rows:
        reason = reading.why_left_out(row, split)
        if reason is None:
            example = reading.to_example(row)
            found.setdefault(_question(reading, example), example)
        else:
            left_out[reason] += 1
    return found
