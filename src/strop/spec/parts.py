"""The section of a mixture: here, because plans, layouts and judges look into its parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Self

from pydantic import Field, JsonValue, ValidationError, field_validator, model_validator

from strop.errors import ConfigError
from strop.spec.base import Section, SpecConflict, check_free_table, expert
from strop.spec.sandboxing import SandboxSettings
from strop.spec.task import EnvironmentSection, TaskSection, TaskSpec
from strop.user_code import CodeRef


class MixturePart(Section):
    """One part of a mixture: a task, and how much of it."""

    task: TaskSpec = Field(description="The part's task.")
    weight: float = Field(
        default=1.0, gt=0.0, le=1e6, description="Share of its draws, relative to the other parts'."
    )
    count: int | None = Field(
        default=None, ge=1, le=10**7, description="Training examples used, from the first. none = all."
    )
    repeat: int = Field(default=1, ge=1, le=1000, description="How often each comes in an epoch.")


_OWN = MixturePart.model_fields.keys() - {"task"}


class MixtureSpec(TaskSection):
    """Several tasks trained as one."""

    name: Literal["mixture"]
    mode: Literal["weighted", "sequential"] = Field(
        default="weighted",
        description="How the parts' examples follow each other in an epoch: drawn by weight until all are"
        " used up, or one part after the other.",
        json_schema_extra=expert("tasks are mixed in several ways, and a curriculum needs an order"),
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
        given = {"max_reply_tokens": self.max_reply_tokens, "thinking": self.thinking, **self.prompting}
        for name, value in given.items():
            if value != type(self).model_fields[name].default:
                raise SpecConflict(
                    {f"task.{name}": value},
                    "each part has its own",
                    allowed=f"{name} in [task.parts.LABEL]",
                    next_step="move the setting into the parts",
                )
        if not self.read_parts():
            raise SpecConflict(
                {"task.parts": self.parts},
                "a mixture of nothing",
                allowed="one part or more, each a table [task.parts.LABEL] with the name of a task",
                next_step="add the parts",
            )
        return self

    def read_parts(self) -> dict[str, MixturePart]:
        """Return the parts by label. Raises: SpecConflict naming the setting that is wrong."""
        return {label: _read_part(label, table) for label, table in self.parts.items()}

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


def plain_sections(task: TaskSection) -> list[TaskSection]:
    """Return the sections of a task's parts, or its own."""
    return [part.task for part in task.read_parts().values()] if isinstance(task, MixtureSpec) else [task]


def needs_ray(task: TaskSection) -> bool:
    """Whether model-written code runs in sandboxes on the nodes of the run's Ray."""
    sections: Sequence[object] = plain_sections(task)
    return any(isinstance(one, SandboxSettings) and one.sandbox == "ray" for one in sections)


def _read_part(label: str, table: dict[str, JsonValue]) -> MixturePart:
    """Read a part; keys that are not its own belong to its task."""
    own = {key: value for key, value in table.items() if key in _OWN}
    settings = {key: value for key, value in table.items() if key not in _OWN}
    try:
        part = MixturePart.model_validate({**own, "task": settings})
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
            allowed=f"the settings of the part's task, and {', '.join(sorted(_OWN))}",
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
