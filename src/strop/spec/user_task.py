"""A task of the user's own class: the settings are those that the class takes, checked by itself."""

from __future__ import annotations

from typing import Any, Self

from pydantic import ConfigDict, Field, JsonValue, model_validator

from strop.spec.base import SpecConflict
from strop.spec.free_values import check_free_table
from strop.spec.task_base import TrainingRows
from strop.user_code import CodeRef, InspectedTask, find_task, inspect_task

BUILT_IN, USER_TASK = "built-in", "FILE.py:CLASS"
"""The two kinds of task; the second stands for its name where all tasks are listed."""
NULL_WORD = "none"


class UserTaskSpec(TrainingRows):
    """A class of the user's, in a file or announced by an installed package, with settings of its own."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, JsonValue]

    name: str = Field(
        description="Which task: 'FILE.py:CLASS', or a name that an installed package announces as an entry"
        " point of the group strop.tasks."
    )
    judge_limit_s: float = Field(
        default=10.0,
        gt=0.0,
        le=3600.0,
        description="Seconds that judging a reply may take. Then its process is killed, and a second attempt"
        " has four times as long.",
    )

    @model_validator(mode="after")
    def _complete(self) -> Self:
        """Have the class check and complete its settings; they stand as they are where it is not here."""
        for key, value in self.__pydantic_extra__.items():
            check_free_table(("task", key), value)
        if not self.ref.is_here:
            missing = [key for key, value in self.__pydantic_extra__.items() if value == NULL_WORD]
            self.__pydantic_extra__.update(dict.fromkeys(missing))
            return self
        found = self.inspect()
        if not found.mistakes:
            self.__pydantic_extra__.update(found.values)
            return self
        name, why = found.mistakes[0]
        names = ", ".join(found.schema.get("properties", {}))
        raise SpecConflict(
            {f"task.{name}": self.__pydantic_extra__.get(name.partition(".")[0])},
            why or f"{self.ref} has no such setting",
            allowed=f"its settings {names}" if names else "no settings: its __init__ takes none",
            next_step=f"correct it; line {found.line} of {self.ref.place} says what it takes",
        )

    @property
    def ref(self) -> CodeRef:
        """Where the class is."""
        found = find_task(self.name)
        assert found is not None
        return found

    def inspect(self) -> InspectedTask:
        """Return what the class is and how it completes these settings.

        Raises: ConfigError like `inspect_task`.
        """
        given = dict(self.__pydantic_extra__)
        if NULL_WORD in given.values():
            properties = inspect_task(self.ref, {}).schema.get("properties", {})
            given = {
                key: None if value == NULL_WORD and is_nullable(properties.get(key, {})) else value
                for key, value in given.items()
            }
        return inspect_task(self.ref, given)


def is_nullable(schema: dict[str, Any]) -> bool:
    """Whether a setting of JSON Schema may be without a value."""
    return any(one.get("type") == "null" for one in schema.get("anyOf", ()))


def tell_apart(value: Any) -> str:
    """Return which kind of task a section is, read or unread."""
    name = value.get("name") if isinstance(value, dict) else getattr(value, "name", None)
    return USER_TASK if isinstance(name, str) and find_task(name) is not None else BUILT_IN
