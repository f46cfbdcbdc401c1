"""Demonstrations that are also a task: their prompts are posed, and replies compared with their gold."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from strop.spec.base import SpecConflict
from strop.spec.task_base import TrainingRows


class SftJsonlSpec(TrainingRows):
    """Prompts with demonstrations and gold answers, in the rows that `sft.source` takes."""

    name: Literal["sft-jsonl"] = Field(description="Which task: demonstrations whose answers are known.")
    source: str = Field(
        min_length=1,
        description="Where the rows are: a file of JSONL or Parquet, or a folder with train* and test* files."
        " Rows without the key gold are left out and counted.",
    )
    subset: str | None = Field(
        default=None,
        min_length=1,
        description="Use only the rows whose key `source` is this text; the others are counted."
        " none = all rows.",
    )
    train_on: Literal["assistant", "last", "all"] = Field(
        default="assistant",
        description="What of a row is imitated where the row does not say, as in sft.train_on.",
    )
    answer: Literal["number", "formula", "text"] = Field(
        default="number",
        description="How a reply is compared with gold. 'number': the number that answers, as gsm8k finds it;"
        " 'formula': the final answer, by spelling and value, as math with strictness 'standard'; 'text': the"
        " last line that is not empty, but for case and white space.",
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
