"""Published data sets, each described by a TOML file here (a `RowForm`), and the task that they are."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from strop.rollout import Example
from strop.spec.base import SpecConflict, Unhashed, expert
from strop.tasks.mathematics.answers import find_boxes
from strop.tasks.rows.judged_rows import JudgedRows, RewardSection, RowForm
from strop.tasks.rows.layout import Row, bad_row
from strop.tasks.rows.row_task import require_texts

_FOLDER = Path(__file__).parent
_LEVEL = re.compile(r"Level ([1-5?])")


@cache
def read_preset(name: str) -> RowForm:
    """Return what the file of a data set says."""
    return RowForm.model_validate(tomllib.loads((_FOLDER / f"{name}.toml").read_text("utf-8")))


class PresetSection(RewardSection):
    """Settings of every published data set."""

    source: Unhashed[str | None] = Field(
        default=None,
        min_length=1,
        description="Source of the problems: a hub id, or a folder or file of Parquet, JSONL or CSV. A text"
        " that starts with '/', '~' or '.', or ends in .parquet, .jsonl or .json, is a path; a relative one"
        " is relative to the file that names it. none = the data set's own place on the hub.",
    )

    @model_validator(mode="before")
    @classmethod
    def _name_source(cls, values: Any) -> Any:
        """Name the data set's own place: whoever lists or stages what a run reads finds it there."""
        is_open = isinstance(values, dict) and values.get("source") is None
        if is_open and (_FOLDER / f"{values.get('name')}.toml").is_file():
            return {**values, "source": read_preset(values["name"]).source}
        return values


class PresetSpec(PresetSection):
    """Word problems of gsm8k, problems of the AIME, or multiple-choice questions of MMLU."""

    name: Literal["gsm8k", "aime", "mmlu"]


class MathSpec(PresetSection):
    """Competition problems: those of MATH with worked solutions, MATH-500, or DeepScaleR."""

    name: Literal["math", "math500", "deepscaler"]
    strictness: Literal["strict", "standard", "symbolic"] = Field(
        default="symbolic",
        description="When an answer is right. 'strict': it stands in the one box of the reply and is spelled"
        " like the gold answer, but for spacing, units and the like. 'standard': also if both are the same"
        " number. 'symbolic': also if sympy finds both formulas equal.",
        json_schema_extra=expert("published scores differ by how far an answer is read"),
    )
    min_level: int = Field(
        default=1,
        ge=1,
        le=5,
        description="Easiest level used, of math alone.",
        json_schema_extra=expert("the problems of MATH have levels"),
    )


class PresetTask(JudgedRows):
    """A published data set; right is a reply with the right answer, or what the run's rewards say."""

    def __init__(self, spec: PresetSection) -> None:
        form = read_preset(spec.name)
        self._min_level = getattr(spec, "min_level", 1)
        if self._min_level > 1 and "level" not in form.fields:
            raise SpecConflict(
                {"task.min_level": self._min_level, "task.name": spec.name},
                "its problems have no levels",
                allowed="task.min_level of math",
                next_step="leave it out",
            )
        super().__init__(spec, form, spec.source or "")

    def prompt_fields(self, example: Example) -> Mapping[str, Any]:
        """Return the example's fields, and what prompts make of them."""
        made = dict(zip("abcd", example.fields.get("choices", ()), strict=False))
        topic = str(example.fields.get("topic") or "").replace("_", " ")
        return {**example.fields, **made, "about": f" about {topic}" if topic else ""}

    def _question(self, example: Example) -> str:
        question = str(example.fields.get(next(iter(self._form.fields)), ""))
        # Many questions of MMLU differ in their choices alone.
        choices = example.fields.get("choices")
        return question if choices is None else "\n".join([question, *choices])

    def _read(self, row: Row) -> tuple[dict[str, Any], Any] | str:
        form, place = self._form, row.place
        # Copies of a data set differ in the case of their columns.
        values = {column.lower(): value for column, value in row.values.items()}
        texts = require_texts(Row(values=values, place=place), *form.fields.values())
        fields: dict[str, Any] = dict(zip(form.fields, texts, strict=True))
        if form.choices is not None:
            choices = values.get(form.choices)
            if not isinstance(choices, list) or len(choices) != len("abcd"):
                raise bad_row(f"{place} has choices {choices!r:.80}", allowed="a list of four choices")
            fields |= {"choices": [str(choice) for choice in choices]}
        if form.topic is not None:
            fields["topic"] = str(values.get(form.topic) or "")
        if "level" in fields:
            level = _LEVEL.fullmatch(fields["level"])
            if level is None:
                raise bad_row(
                    f"{place} has level {fields['level']!r}", "'Level 1' to 'Level 5', or 'Level ?'"
                )
            if level[1] == "?" or int(level[1]) < self._min_level:
                return level[0]
        value = values.get(str(form.answer))
        text = value if isinstance(value, str) else ""
        found = {
            "all": value,
            "behind ####": text.rpartition("####")[2] if "####" in text else "",
            "the last box": "".join(find_boxes(text)[-1:]),
        }[form.answer_in]
        if form.answer not in values or found == "" != value:
            raise bad_row(f"column {form.answer} of {place} is {value!r:.80}", f"one with {form.answer_in}")
        return fields, found
