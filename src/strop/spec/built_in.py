"""The built-in tasks and environments, as `built_in.toml` lists them; their rooms are above this one."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strop.spec.task import TaskSection


@cache
def built_in_tasks() -> Mapping[str, Mapping[str, str]]:
    """Return `kind`, `section` and `summary` by the name of the task, in the order of listings."""
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))


def import_kind(name: str) -> Any:
    """Return the class of a task; imports its module. Raises: KeyError for another name."""
    return _import(name, built_in_tasks()[name]["kind"].partition(":")[2])


def import_section(name: str) -> type[TaskSection]:
    """Return the section of a task; imports its module. Raises: KeyError for another name."""
    section: type[TaskSection] = _import(name, built_in_tasks()[name]["section"])
    return section


def _import(name: str, wanted: str) -> Any:
    return getattr(import_module(built_in_tasks()[name]["kind"].partition(":")[0]), wanted)
