"""Published data sets, each described by a TOML file here (a `DataSet`), and the task that they are."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from strop.spec.base import Unhashed, expert
from strop.tasks.rows.judged_rows import JudgedRows, RewardSection
from strop.tasks.rows.layout import DataSet

_FOLDER = Path(__file__).parent


@cache
def read_preset(name: str) -> DataSet:
    """Return what the file of a data set says."""
    return DataSet.read(_FOLDER / f"{name}.toml")


class PresetSpec(RewardSection):
    """Word problems of gsm8k, competition problems, or multiple-choice questions of MMLU."""

    name: Literal["gsm8k", "math", "math500", "deepscaler", "aime", "mmlu"]
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

    strictness: Literal["strict", "standard", "symbolic"] = Field(
        default="symbolic",
        description="When a formula is right. 'strict': it stands in the one box of the reply and is spelled"
        " like the gold answer, but for spacing, units and the like. 'standard': also if both are the same"
        " number. 'symbolic': also if sympy finds both formulas equal.",
        json_schema_extra=expert("published scores differ by how far an answer is read"),
    )


class PresetTask(JudgedRows):
    """A published data set; right is a reply with the right answer, or what the run's rewards say."""

    def __init__(self, spec: PresetSpec) -> None:
        data = read_preset(spec.name)
        super().__init__(spec, data, spec.source or "")
