"""What the tasks that are made of others share: their parts, each a table with the settings of a task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self, TypeVar

from pydantic import (
    Discriminator,
    Field,
    JsonValue,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)

from strop.errors import ConfigError
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
    MmluChoiceSpec,
    MmluSpec,
    RlvrMixedSpec,
)
from strop.spec.rows_task import RowsSpec
from strop.spec.sft_task import SftJsonlSpec
from strop.spec.task_base import TaskSection
from strop.spec.user_task import BUILT_IN, USER_TASK, UserTaskSpec, tell_apart

BuiltInTask = (
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
    | MmluChoiceSpec
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
    | RowsSpec
)
"""A task of strop's own that is not made of others."""
PlainTask = BuiltInTask | UserTaskSpec
"""A task that is not made of others."""
PartTask = Annotated[
    Annotated[BuiltInTask, Field(discriminator="name"), Tag(BUILT_IN)]
    | Annotated[UserTaskSpec, Tag(USER_TASK)],
    Discriminator(tell_apart),
]
"""The same, read from a table."""
AnyPart = TypeVar("AnyPart", bound=Section)


class PartedSection(TaskSection):
    """What the tasks share whose problems and settings are their parts'; each names its `parts` itself."""

    @field_validator("parts", mode="before", check_fields=False)
    @classmethod
    def _check_parts(cls, parts: Any) -> Any:
        check_free_table(("task", "parts"), parts)
        return parts

    @model_validator(mode="after")
    def _check_asking(self) -> Self:
        given = dict(self.prompting)
        if self.thinking != "model_default":
            given["thinking"] = self.thinking
        for name, value in given.items():
            raise SpecConflict(
                {f"task.{name}": value},
                "each part says for itself how the model is asked",
                allowed=f"{name} in [task.parts.LABEL]",
                next_step="move the setting into the parts",
            )
        return self

    @property
    def num_train(self) -> int | None:
        """None: only the parts' data can tell."""
        return None

    @property
    def num_held_out(self) -> int | None:
        """None: only the parts' data can tell."""
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
        cause = first.get("ctx", {}).get("error")
        if isinstance(cause, SpecConflict):
            inside = f"task.parts.{label}."
            given = {key.replace("task.", inside, 1): value for key, value in cause.given.items()}
            raise SpecConflict(given, cause.why, allowed=cause.allowed, next_step=cause.next_step) from error
        if isinstance(cause, ConfigError):
            raise cause from error
        # Without the name of the section and of the task, which pydantic puts in between.
        where = [
            str(part)
            for part in first["loc"]
            if part not in ("task", settings.get("name"), BUILT_IN, USER_TASK)
        ]
        raise SpecConflict(
            {".".join(["task.parts", label, *where]): first["input"]},
            first["msg"],
            allowed=f"the settings of the part's task, and {', '.join(names[:-1])} and {names[-1]}",
            next_step="correct the setting; `strop explain task` lists those of every task",
        ) from error


def refuse_same_names(parts: Mapping[str, PlainTask]) -> None:
    """Refuse two classes of one name: results would not tell their examples apart.

    Raises: SpecConflict naming both.
    """
    known: dict[str, str] = {}
    for label, task in parts.items():
        if not isinstance(task, UserTaskSpec):
            continue
        other = known.setdefault(task.ref.name, label)
        if parts[other].name != task.name:
            raise SpecConflict(
                {f"task.parts.{one}.name": parts[one].name for one in (other, label)},
                f"two tasks are called {task.ref.name}",
                allowed="a name of its own for each class",
                next_step="rename one of the classes",
            )
