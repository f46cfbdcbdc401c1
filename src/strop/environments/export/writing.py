"""Write a package of verifiers v1 from an environment or a task."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from strop.errors import ConfigError
from strop.io.atomic import write_bytes_atomically
from strop.spec.judge import role_judges
from strop.spec.parts import needs_service
from strop.spec.task import EnvironmentSection, TaskSection, UserCodeSection
from strop.tasks import Task, build_task
from strop.user_code import CodeRef, list_sources
from strop.user_code.sources import root_of

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_SOURCES = "sources"


def write_package(section: TaskSection, folder: Path) -> str:
    """Write the package into a new or empty folder; return the folder's name, which is the taskset's id.

    A user's class and the files that it imports are copied; data is not.
    Raises: ConfigError if the folder's name is not allowed, it is not empty, or verifiers cannot play the
        task; StoreError if it cannot be written; as building the task and reading its data do.
    """
    name = folder.absolute().name
    if _NAME.fullmatch(name) is None:
        raise ConfigError(
            f"a package that is called {name!r} after its folder",
            allowed="small letters and digits, with single dashes between them, a letter first",
            next_step="name another folder, for example guess-number-v1",
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            f"{folder} exists, and is no empty folder",
            allowed="a folder for the package alone",
            next_step="name another one, or remove it",
        )
    task = build_task(section)
    _require_playable(section, task)
    module = folder / "src" / name.replace("-", "_")
    source, copies = _copy_sources(section)
    files: dict[Path, str | bytes] = {
        folder / "pyproject.toml": _PROJECT.format(name=name, module=module.name, version=task.version),
        folder / "README.md": _README.format(name=name, task=task.name),
        module / "__init__.py": Path(__file__).with_name("taskset.py").read_bytes(),
        module / "environment.json": json.dumps(_describe(section, task, source), indent=2),
        **{module / _SOURCES / place: data for place, data in copies.items()},
    }
    for path, data in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes_atomically(path, data if isinstance(data, bytes) else data.encode())
    return name


def _require_playable(section: TaskSection, task: Task) -> None:
    """Refuse tasks that verifiers cannot play. Raises: ConfigError."""
    reasons = {
        "verifiers conducts its attempts already": section.name == "verifiers",
        "a program conducts its attempts": section.agent is not None,
        "a judge of it is started by a run": bool(role_judges(section)),
        "its sandboxes are those of a run's service": needs_service(section),
        "task.thinking is set, and there the run decides it": section.thinking != "model_default",
        "task.order_file is set, and there the run orders": section.order_file is not None,
    }
    reason = next((why for why, holds in reasons.items() if holds), None)
    if reason is not None:
        raise ConfigError(
            f"{task.name} cannot be played by verifiers: {reason}",
            allowed="tasks and environments that are played by strop's process alone",
            next_step="change these settings, or export another one",
        )


def _copy_sources(section: TaskSection) -> tuple[str | None, dict[str, bytes]]:
    """Return the path of the user's file in the package, and the copied files by path."""
    if not isinstance(section, UserCodeSection) or not section.ref.is_file:
        return None, {}
    root = root_of(section.ref.path)
    copies = {path.relative_to(root).as_posix(): path.read_bytes() for path in list_sources(section.ref.path)}
    return f"{_SOURCES}/{section.ref.path.relative_to(root).as_posix()}", copies


def _describe(section: TaskSection, task: Task, source: str | None) -> dict[str, Any]:
    """Return the content of the package's `environment.json`."""
    agent: dict[str, Any] = {
        "runtime": {"type": "subprocess"},
        "sampling": {"max_tokens": task.limits.max_reply_tokens},
    }
    if isinstance(section, EnvironmentSection) and section.max_attempt_tokens is not None:
        agent["max_output_tokens"] = section.max_attempt_tokens
    ref: CodeRef | None = section.ref if isinstance(section, UserCodeSection) else None
    return {
        "section": section.model_dump(mode="json"),
        "source": source,
        "class": None if source is None or ref is None else ref.name,
        "version": task.version,
        # Relative paths of the settings start here.
        "folder": str(Path.cwd()),
        "python": sys.executable,
        "agent": agent,
    }


_PROJECT = """\
[build-system]
requires = ["setuptools>=70.1"]
build-backend = "setuptools.build_meta"

[project]
name = "{name}"
version = "1+{version}"
description = "An environment of strop's as a taskset of verifiers."
readme = "README.md"
requires-python = ">=3.11"
dependencies = ["verifiers>=0.4,<0.5"]

[tool.setuptools]
package-dir = {{ "" = "src" }}
packages = ["{module}"]

[tool.setuptools.package-data]
{module} = ["environment.json", "sources/**/*"]
"""
_README = """\
# {name}

{task}, an environment of strop's, as a taskset of verifiers 0.4:

    pip install .
    vf-eval {name}

strop plays it, in a process of the Python that exported it; `--env.taskset.python` names another one that has
strop. `--env.taskset.split held_out` takes the held-out examples.
"""
