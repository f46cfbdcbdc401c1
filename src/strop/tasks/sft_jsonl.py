"""Demonstrations with gold answers posed as problems, for accuracy and for rejection sampling.

The rows are those of `sft.source`, read by the same reader, so one file serves imitation and judging.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from strop.rollout import Example, Split
from strop.spec.base import Unhashed, expert
from strop.tasks.rows.demonstrations import SftRow, read_sft_row, refuse_double_names
from strop.tasks.rows.judged_rows import REWARD_HELP
from strop.tasks.rows.layout import Row
from strop.tasks.user.rows import Rows, RowSettings


class SftJsonlSpec(RowSettings):
    """Prompts with demonstrations and gold answers, in the rows that `sft.source` takes."""

    name: Literal["sft-jsonl"]
    prompt: ClassVar[str] = "messages"
    answer: ClassVar[str] = "gold"
    gold: ClassVar[None] = None
    reward: Unhashed[tuple[str, ...]] = Field(
        default=("number",),
        strict=False,
        min_length=1,
        description=f"How a reply is judged: {REWARD_HELP}",
    )
    subset: str | None = Field(
        default=None,
        min_length=1,
        description="Use only the rows whose key `source` is this text; the others are counted."
        " none = all rows.",
        json_schema_extra=expert("a file may hold several sources"),
    )


class SftJsonl(Rows):
    """Rows without the key gold are left out. Of several replies to one prompt, the first is a gold reply."""

    _spec: SftJsonlSpec
    _drops_shared = True

    def __init__(self, spec: SftJsonlSpec) -> None:
        self._by_prompt_id: dict[str, SftRow] = {}
        super().__init__(spec)

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        """Return the gold answer and the demonstration, which must reach it."""
        return *super().gold_replies(example), str(example.fields["columns"]["completion"])

    def _read(self, row: Row) -> Row:
        parsed = read_sft_row(row)
        refuse_double_names([self._by_prompt_id.setdefault(parsed.prompt_id, parsed), parsed])
        messages = [{"role": message.role, "content": message.text} for message in parsed.messages]
        values = {"messages": messages[:-1], "completion": messages[-1]["content"], "gold": parsed.gold}
        others = {"problem": parsed.problem, "source": parsed.source}
        values |= {name: value for name, value in others.items() if value is not None}
        return Row(values=values, place=row.place, index=row.index)

    def _why_left_out(self, row: Row, split: Split) -> str | None:
        is_other = self._spec.subset not in (None, self._read(row).values.get("source"))
        return "of other sources" if is_other else super()._why_left_out(row, split)
