"""The built-in tasks and environments, as `built_in.toml` lists them; a run imports only its own."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strop.spec.task import TaskSection


class BuiltInTasks:
    """The list, in the order of listings. Its modules are in rooms above this one."""

    def __init__(self, table: Mapping[str, Mapping[str, str]]) -> None:
        self._table = table

    def names(self) -> Sequence[str]:
        """Return the allowed values of `task.name`. Imports no task."""
        return tuple(self._table)

    def summary(self, name: str) -> str:
        """Return a one-sentence description of a task. Imports no task."""
        return self._table[name]["summary"]

    def is_above(self, name: str, rooms: tuple[str, ...]) -> bool:
        """Whether a task is of one of these rooms. Imports no task."""
        return self._table[name]["kind"].startswith(rooms)

    def section(self, name: str) -> type[TaskSection]:
        """Return the section of a task; imports its module. Raises: KeyError for another name."""
        section: type[TaskSection] = self._import(name, self._table[name]["section"])
        return section

    def kind(self, name: str) -> Any:
        """Return the class of a task; imports its module. Raises: KeyError for another name."""
        return self._import(name, self._table[name]["kind"].partition(":")[2])

    def _import(self, name: str, wanted: str) -> Any:
        return getattr(import_module(self._table[name]["kind"].partition(":")[0]), wanted)


@cache
def built_in_tasks() -> BuiltInTasks:
    """Return the list of the built-in tasks."""
    return BuiltInTasks(tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8")))
