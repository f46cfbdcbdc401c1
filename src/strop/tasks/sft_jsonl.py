"""Demonstrations with gold answers posed as problems, for accuracy and for rejection sampling.

The rows are those of `sft.source`, read by the same reader, so one file serves imitation and judging. Rows
without a gold answer are left out and counted. Several replies to one prompt are one example.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Literal, Self

from pydantic import Field, model_validator

from strop.errors import DataError
from strop.rollout import Example, Message, Outcome, Split, make_example
from strop.spec.base import SpecConflict, Unhashed, expert
from strop.spec.task import TrainingRows
from strop.tasks.answers import parse_number, text_after_thinking
from strop.tasks.mathematics.answers import find_answer
from strop.tasks.mathematics.equivalence import Strictness, answers_equal
from strop.tasks.mathematics.gsm8k import find_number, read_number
from strop.tasks.mathematics.normal_form import normal_form
from strop.tasks.prompt import pose_messages
from strop.tasks.rows.demonstrations import SftRow, malformed, read_sft_row, refuse_double_names
from strop.tasks.rows.layout import DataLayout, Row
from strop.tasks.rows.row_task import RowReading, RowTask, SplitExamples
from strop.tasks.task import TaskLimits, right_or_wrong

AnswerKind = Literal["number", "formula", "text"]
_MAX_REPLY_TOKENS = 2048
_VERIFIER = "sft-jsonl-3"
_MAX_SHOWN = 5


class SftJsonlSpec(TrainingRows):
    """Prompts with demonstrations and gold answers, in the rows that `sft.source` takes."""

    name: Literal["sft-jsonl"]
    source: Unhashed[str] = Field(
        min_length=1,
        description="Source of the rows: a file of JSONL or Parquet, or a folder with train* and test* files."
        " Rows without the key gold are left out and counted.",
    )
    subset: str | None = Field(
        default=None,
        min_length=1,
        description="Use only the rows whose key `source` is this text; the others are counted."
        " none = all rows.",
        json_schema_extra=expert("a file may hold several sources"),
    )
    train_on: Literal["assistant", "last", "all"] = Field(
        default="assistant",
        description="What of a row is imitated where the row does not say, as in sft.train_on.",
        json_schema_extra=expert("chat data differ in which turns are worth imitating"),
    )
    answer: Literal["number", "formula", "text"] = Field(
        default="number",
        description="How a reply is compared with gold. 'number': the number that answers, as gsm8k finds it;"
        " 'formula': the final answer, by spelling and value, as math with strictness 'standard'; 'text': the"
        " last line that is not empty, but for case and white space.",
        json_schema_extra=expert("data sets name their answer differently"),
    )

    @model_validator(mode="after")
    def _check_wording(self) -> Self:
        if self.prompt_template is not None:
            raise SpecConflict(
                {"task.prompt_template": self.prompt_template},
                "a row is a conversation, and asked as it stands",
                allowed="the wording of the rows",
                next_step="write the wording into the rows, which sft.source imitates too",
            )
        return self


class SftJsonl(RowTask):
    """Right if the answer of a reply is the row's gold; `task.answer` says how both are read.

    Judged is the text behind the last closed thinking block. `format_ok`: an answer was found.
    """

    _spec: SftJsonlSpec

    def __init__(self, spec: SftJsonlSpec) -> None:
        self._by_prompt_id: dict[str, SftRow] = {}
        self._gold_by_prompt: dict[str, SftRow] = {}
        self._sources: Counter[str] = Counter()
        reading = RowReading(
            layout=DataLayout(train=("train.jsonl",), held_out=("test.jsonl",)),
            to_example=self._to_example,
            question=lambda example: json.dumps(example.fields["messages"]),
            why_left_out=self._why_left_out,
            # Replies to one prompt may land in both splits: the prompt is held out then.
            drops_shared=True,
        )
        limits = TaskLimits(max_reply_tokens=_MAX_REPLY_TOKENS)
        super().__init__(spec, reading, limits, source=spec.source, prompt="", verifier=_VERIFIER)

    def render(self, example: Example) -> tuple[Message, ...]:
        """Return the messages before the demonstrated reply."""
        messages = [Message(role=role, content=content) for role, content in example.fields["messages"]]
        return pose_messages(messages, self._spec.thinking)

    async def verify(self, example: Example, text: str) -> Outcome:
        """Compare the answer of a reply with gold.

        Raises: DataError if the example has no gold.
        """
        if example.answer is None:
            raise DataError(
                f"example {example.example_id} has no gold",
                allowed="examples whose answer is known",
                next_step="add the key gold to the row",
            )
        kind = self._spec.answer
        answer = _find(kind, text_after_thinking(text) or "")
        is_correct = answer is not None and _is_equal(kind, example.answer, answer)
        return right_or_wrong(is_correct, format_ok=answer is not None, extracted=answer)

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        """Return the gold answer and the demonstration, which must reach it."""
        return () if example.answer is None else (example.answer, str(example.fields["completion"]))

    def _why_left_out(self, row: Row, split: Split) -> str | None:
        parsed = read_sft_row(row, self._spec.train_on)
        self._sources["none" if parsed.source is None else repr(parsed.source)] += 1
        refuse_double_names([self._by_prompt_id.setdefault(parsed.prompt_id, parsed), parsed])
        if self._spec.subset not in (None, parsed.source):
            return "of other sources"
        return "without gold" if parsed.gold is None else None

    def _to_example(self, row: Row) -> Example:
        """Convert a row; the same prompt must have the same gold answer."""
        parsed = read_sft_row(row, self._spec.train_on)
        assert parsed.gold is not None
        kind = self._spec.answer
        is_number = parse_number(parsed.gold) is not None
        if not (is_number if kind == "number" else kind == "text" or normal_form(parsed.gold)):
            raise malformed(parsed, f"has gold={parsed.gold[:80]!r}", f"gold that is a {self._spec.answer}")
        messages = [[message.role, message.text] for message in parsed.messages[:-1]]
        first = self._gold_by_prompt.setdefault(json.dumps(messages), parsed)
        if first.gold != parsed.gold:
            allowed = f"the gold of {first.place}, which asks the same: {str(first.gold)[:80]!r}"
            raise malformed(parsed, f"has gold={parsed.gold[:80]!r}", allowed)
        fields = {"messages": messages, "completion": parsed.messages[-1].text}
        if parsed.problem is not None:
            fields["problem"] = parsed.problem
        return make_example("sft-jsonl", fields, parsed.gold)

    def _read_splits(self) -> SplitExamples:
        """Read the rows. Raises: DataError if a split is empty, naming the sources that were seen."""
        splits = super()._read_splits()
        if splits.train and splits.held_out:
            return splits
        seen = ", ".join(
            f"{number} of source {name}" for name, number in self._sources.most_common(_MAX_SHOWN)
        )
        left = ", ".join(f"{number} {why}" for why, number in splits.left_out.items()) or "none"
        raise DataError(
            f"task.source={self._spec.source} with task.subset={self._spec.subset!r} has"
            f" {len(splits.train)} training and {len(splits.held_out)} held-out examples; its rows are"
            f" {seen}; left out: {left}",
            allowed="at least one row with gold in each split",
            next_step="correct task.subset, or add the key gold to the rows",
        )


def _find(kind: AnswerKind, text: str) -> str | None:
    """Return the answer of a reply, or None."""
    if kind == "number":
        number = find_number(text)
        return None if number is None else number.text
    if kind == "formula":
        answer = find_answer(text)
        return None if answer is None else answer.text
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else None


def _is_equal(kind: AnswerKind, gold: str, answer: str) -> bool:
    if kind == "number":
        ours, theirs = read_number(answer), read_number(gold)
        return ours is not None and theirs is not None and ours.value == theirs.value
    if kind == "formula":
        return answers_equal(gold, answer, Strictness.STANDARD)
    return _plain(answer) == _plain(gold)


def _plain(text: str) -> str:
    return " ".join(text.split()).casefold()
