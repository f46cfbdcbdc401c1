"""Tasks and environments built from their sections; a run imports only its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

from strop.errors import ConfigError
from strop.spec.built_in import built_in_tasks, import_kind
from strop.spec.parts import MixtureSpec
from strop.spec.task import EnvironmentSection, TaskSection, UserCodeSection, UserEnvironmentSpec
from strop.tasks.task import Task
from strop.user_code import edited, hash_sources

_WORLDS = "strop.environments.worlds"
_AGENTS = "strop.agents.task"
"""Of rooms above this one; imported when a run names one."""


def build_task(spec: TaskSection) -> Task:
    """Build the task that a spec names; no data is read yet.

    Raises: ConfigError if a setting cannot work with this task.
    """
    task: Task = _build(spec)
    if isinstance(spec, UserCodeSection) and task.name in built_in_tasks():
        raise ConfigError(
            f"task.name={spec.name}: two tasks are called {task.name}, and one of them is strop's own",
            allowed="a name that no built-in task has",
            next_step="rename the class, or the entry point",
        )
    if spec.agent is not None:
        task = import_module(_AGENTS).AgentTask(task, spec)
    if spec.order_file is None:
        return task
    from strop.tasks.mixture import Curriculum

    return Curriculum(task, spec)


def _build(spec: TaskSection) -> Any:
    if isinstance(spec, UserEnvironmentSpec):
        return import_module(_WORLDS).OwnWorld(spec)
    if isinstance(spec, UserCodeSection):
        from strop.tasks.user.own_task import OwnTask

        return OwnTask(spec)
    kind = import_kind(spec.name)
    if isinstance(spec, EnvironmentSection):
        return import_module(_WORLDS).BuiltInWorld(spec, kind)
    if isinstance(spec, MixtureSpec):
        return kind(spec, {label: build_task(part.task) for label, part in spec.read_parts().items()})
    return kind(spec)


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
    task.warm_up()
    return task


def import_extra(package: str, extra: str = "tasks") -> Any:
    """Return a package of one of strop's extras. Raises: ConfigError if it is not installed."""
    try:
        return import_module(package)
    except ImportError as error:
        raise ConfigError(
            f"the package {package} is not installed ({error})",
            allowed=f"an installation with the extra '{extra}'",
            next_step=f"pip install 'strop[{extra}]'",
        ) from error
