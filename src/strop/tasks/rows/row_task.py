"""Base of tasks whose problems are rows of a data set: reading, splits, prompt and version."""

from __future__ import annotations

import hashlib
import json
import tomllib
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator
from typing_extensions import override

from strop.errors import DataError
from strop.rollout import Example, Message, Split
from strop.spec.base import Unhashed
from strop.spec.task import SOURCE_HELP, TrainingRows
from strop.spec.template import fill, list_names
from strop.tasks.answers import show_answer
from strop.tasks.overlap import normal_text
from strop.tasks.prompt import pose_example
from strop.tasks.rows.layout import DataSet, Row, bad_row, find_files, read_rows
from strop.tasks.task import Task, TaskLimits, fit_limits, hash_version

_HELD_OUT_SHARE = 10
"""One question in this many of data without splits is held out, if no number is set."""
_PRESETS = Path(__file__).parents[1] / "presets"


@cache
def read_preset(name: str) -> DataSet:
    """Return what the file of a published data set says."""
    return DataSet.model_validate(tomllib.loads((_PRESETS / f"{name}.toml").read_text("utf-8")))


class PublishedRows(TrainingRows):
    """Base of tasks with a published data set, which a file of `presets` describes."""

    source: Unhashed[str] = Field(
        default="", description=f"{SOURCE_HELP.format('openai/gsm8k')} Empty = the data set's own place."
    )

    @model_validator(mode="before")
    @classmethod
    def _name_source(cls, values: Any) -> Any:
        """Name the data set's own place: whoever lists or stages what a run reads finds it there."""
        is_open = isinstance(values, dict) and not values.get("source")
        if is_open and (_PRESETS / f"{values.get('name')}.toml").is_file():
            return {**values, "source": read_preset(values["name"]).source}
        return values

    def read_data_set(self) -> DataSet:
        """Return what the file of this data set says."""
        return read_preset(self.name)


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitExamples:
    """All examples of a task, in the order of the data."""

    train: tuple[Example, ...]
    held_out: tuple[Example, ...]
    left_out: Mapping[str, int] = field(default_factory=dict)
    """How many rows became no example, by reason. Repeated questions are not counted."""
    row_keys: Mapping[str, str] = field(default_factory=dict)
    """The example of each training row, by its number in the data."""

    def of(self, split: Split) -> tuple[Example, ...]:
        """Return the examples of one split."""
        return self.train if split is Split.TRAIN else self.held_out

    @property
    def digest(self) -> str:
        """Hash over all ids, which are hashes of content; for the task's version."""
        ids = [example.example_id for example in (*self.train, *self.held_out)]
        return hashlib.sha256("".join(ids).encode()).hexdigest()


def read_examples(
    spec: Any,
    data: DataSet,
    to_example: Callable[[Row], Example | str],
    question_of: Callable[[Example], str],
) -> SplitExamples:
    """Read the examples of both splits, each question once, as many as the settings say.

    `to_example`: the example of a row, or why the row is left out, which is counted; raises DataError naming
    the row, if it is malformed. `question_of`: examples with the same question, except for white space, are
    one example; two rows of the user's own that ask the same must have the same answer.
    Data without splits is split by the content of its questions, independent of their order. A training
    question that is also held out, compared by `normal_text`, is left out and counted.
    Raises: DataError if a file is missing, empty or malformed, or a split has no example.
    """
    files = find_files(spec.source, data)
    found: dict[Split, dict[str, tuple[Example, str]]] = {split: {} for split in Split}
    rows = {split: [row for one in paths for row in read_rows(one, split)] for split, paths in files.items()}
    left_out: Counter[str] = Counter()
    asked: dict[str, str] = {}
    for split in Split:
        for number, row in enumerate(rows[split]):
            example = to_example(row)
            if isinstance(example, str):
                left_out[example] += 1
                continue
            question = " ".join(question_of(example).split())
            first, place = found[split].setdefault(question, (example, row.place))
            if data.source is None and first.answer != example.answer:
                raise bad_row(
                    f"{row.place} asks what {place} asks, with another answer: {example.answer!r:.60}",
                    allowed=f"the answer of that row, {first.answer!r:.60}",
                )
            if split is Split.TRAIN:
                asked[str(number)] = question
    train, held_out = ({text: one for text, (one, _) in each.items()} for each in found.values())
    if not files[Split.HELD_OUT]:
        train, held_out = _split_by_content(train, spec.num_held_out)
    texts = set(map(normal_text, held_out))
    kept = {text: one for text, one in train.items() if normal_text(text) not in texts}
    if len(kept) < len(train):
        left_out["held out too"] = len(train) - len(kept)
    train, held_out = dict([*kept.items()][: spec.num_train]), dict([*held_out.items()][: spec.num_held_out])
    if not held_out or (Split.TRAIN in data.splits and not train):
        left = ", ".join(f"{number} {why}" for why, number in left_out.items())
        raise DataError(
            f"task.source={spec.source} has {sum(map(len, rows.values()))} rows, {len(train)} training and"
            f" {len(held_out)} held-out examples; rows left out: {left or 'none'}",
            allowed="at least one example in each split, of different questions",
            next_step="fetch an empty file again, add rows or answers, or lower task.num_held_out",
        )
    return SplitExamples(
        train=tuple(train.values()),
        held_out=tuple(held_out.values()),
        left_out=dict(left_out),
        row_keys={number: train[text].example_id for number, text in asked.items() if text in train},
    )


def _split_by_content(
    examples: Mapping[str, Example], num_held_out: int | None
) -> tuple[dict[str, Example], dict[str, Example]]:
    """Hold out the questions with the smallest hashes; both parts keep the order of the file."""
    digests = {text: hashlib.sha256(normal_text(text).encode()).hexdigest() for text in examples}
    ordered = sorted(set(digests.values()))
    number = max(1, len(ordered) // _HELD_OUT_SHARE) if num_held_out is None else num_held_out
    chosen = set(ordered[:number])
    train, held_out = (
        {text: one for text, one in examples.items() if (digests[text] in chosen) is is_held_out}
        for is_held_out in (False, True)
    )
    return train, held_out


class RowTask(Task):
    """A task whose examples are the rows of a data set; subclasses read a row, and judge."""

    def __init__(self, spec: Any, verifier: str, **limits: Any) -> None:
        """Build the task; no data is read yet.

        The prompts of the data set, and `verifier`, are part of the version. `limits`: those of `TaskLimits`
        that the data set does not say.
        """
        data = spec.read_data_set()
        self.name: str = spec.name
        own = {"stop_strings": data.stop, "base_stop_strings": data.base_stop, **limits}
        self.limits = fit_limits(TaskLimits(max_reply_tokens=data.max_reply_tokens, **own), spec)
        self._spec = spec
        self._data = data
        self._verifier = verifier
        self._places = list_names(data.prompt)

    @abstractmethod
    def to_example(self, row: Row) -> Example | str:
        """Return the example of a row, or why the row is left out. Raises: DataError naming the row."""

    @cached_property
    def version(self) -> str:
        """Hash over settings, prompt, verifier, limits and the ids of all examples; reads the data."""
        wording = self._data.prompt + (self._data.base_prompt or "")
        data = self._splits.digest
        return hash_version(self.name, wording, self._verifier, self.limits, self._spec, data)

    @property
    @override
    def counts(self) -> Mapping[str, int]:
        return {f"rows left out, {reason}": count for reason, count in self._splits.left_out.items()}

    @override
    def row_keys(self) -> Mapping[str, str | None]:
        return self._splits.row_keys

    @override
    def examples(self, split: Split) -> Sequence[Example]:
        if split not in self._data.splits:
            raise DataError(
                f"training examples of task {self.name}",
                allowed="held-out examples: the data set is for evaluation only",
                next_step="train on another task, and name this one in an evaluation",
            )
        return self._splits.of(split)

    def ask(self, example: Example) -> Any:
        """Return the prompt: a text, or the messages of a chat."""
        if self._places:
            return fill(self._data.prompt, {one: show_answer(example.fields[one]) for one in self._places})
        match asked := example.fields[self._data.prompt]:
            case [*before, {"role": "assistant"}]:
                # Rows of demonstrations hold the reply too.
                return before
        return asked

    def question(self, example: Example) -> str:
        """Return the columns that are asked: a reply may repeat them, and other ones are another example."""
        if self._places:
            return "\n".join(show_answer(example.fields.get(name)) for name in self._places)
        asked = self.ask(example)
        return asked if isinstance(asked, str) else "\n".join(one["content"] for one in asked)

    @override
    def render(self, example: Example) -> tuple[Message, ...]:
        asked, base = self.ask(example), self._data.base_prompt
        if not isinstance(asked, str):
            asked = [Message(role=one["role"], content=one["content"]) for one in asked]
        base = None if base is None else fill(base, example.fields)
        return pose_example(self._spec, example, asked, base=base)

    @cached_property
    def _splits(self) -> SplitExamples:
        splits = read_examples(self._spec, self._data, self.to_example, self.question)
        if self._spec.prompting:
            for example in (*splits.train, *splits.held_out):
                self.render(example)  # Refused before the run begins, and not in its midst.
        return splits


def gold_of(example: Example) -> str:
    """Return an example's answer. Raises: DataError if it has none."""
    if example.answer is None:
        raise DataError(f"example {example.example_id} of task {example.task}, which has no answer")
    return example.answer


def text_of(row: Row, column: str, default: str | None = None) -> str:
    """Return the text of a column; `default` if it has none. Without a default it must not be empty.

    Raises: DataError naming the row, if it is empty or no text.
    """
    value = row.values.get(column)
    value = default if value is None else value
    if not isinstance(value, str) or not (value.strip() or default is not None):
        fault = f"{row.place} has {column}={value!r:.60}; its columns are {', '.join(row.values)}"
        raise bad_row(fault, "a text that is not empty" if default is None else "a text, or nothing")
    return value


SPEAKER = "assistant"
_DEMONSTRATION = (
    "prompt, or messages with role and content, the first not the assistant's; the reply as completion, or as"
    " the last message; something between two replies; perhaps a problem, and a weight above 0"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SftRow:
    """A row that holds a demonstration; data sets have further columns."""

    turns: tuple[Message, ...]
    """All messages. The last one is a reply."""
    problem: str
    """The problem behind the prompt, which is never one that the run evaluates on; may be empty."""
    weight: float
    """Weight of each of its tokens in the loss."""
    place: str

    @classmethod
    def read(cls, row: Row) -> SftRow:
        """Check one row. Raises: DataError naming the row and the fault."""
        prompt, completion, problem = (text_of(row, one, "") for one in ("prompt", "completion", "problem"))
        weight, told = (row.values.get(key) for key in ("weight", "messages"))
        weight = 1.0 if weight is None else weight
        try:
            # Parquet has all keys in every message, and fills those that are missing with nothing.
            said = [{key: one for key, one in message.items() if one is not None} for message in told or ()]
            turns = [Message.from_json(one) for one in said]
            turns = [Message(role="user", content=prompt)] * bool(prompt) + turns
            turns += [Message(role=SPEAKER, content=completion)] * bool(completion)
            roles = [one.role for one in turns]
            plain = [Message(role=one.role, content=one.text) for one in turns if one.text.strip()]
            is_talk = roles[-1:] == [SPEAKER] != roles[:1] and (SPEAKER, SPEAKER) not in pairwise(roles)
            is_weight = type(weight) in (int, float) and 0.0 < weight < 1e300
            if bool(prompt) is bool(told) or plain != turns or not is_talk or not is_weight:
                raise ValueError(f"{prompt=!r:.40}, messages={turns!r:.200}, {roles=}, {weight=!r:.20}")
        except (DataError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise bad_row(f"{row.place} is no demonstration: {error}", _DEMONSTRATION) from error
        return cls(turns=tuple(turns), problem=problem, weight=float(weight), place=row.place)

    @property
    def prompt_id(self) -> str:
        """Hash of the prompt."""
        asked = [(one.role, one.text) for one in self.turns[:-1]]
        return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]
