"""Several tasks as one."""

from __future__ import annotations

from typing import Any, Literal, Self, TypeVar

from pydantic import Field, JsonValue, ValidationError, field_validator, model_validator

from strop.spec.base import Section, SpecConflict
from strop.spec.code_tasks import AppsSpec, HumanEvalSpec, MbppSpec
from strop.spec.free_values import check_free_table
from strop.spec.generated_tasks import ArithmeticSpec, DummySpec, ReasoningGymSpec, ReverseTextSpec
from strop.spec.instruction_tasks import IfBenchSpec, IfEvalSpec, IfMultiSpec, RlvrIfevalSpec
from strop.spec.judge_tasks import LlmJudgeSpec
from strop.spec.math_tasks import (
    AimeSpec,
    DeepscalerSpec,
    Gsm8kSpec,
    Math500Spec,
    MathSpec,
    MmluSpec,
    RlvrMixedSpec,
)
from strop.spec.sft_task import SftJsonlSpec
from strop.spec.task_base import TaskSection

PlainTask = (
    ArithmeticSpec
    | DummySpec
    | ReverseTextSpec
    | ReasoningGymSpec
    | Gsm8kSpec
    | MathSpec
    | Math500Spec
    | DeepscalerSpec
    | AimeSpec
    | MmluSpec
    | MbppSpec
    | HumanEvalSpec
    | AppsSpec
    | IfEvalSpec
    | IfBenchSpec
    | RlvrIfevalSpec
    | IfMultiSpec
    | LlmJudgeSpec
    | SftJsonlSpec
    | RlvrMixedSpec
)
"""A task that is not made of others."""


class MixturePart(Section):
    """One part of a mixture: a task, and how much of it."""

    task: PlainTask = Field(discriminator="name", description="What the part asks.")
    weight: float = Field(
        default=1.0, gt=0.0, le=1e6, description="Share of its draws, relative to the other parts'."
    )
    count: int | None = Field(
        default=None, ge=1, le=10**7, description="Training examples used, from the first. none = all."
    )
    repeat: int = Field(default=1, ge=1, le=1000, description="How often each comes in an epoch.")


AnyPart = TypeVar("AnyPart", bound=Section)


class MixtureSpec(TaskSection):
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

    @field_validator("parts", mode="before")
    @classmethod
    def _check_parts(cls, parts: Any) -> Any:
        check_free_table(("task", "parts"), parts)
        return parts

    @model_validator(mode="after")
    def _check_mixture(self) -> Self:
        if self.thinking != "model_default":
            raise SpecConflict(
                {"task.thinking": self.thinking},
                "each part says for itself whether the model thinks",
                allowed="thinking in [task.parts.LABEL]",
                next_step="move the setting into the parts",
            )
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
        self.read_parts()
        return self

    def read_parts(self) -> dict[str, MixturePart]:
        """Return the parts by label, checked.

        Raises: SpecConflict naming the setting that is wrong.
        """
        return {label: read_part(MixturePart, label, table) for label, table in self.parts.items()}

    @property
    def num_train(self) -> int | None:
        """Only the parts' data can tell."""
        return None

    @property
    def num_held_out(self) -> int | None:
        """Only the parts' data can tell."""
        return None


def read_part(kind: type[AnyPart], label: str, table: dict[str, JsonValue]) -> AnyPart:
    """Return a part of a task that is made of others; what `kind` does not name is its task's.

    Raises: SpecConflict naming the setting that is wrong.
    """
    names = [name for name in kind.model_fields if name != "task"]
    own = {key: value for key, value in table.items() if key in names}
    settings = {key: value for key, value in table.items() if key not in names}
    try:
        return kind.model_validate({**own, "task": settings})
    except ValidationError as error:
        first = error.errors()[0]
        # Without the name of the section and of the task, which pydantic puts in between.
        where = [str(part) for part in first["loc"] if part not in ("task", settings.get("name"))]
        raise SpecConflict(
            {".".join(["task.parts", label, *where]): first["input"]},
            first["msg"],
            allowed=f"the settings of the part's task, and {', '.join(names[:-1])} and {names[-1]}",
            next_step="correct the setting; `strop explain task` lists those of every task",
        ) from error
