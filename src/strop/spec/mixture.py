"""Several tasks as one."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, JsonValue, model_validator

from strop.spec.base import Section, SpecConflict
from strop.spec.parts import PartedSection, PartTask, read_part, refuse_same_names


class MixturePart(Section):
    """One part of a mixture: a task, and how much of it."""

    task: PartTask = Field(description="What the part asks.")
    weight: float = Field(
        default=1.0, gt=0.0, le=1e6, description="Share of its draws, relative to the other parts'."
    )
    count: int | None = Field(
        default=None, ge=1, le=10**7, description="Training examples used, from the first. none = all."
    )
    repeat: int = Field(default=1, ge=1, le=1000, description="How often each comes in an epoch.")


class MixtureSpec(PartedSection):
    """Several tasks trained as one."""

    name: Literal["mixture"] = Field(description="Which task: several tasks mixed.")
    mode: Literal["weighted", "proportional", "sequential"] = Field(
        default="weighted",
        description="How the parts' examples follow each other in an epoch: drawn by weight until all are"
        " used up, drawn by the parts' sizes, or one part after the other.",
    )
    parts: dict[str, dict[str, JsonValue]] = Field(
        default={},
        description="The parts by label, each a table [task.parts.LABEL] with the settings of a task (name"
        " and its own), and: weight (1) of its draws, count (all) of its training examples, repeat (1)"
        " times in an epoch.",
    )

    @model_validator(mode="after")
    def _check_mixture(self) -> Self:
        if not self.parts:
            raise SpecConflict(
                {"task.parts": self.parts},
                "a mixture of nothing",
                allowed="one part or more, each a table [task.parts.LABEL] with the name of a task",
                next_step="add the parts",
            )
        if self.max_reply_tokens is not None:
            raise SpecConflict(
                {"task.max_reply_tokens": self.max_reply_tokens},
                "each part has its own limit",
                allowed="task.parts.LABEL.max_reply_tokens",
                next_step="move the setting into the parts",
            )
        refuse_same_names({label: part.task for label, part in self.read_parts().items()})
        return self

    def read_parts(self) -> dict[str, MixturePart]:
        """Return the parts by label, checked.

        Raises: SpecConflict naming the setting that is wrong.
        """
        return {label: read_part(MixturePart, label, table) for label, table in self.parts.items()}
