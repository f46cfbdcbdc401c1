"""Base of composite tasks: their parts, and the settings that belong to the parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self, TypeVar

from pydantic import Field, JsonValue, ValidationError, field_validator, model_validator

from strop.errors import ConfigError
from strop.spec.base import Section, SpecConflict, check_free_table
from strop.spec.sandboxing import SandboxSettings
from strop.spec.task import EnvironmentSection, TaskSection, TaskSpec, UserCodeSection
from strop.user_code import CodeRef


class TaskPart(Section):
    """One part of a composite task."""

    task: TaskSpec = Field(description="The part's task, whose problems are posed or whose verifier judges.")


AnyPart = TypeVar("AnyPart", bound=TaskPart)


class PartedSection(TaskSection):
    """Base of composite tasks, whose problems and settings are their parts'; each defines its `parts`."""

    def read_parts(self) -> Mapping[str, TaskPart]:
        """Return the parts by label, checked.

        Raises: SpecConflict naming the setting that is wrong.
        """
        raise NotImplementedError

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
        """None: known only from the parts' data."""
        return None

    @property
    def num_held_out(self) -> int | None:
        """None: known only from the parts' data."""
        return None

    @property
    def user_code(self) -> list[CodeRef]:
        """The user code of all parts."""
        return [*(ref for part in plain_sections(self) for ref in part.user_code), *super().user_code]

    @property
    def judges_by_data(self) -> bool:
        """True: the data says which part an example belongs to."""
        return True


def plain_sections(task: TaskSection) -> list[TaskSection]:
    """Return the sections of a task's parts, or its own."""
    return [part.task for part in task.read_parts().values()] if isinstance(task, PartedSection) else [task]


def needs_service(task: TaskSection) -> bool:
    """Whether model-written code runs in sandboxes of the run's service."""
    sections: Sequence[object] = plain_sections(task)
    return any(isinstance(one, SandboxSettings) and one.sandbox == "remote" for one in sections)


def read_part(kind: type[AnyPart], label: str, table: dict[str, JsonValue]) -> AnyPart:
    """Read a part of a composite task; keys that `kind` does not name belong to the part's task.

    Raises: SpecConflict naming the setting that is wrong.
    """
    names = [name for name in kind.model_fields if name != "task"]
    own = {key: value for key, value in table.items() if key in names}
    settings = {key: value for key, value in table.items() if key not in names}
    try:
        part = kind.model_validate({**own, "task": settings})
    except ValidationError as error:
        first = error.errors()[0]
        cause = first.get("ctx", {}).get("error")
        if isinstance(cause, SpecConflict):
            inside = f"task.parts.{label}."
            given = {key.replace("task.", inside, 1): value for key, value in cause.given.items()}
            raise SpecConflict(given, cause.why, allowed=cause.allowed, next_step=cause.next_step) from error
        if isinstance(cause, ConfigError):
            raise cause from error
        where = [str(part) for part in first["loc"] if part != "task"]
        raise SpecConflict(
            {".".join(["task.parts", label, *where]): first["input"]},
            first["msg"],
            allowed=f"the settings of the part's task, and {', '.join(names[:-1])} and {names[-1]}",
            next_step="correct the setting; `strop explain task` lists those of every task",
        ) from error
    if isinstance(part.task, EnvironmentSection):
        raise SpecConflict(
            {f"task.parts.{label}.name": part.task.name},
            "an environment is no part of another task",
            allowed="tasks whose replies are judged one by one",
            next_step="train on it in a run of its own",
        )
    return part


def refuse_same_names(parts: Mapping[str, TaskSection]) -> None:
    """Refuse two classes of the same name, because results could not tell their examples apart.

    Raises: SpecConflict naming both.
    """
    known: dict[str, str] = {}
    for label, task in parts.items():
        if not isinstance(task, UserCodeSection):
            continue
        other = known.setdefault(task.ref.name, label)
        if parts[other].name != task.name:
            raise SpecConflict(
                {f"task.parts.{one}.name": parts[one].name for one in (other, label)},
                f"two tasks are called {task.ref.name}",
                allowed="a name of its own for each class",
                next_step="rename one of the classes",
            )
