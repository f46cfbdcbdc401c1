"""Inspect user code in a separate process with a time limit.

Planning on a login node can inspect a file, while an endless loop in it, its output and its forks do not
affect the planner.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from strop.errors import ConfigError
from strop.user_code import probe
from strop.user_code.reference import CodeRef
from strop.user_code.sources import hash_sources

IMPORT_LIMIT_S = 60.0
"""Limit of importing the user's module, which may import PyTorch on a busy machine."""
_LOOK_EVERY_S = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectedFunction:
    """The signature of a user's function."""

    parameters: tuple[str, ...]
    """Parameters that can be passed by name."""
    required: frozenset[str]
    takes_others: bool
    """Whether it accepts further names, as `**columns`."""
    line: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectedTask:
    """A user's task class, and its validation of some settings."""

    meaning: str
    """Its docstring."""
    schema: Mapping[str, Any]
    """JSON Schema of the settings; empty if it has none."""
    values: Mapping[str, Any]
    """All settings, completed with defaults; empty if there are mistakes."""
    mistakes: tuple[tuple[str, str], ...]
    """Dotted setting and its error; '' for an unknown setting."""
    line: int | None
    path: Path
    """The file of the class."""
    is_environment: bool
    """Whether its attempts may have several turns, that is, it has `reset`."""
    has_sandbox: bool
    """Whether each attempt has a sandbox, that is, it has `sandbox_for`."""


def inspect_function(ref: CodeRef) -> InspectedFunction:
    """Return the signature of a function.

    Raises: ConfigError if the file is missing, cannot be imported, does not end, or has no such function.
    """
    answer = _inspect(ref, "function")
    if answer["unnamed"]:
        raise _refuse(ref, f"takes {', '.join(answer['unnamed'])} by position alone", "parameters with names")
    return InspectedFunction(
        parameters=tuple(answer["parameters"]),
        required=frozenset(answer["required"]),
        takes_others=answer["takes_others"],
        line=answer["line"],
    )


def inspect_import(ref: CodeRef) -> None:
    """Import the module in a separate process, to check that it ends. Raises: like `inspect_function`."""
    _inspect(ref, "object")


def inspect_task(ref: CodeRef, settings: Mapping[str, Any]) -> InspectedTask:
    """Inspect a task class, and validate and complete its settings.

    Raises: ConfigError like `inspect_function`.
    """
    answer = _inspect(ref, "task", settings)
    return InspectedTask(
        meaning=answer["meaning"],
        schema=answer["schema"],
        values=answer["values"],
        mistakes=tuple((name, text) for name, text in answer["mistakes"]),
        line=answer["line"],
        path=Path(answer["path"]),
        is_environment=answer["is_environment"],
        has_sandbox=answer["has_sandbox"],
    )


def _inspect(ref: CodeRef, kind: str, settings: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Let the probe look at user code. Raises: ConfigError if that is missing, refused, or does not end."""
    if ref.is_file and not ref.path.is_file():
        raise _refuse(ref, f"is in {ref.path}, which does not exist", "an existing file of Python")
    digest = hash_sources(ref.path) if ref.is_file else None
    order = {"kind": kind, "settings": settings or {}, "digest": digest}
    order["ref"] = {"place": ref.place, "name": ref.name}
    answer: dict[str, Any] = json.loads(_run_cached(json.dumps(order, sort_keys=True)))
    if "refused" in answer:
        raise ConfigError(answer["refused"])
    if "fault" in answer:
        line = f" (line {answer['line']})" if answer.get("line") else ""
        allowed = "a function"
        if kind == "task":
            methods = ", ".join(probe.TASK_METHODS)
            allowed = f"a class with {methods}; an environment with {', '.join(probe.ENVIRONMENT_METHODS)}"
        raise _refuse(ref, answer["fault"] + line, allowed)
    return answer


@lru_cache(maxsize=64)
def _run_cached(order: str) -> str:
    """Return the probe's answer. The order's digest of the code makes the cache miss for an edited file."""
    ref = CodeRef(**json.loads(order)["ref"])
    with tempfile.TemporaryFile() as question, tempfile.TemporaryFile() as answers:
        question.write(order.encode())
        question.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-m", probe.__name__, str(answers.fileno())],
            pass_fds=[answers.fileno()],
            stdin=question,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        is_late = not _has_ended(process.pid, IMPORT_LIMIT_S)
        # Before reaping, while the group id cannot be reused; this also kills its forks.
        os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        answers.seek(0)
        answer = answers.read().decode()
    if is_late:
        raise _refuse(ref, f"was not imported after {IMPORT_LIMIT_S:g} s", "code that is done in less time")
    if not answer:
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        raise _refuse(ref, f"ended the process in which it was imported ({how})", "code that lets it go on")
    return answer


def _has_ended(pid: int, limit_s: float) -> bool:
    """Wait for a child's end, without reaping it."""
    ends_at = time.monotonic() + limit_s
    while time.monotonic() < ends_at:
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None:
            return True
        time.sleep(_LOOK_EVERY_S)
    return False


def _refuse(ref: CodeRef, what: str, allowed: str) -> ConfigError:
    return ConfigError(f"{ref} {what}", allowed=allowed, next_step=f"correct {ref.place}")
