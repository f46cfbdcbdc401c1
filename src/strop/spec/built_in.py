"""Access to the list of built-in tasks, which is in the room `tasks`, above this one."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from strop.spec.task import TaskSection


class BuiltInTasks(Protocol):
    """The list of the built-in tasks, which the room `tasks` keeps."""

    def names(self) -> Sequence[str]:
        """Return the allowed values of `task.name`, in the order of listings. Imports no task."""

    def summary(self, name: str) -> str:
        """Return a one-sentence description of a task. Imports no task."""

    def section(self, name: str) -> type[TaskSection]:
        """Return the section of a task; imports its module. Raises: KeyError for another name."""


def built_in_tasks() -> BuiltInTasks:
    """Return the list of the built-in tasks."""
    return cast("BuiltInTasks", import_module("strop.tasks.registry").BUILT_IN_TASKS)
