"""Write a package of verifiers v1 from an environment or a task."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from strop.environments.guests import process
from strop.errors import ConfigError
from strop.io.atomic import write_bytes_atomically
from strop.spec.judge import role_judges
from strop.spec.parts import needs_service
from strop.spec.task import EnvironmentSection, TaskSection
from strop.tasks import Task, build_task

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_PROJECT = """\
[build-system]
requires = ["setuptools>=70.1"]
build-backend = "setuptools.build_meta"

[project]
name = "{name}"
version = "1+{version}"
description = "An environment of strop's as a taskset of verifiers."
requires-python = ">=3.11"
dependencies = ["verifiers>=0.4,<0.5"]

[tool.setuptools]
package-dir = {{ "" = "src" }}
packages = ["{module}"]

[tool.setuptools.package-data]
{module} = ["environment.json"]
"""


def write_package(section: TaskSection, folder: Path) -> str:
    """Write the package into a new or empty folder; return the folder's name, which is the taskset's id.

    Data and a user's class stay where they are: the package names their places.
    Raises: ConfigError if the folder's name is not allowed, it is not empty, or verifiers cannot play the
        task; StoreError if it cannot be written; as building the task and reading its data do.
    """
    name = folder.absolute().name
    is_taken = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    if _NAME.fullmatch(name) is None or is_taken:
        raise ConfigError(
            f"{folder} exists, and is no empty folder" if is_taken else f"a package that is called {name!r}",
            allowed="a new folder of small letters and digits, with single dashes, a letter first",
            next_step="name another folder, for example guess-number-v1",
        )
    task = build_task(section)
    _require_playable(section, task)
    module = folder / "src" / name.replace("-", "_")
    taskset = Path(__file__).with_name("taskset.py").read_text("utf-8")
    agent: dict[str, Any] = {
        "runtime": {"type": "subprocess"},
        "sampling": {"max_tokens": task.limits.max_reply_tokens},
    }
    if isinstance(section, EnvironmentSection) and section.max_attempt_tokens is not None:
        agent["max_output_tokens"] = section.max_attempt_tokens
    described = {
        "section": section.model_dump(mode="json"),
        "version": task.version,
        # Relative paths of the settings start here.
        "folder": str(Path.cwd()),
        "python": sys.executable,
        "agent": agent,
    }
    files = {
        folder / "pyproject.toml": _PROJECT.format(name=name, module=module.name, version=task.version),
        module / "__init__.py": taskset.replace(process.__name__, f"{module.name}.process"),
        module / "process.py": Path(process.__file__).read_text("utf-8"),
        module / "environment.json": json.dumps(described, indent=2),
    }
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes_atomically(path, text.encode())
    return name


def _require_playable(section: TaskSection, task: Task) -> None:
    """Refuse tasks that verifiers cannot play. Raises: ConfigError."""
    reasons = {
        "verifiers conducts its attempts already": section.name == "verifiers",
        "a program conducts its attempts": section.agent is not None,
        "a run starts its judge or its sandboxes": bool(role_judges(section)) or needs_service(section),
        "the run decides task.thinking and task.order_file": (
            section.thinking != "model_default" or section.order_file is not None
        ),
    }
    if reason := next((why for why, holds in reasons.items() if holds), None):
        raise ConfigError(
            f"{task.name} cannot be played by verifiers: {reason}",
            allowed="tasks and environments that are played by strop's process alone",
            next_step="change these settings, or export another one",
        )
