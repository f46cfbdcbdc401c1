"""Demonstrations with gold answers posed as problems, for accuracy and for rejection sampling.

The rows are those of `sft.source`, read by the same reader, so one file serves imitation and judging.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Literal, Self

from pydantic import Field, model_validator

from strop.rollout import Example, Message, Outcome, Split, make_example
from strop.spec.base import SpecConflict, Unhashed, expert
from strop.tasks.presets import PresetSection, PresetTask
from strop.tasks.prompt import pose_messages
from strop.tasks.rows.demonstrations import SftRow, malformed, read_sft_row, refuse_double_names
from strop.tasks.rows.layout import Row
from strop.tasks.rows.row_task import SplitExamples, require_both


class SftJsonlSpec(PresetSection):
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
    answer: Literal["number", "formula", "text"] = Field(
        default="number",
        description="How a reply is compared with gold. 'number': the number that answers, as in gsm8k;"
        " 'formula': the final answer, as in math with strictness 'standard'; 'text': the last line that is"
        " not empty, but for case and white space.",
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


class SftJsonl(PresetTask):
    """Right if the answer of a reply is the row's gold. `format_ok`: an answer was found."""

    _spec: SftJsonlSpec

    def __init__(self, spec: SftJsonlSpec) -> None:
        self._by_prompt_id: dict[str, SftRow] = {}
        self._gold_by_prompt: dict[str, SftRow] = {}
        super().__init__(spec, reward="math" if spec.answer == "formula" else spec.answer)

    def render(self, example: Example) -> tuple[Message, ...]:
        """Return the messages before the demonstrated reply."""
        messages = [Message(role=role, content=content) for role, content in example.fields["messages"]]
        return pose_messages(messages, self._spec.thinking)

    async def verify(self, example: Example, text: str) -> Outcome:
        """Compare the answer of a reply with gold. Raises: DataError if the example has none."""
        outcome = await super().verify(example, text)
        return replace(outcome, format_ok=outcome.extracted is not None)

    def _asked(self, example: Example) -> str:
        return str(example.fields["messages"][-1][1])

    def _question(self, example: Example) -> str:
        return json.dumps(example.fields["messages"])

    def _why_left_out(self, row: Row, split: Split) -> str | None:
        # What is wrong with a row is refused, whether or not it is used.
        parsed = read_sft_row(row)
        refuse_double_names([self._by_prompt_id.setdefault(parsed.prompt_id, parsed), parsed])
        if self._spec.subset not in (None, parsed.source):
            return "of other sources"
        return "without gold" if parsed.gold is None else None

    def _to_example(self, row: Row) -> Example:
        """Convert a row; the same prompt must have the same gold answer."""
        parsed = read_sft_row(row)
        messages = [[message.role, message.text] for message in parsed.messages[:-1]]
        first = self._gold_by_prompt.setdefault(json.dumps(messages), parsed)
        gold = self._gold.read_gold(parsed.gold)
        if gold is None or first.gold != parsed.gold:
            same = f"the gold of {first.place}, which asks the same: {first.gold!r:.80}"
            raise malformed(
                parsed, f"has gold={parsed.gold!r:.80}", self._gold.allowed if gold is None else same
            )
        fields = {"messages": messages, "completion": parsed.messages[-1].text}
        if parsed.problem is not None:
            fields["problem"] = parsed.problem
        return make_example(self.name, fields, gold)

    def _read_splits(self) -> SplitExamples:
        return require_both(super()._read_splits(), self._source)
