"""Published data sets, each described by a TOML file here, and the task that they are."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from strop.errors import ConfigError
from strop.rollout import Example, Message, Split, make_example
from strop.spec.base import SpecConflict, Unhashed, expert
from strop.spec.template import fill, list_names
from strop.tasks.graders import GRADERS
from strop.tasks.mathematics.answers import find_boxes
from strop.tasks.prompt import pose
from strop.tasks.rows.judged_rows import REWARD_HELP, JudgedRows, RewardSection
from strop.tasks.rows.layout import DataLayout, Row, bad_row
from strop.tasks.rows.row_task import RowReading, require_texts
from strop.tasks.task import TaskLimits

_OF_HUB = ("gsm8k", "aime", "mmlu", "math", "math500", "deepscaler")
_LEVEL = re.compile(r"Level ([1-5?])")


class Preset(BaseModel):
    """What a TOML file says of a data set."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str | None = None
    """Its hub id."""
    saved_as: str | None = None
    """See `DataLayout`."""
    train: tuple[str, ...] = ()
    held_out: tuple[str, ...] = ()
    """Files of both splits; of a data set without training files, all rows are held out."""
    drops_shared: bool = False
    """See `RowReading`."""
    fields: Mapping[str, str] = Field(min_length=1)
    """Columns that hold texts, by the names of the examples' fields. The first is the question."""
    choices: str | None = None
    """Column with a list of four choices, which prompts call a, b, c and d."""
    topic: str | None = None
    """Column with the subject of a question; may be empty. In prompts, {about} is ' about ' and its words."""
    answer: str
    """Column of the right answer."""
    answer_in: Literal["all", "behind ####", "the last box"] = "all"
    """Where in the column it stands."""
    may_lack_answer: bool = False
    """Whether rows without an answer are left out and counted."""
    reward: Literal["number", "marked-number", "math", "integer", "letter"]
    """How it is compared, by `graders`, if the run names no rewards."""
    prompt: str
    base_prompt: str
    """What is asked in a chat, and in plain text."""
    base_stop: tuple[str, ...] = ()
    gold: tuple[str, ...] = Field(min_length=1)
    """Right replies, the form that the prompt asks for first."""
    max_reply_tokens: int = Field(ge=1)

    @model_validator(mode="after")
    def _check_templates(self) -> Preset:
        asked = {*self.fields, *("abcd" if self.choices else ()), *(("about",) if self.topic else ())}
        for template in (self.prompt, self.base_prompt, *self.gold):
            known = asked if template not in self.gold else {*asked, "answer"}
            if unknown := set(list_names(template)) - known:
                raise ValueError(f"{template!r:.60} names {sorted(unknown)}; known are {sorted(known)}")
        return self


@cache
def read_preset(name: str, folder: Path = Path(__file__).parent) -> Preset:
    """Read a preset. Raises: ConfigError naming the file and what of it is wrong."""
    path = folder / f"{name}.toml"
    try:
        return Preset.model_validate(tomllib.loads(path.read_text("utf-8")))
    except (OSError, ValueError) as error:
        faults = error.errors() if isinstance(error, ValidationError) else []
        said = [f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in faults] or [str(error)]
        raise ConfigError(
            f"preset {path.name}: {'; '.join(said)}",
            allowed=f"a TOML table of {', '.join(Preset.model_fields)}",
            next_step="correct the file",
        ) from error


class PresetSection(RewardSection):
    """Settings of every published data set."""

    source: Unhashed[str | None] = Field(
        default=None,
        min_length=1,
        description="Source of the problems: a hub id, or a folder or file of Parquet, JSONL or CSV. A text"
        " that starts with '/', '~' or '.', or ends in .parquet, .jsonl or .json, is a path; a relative one"
        " is relative to the file that names it. none = the data set's own place on the hub.",
    )
    reward: Unhashed[tuple[str, ...]] = Field(
        default=(),
        strict=False,
        description=f"How a reply is judged, if not as the data set does: {REWARD_HELP}",
    )

    @model_validator(mode="before")
    @classmethod
    def _name_source(cls, values: Any) -> Any:
        """Name the data set's own place: whoever lists or stages what a run reads finds it there."""
        if (
            isinstance(values, dict)
            and values.get("source") is None
            and (name := values.get("name")) in _OF_HUB
        ):
            return {**values, "source": read_preset(name).source}
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
        self._preset = preset = read_preset(spec.name)
        self._gold = GRADERS[preset.reward]
        self._min_level = getattr(spec, "min_level", 1)
        if self._min_level > 1 and "level" not in preset.fields:
            raise SpecConflict(
                {"task.min_level": self._min_level, "task.name": spec.name},
                "its problems have no levels",
                allowed="task.min_level of math",
                next_step="leave it out",
            )
        reading = RowReading(
            layout=DataLayout(
                train=preset.train,
                held_out=preset.held_out,
                saved_as=preset.saved_as,
                # Another data set for evaluation has other files.
                is_unknown=not preset.train and spec.source != preset.source,
            ),
            to_example=self._to_example,
            question=self._question,
            why_left_out=self._why_left_out,
            drops_shared=preset.drops_shared,
        )
        super().__init__(
            spec,
            reading,
            TaskLimits(max_reply_tokens=preset.max_reply_tokens, base_stop_strings=preset.base_stop),
            rewards=spec.reward or (preset.reward,),
            source=spec.source or "",
            prompt=preset.prompt,
            base_prompt=preset.base_prompt,
        )

    def render(self, example: Example) -> tuple[Message, ...]:
        """Pose the problem and describe the form of the answer."""
        fields = self.prompt_fields(example)
        chat, base = fill(self._preset.prompt, fields), fill(self._preset.base_prompt, fields)
        return pose(chat, base=base, thinking=self._spec.thinking)

    def prompt_fields(self, example: Example) -> Mapping[str, Any]:
        """Return the example's fields, and what prompts make of them."""
        made = dict(zip("abcd", example.fields.get("choices", ()), strict=False))
        if self._preset.topic is not None:
            topic = str(example.fields.get("topic", "")).replace("_", " ")
            made["about"] = f" about {topic}" if topic else ""
        return {**example.fields, **made}

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        """Return the right answer in the preset's forms; of strictness 'strict', the first alone."""
        fields = {**self.prompt_fields(example), "answer": example.answer or ""}
        forms = self._preset.gold[: 1 if self._strictness == "strict" else None]
        return tuple(fill(template, fields) for template in forms)

    def _values_of(self, example: Example) -> dict[str, Any]:
        prompt = fill(self._preset.prompt, self.prompt_fields(example))
        return {**example.fields, "prompt": prompt, "answer": example.answer}

    def _asked(self, example: Example) -> str:
        return str(example.fields.get(next(iter(self._preset.fields)), ""))

    def _question(self, example: Example) -> str:
        # Many questions of MMLU differ in their choices alone.
        return "\n".join([self._asked(example), *example.fields.get("choices", ())])

    def _to_example(self, row: Row) -> Example:
        preset = self._preset
        # Copies of a data set differ in the case of their columns.
        values = {column.lower(): value for column, value in row.values.items()}
        row = Row(values=values, place=row.place)
        texts = require_texts(row, *preset.fields.values())
        fields: dict[str, Any] = dict(zip(preset.fields, texts, strict=True))
        if preset.choices is not None:
            choices = values.get(preset.choices)
            if not isinstance(choices, list) or len(choices) != len("abcd"):
                raise bad_row(f"{row.place} has choices {choices!r:.80}", allowed="a list of four choices")
            fields["choices"] = [str(choice) for choice in choices]
        if preset.topic is not None:
            fields["topic"] = str(values.get(preset.topic) or "")
        return make_example(self.name, fields, self._read_answer(row, values.get(preset.answer)))

    def _read_answer(self, row: Row, value: Any) -> str:
        """Return a row's answer. Raises: DataError naming the row, if it cannot be read."""
        preset, text = self._preset, value if isinstance(value, str) else ""
        found: Mapping[str, Any] = {
            "all": value,
            "behind ####": text.rpartition("####")[2] if "####" in text else None,
            "the last box": "".join(find_boxes(text)[-1:]),
        }
        try:
            return self._gold.require_gold(found[preset.answer_in])
        except ValueError as error:
            raise bad_row(
                f"column {preset.answer} of {row.place} is {value!r:.80}",
                allowed=f"{self._gold.allowed}, of the text {preset.answer_in}",
            ) from error

    def _why_left_out(self, row: Row, split: Split) -> str | None:
        preset = self._preset
        if preset.may_lack_answer and row.values.get(preset.answer) in (None, ""):
            return "without an answer"
        if "level" not in preset.fields:
            return None
        level = row.values.get(preset.fields["level"])
        match = _LEVEL.fullmatch(str(level))
        if match is None:
            raise bad_row(f"{row.place} has level {level!r}", allowed="'Level 1' to 'Level 5', or 'Level ?'")
        return None if match[1] != "?" and int(match[1]) >= self._min_level else match[0]
