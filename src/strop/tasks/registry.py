"""The built-in tasks and environments: found by their decorator, and built from their sections.

A run imports only its own task: names and summaries are read from the text of the source files.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import strop.tasks
from strop.errors import ConfigError
from strop.rollout import Split
from strop.spec.parts import PartedSection, plain_sections
from strop.spec.task import EnvironmentSection, TaskSection, UserCodeSection, UserEnvironmentSpec
from strop.tasks.contract import Task
from strop.user_code import edited, hash_sources

AnyTask = TypeVar("AnyTask", bound=Callable[..., Any])
_MARK = re.compile(
    r'^@built_in\(\s*"(?P<name>[a-z0-9-]+)",\s*\w+,\s*(?P<summary>(?:"(?:[^"\\]|\\.)*"\s*)+)'
    r",?\s*(?:rank=(?P<rank>\d+),?\s*)?\)",
    re.MULTILINE,
)
_LAST = 1000
_ENVIRONMENTS = "strop.environments"
_AGENTS = "strop.agents"
"""Rooms above this one with built-in environments; imported when a run names one."""
_imported: dict[str, tuple[type[TaskSection], Callable[..., Any]]] = {}
"""By name: section and class of the tasks whose modules have been imported."""


def built_in(
    name: str, section: type[TaskSection], summary: str, *, rank: int = _LAST
) -> Callable[[AnyTask], AnyTask]:
    """Register a class as the built-in task `name`, built from a `section` of the run spec.

    `summary`: one sentence; `rank`: its place in listings, lowest first. Name, summary and rank must be
    literals, and `@built_in(` must begin a line: they are read from the text of the file.
    """

    def register(kind: AnyTask) -> AnyTask:
        _imported[name] = (section, kind)
        return kind

    return register


@dataclass(frozen=True, kw_only=True, slots=True)
class _Listing:
    module: str
    summary: str
    rank: int


@cache
def _find_all() -> Mapping[str, _Listing]:
    """Read the decorators in the files of all rooms: listings by name of the task, in order of rank."""
    listings: dict[str, _Listing] = {}
    folders = [("strop.tasks", Path(folder)) for folder in strop.tasks.__path__]
    beside = folders[0][1].with_name
    folders += [(_ENVIRONMENTS, beside("environments")), (_AGENTS, beside("agents"))]
    for room, folder in folders:
        for path in sorted(folder.rglob("*.py")):
            module = ".".join((room, *path.relative_to(folder).with_suffix("").parts))
            for mark in _MARK.finditer(path.read_text("utf-8")):
                summary = ast.literal_eval(f"({mark['summary']})")
                rank = int(mark["rank"] or _LAST)
                listings[mark["name"]] = _Listing(module=module, summary=summary, rank=rank)
    return dict(sorted(listings.items(), key=lambda item: (item[1].rank, item[0])))


class _BuiltInTasks:
    """Implements `BuiltInTasks` of the room `spec`."""

    def names(self) -> Sequence[str]:
        """Return the values of `task.name`, in the order of listings. Imports no task."""
        return tuple(_find_all())

    def summary(self, name: str) -> str:
        """Return a task's summary, one sentence. Imports no task."""
        return _find_all()[name].summary

    def section(self, name: str) -> type[TaskSection]:
        """Return the section of a task; imports its module. Raises: KeyError for another name."""
        return _import(name)[0]


BUILT_IN_TASKS = _BuiltInTasks()


def _import(name: str) -> tuple[type[TaskSection], Callable[..., Any]]:
    import_module(_find_all()[name].module)
    return _imported[name]


def task_summaries() -> Mapping[str, str]:
    """Return the summary of each built-in task, by name."""
    return {name: listing.summary for name, listing in _find_all().items()}


def environment_names() -> Sequence[str]:
    """Return the names of the built-in multi-turn tasks. Imports no task."""
    rooms = (_ENVIRONMENTS, _AGENTS)
    return [name for name, listing in _find_all().items() if listing.module.startswith(rooms)]


def build_task(spec: TaskSection) -> Task:
    """Build the task that a spec names; no data is read yet.

    Raises: ConfigError if a setting cannot work with this task.
    """
    task: Task = _build(spec)
    if isinstance(spec, UserCodeSection) and task.name in _find_all():
        raise ConfigError(
            f"task.name={spec.name}: two tasks are called {task.name}, and one of them is strop's own",
            allowed="a name that no built-in task has",
            next_step="rename the class, or the entry point",
        )
    if spec.prompting and not isinstance(spec, EnvironmentSection):
        from strop.tasks.prompting import Prompted

        task = Prompted(task, spec)
    if spec.agent is not None:
        task = import_module("strop.agents").AgentTask(task, spec)
    if spec.order_file is None:
        return task
    from strop.tasks.curriculum import Curriculum

    return Curriculum(task, spec)


def _build(spec: TaskSection) -> Any:
    if isinstance(spec, UserEnvironmentSpec):
        return _worlds().OwnWorld(spec)
    if isinstance(spec, UserCodeSection):
        from strop.tasks.user.own_task import OwnTask

        return OwnTask(spec)
    kind = _import(spec.name)[1]
    if isinstance(spec, EnvironmentSection):
        return _worlds().BuiltInWorld(spec, kind)
    if isinstance(spec, PartedSection):
        return kind(spec, {label: build_task(part.task) for label, part in spec.read_parts().items()})
    return kind(spec)


def _worlds() -> Any:
    return import_module(f"{_ENVIRONMENTS}.worlds")


def task_builder(spec: TaskSection) -> Callable[[], Task]:
    """Return a picklable function that builds the task, warm, in other processes; it refuses edited code."""
    return partial(build_warm_task, spec, _hash_code(spec))


def _hash_code(spec: TaskSection) -> Mapping[str, str]:
    return {ref.place: hash_sources(ref.path) for ref in spec.user_code}


def build_warm_task(spec: TaskSection, code: Mapping[str, str] | None = None) -> Task:
    """Build a task and load everything that its verifier needs, for processes forked from this one.

    `code`: the expected hashes of the user's files.
    Raises: like `build_task`, and like `examples` if judging needs the data; ConfigError for other code.
    """
    if code is not None and code != (current := _hash_code(spec)):
        raise edited([path for path, digest in current.items() if code.get(path) != digest])
    task = build_task(spec)
    if spec.judges_by_data:
        # The scorer needs the generated problem; a mixture must know an example's part.
        for example in task.examples(Split.HELD_OUT)[:1]:
            task.gold_replies(example)
    for part in plain_sections(spec):
        plain = _build(part)
        if hasattr(plain, "warm_up"):
            plain.warm_up()
    return task
