"""Looking at user code without running it here: in a process of its own, killed at a limit.

Planning on a login node learns what a file holds; neither an endless loop in it nor what it prints or forks
reaches the planner.
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
"""Wall time that importing the user's module may take; what it imports may be PyTorch, on a busy machine."""
_LOOK_EVERY_S = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectedFunction:
    """A function of the user's, as its signature says."""

    parameters: tuple[str, ...]
    """Those that can be given by name."""
    required: frozenset[str]
    takes_others: bool
    """Whether it takes any further name, as `**columns`."""
    line: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectedTask:
    """A task class of the user's, and what its settings class makes of some settings."""

    meaning: str
    """Its docstring."""
    schema: Mapping[str, Any]
    """Of the settings, as JSON Schema; empty where it takes none."""
    values: Mapping[str, Any]
    """All settings, completed by their defaults; empty where there are mistakes."""
    mistakes: tuple[tuple[str, str], ...]
    """Dotted setting, and what is wrong with it; '' where there is no such setting."""
    line: int | None
    path: Path
    """The file that the class is in."""
    is_environment: bool
    """Whether its attempts may have several turns: it has `reset`."""
    has_sandbox: bool
    """Whether each attempt has a sandbox: it has `sandbox_for`."""


def inspect_function(ref: CodeRef) -> InspectedFunction:
    """Return the signature of a function.

    Raises: ConfigError if the file is missing, cannot be imported, does not end, or has no such function.
    """
    found = _look(ref, "function")
    if found["unnamed"]:
        raise _refuse(ref, f"takes {', '.join(found['unnamed'])} by position alone", "parameters with names")
    return InspectedFunction(
        parameters=tuple(found["parameters"]),
        required=frozenset(found["required"]),
        takes_others=found["takes_others"],
        line=found["line"],
    )


def inspect_import(ref: CodeRef) -> None:
    """Import the module in a process of its own, to see that it ends. Raises: ConfigError as above."""
    _look(ref, "object")


def inspect_task(ref: CodeRef, settings: Mapping[str, Any]) -> InspectedTask:
    """Return what a task class is, and its settings completed.

    Raises: ConfigError like `inspect_function`.
    """
    found = _look(ref, "task", settings)
    return InspectedTask(
        meaning=found["meaning"],
        schema=found["schema"],
        values=found["values"],
        mistakes=tuple((name, text) for name, text in found["mistakes"]),
        line=found["line"],
        path=Path(found["path"]),
        is_environment=found["is_environment"],
        has_sandbox=found["has_sandbox"],
    )


def _look(ref: CodeRef, kind: str, settings: Mapping[str, Any] | None = None) -> dict[str, Any]:
    order = {"kind": kind, "settings": settings or {}}
    found = run_apart(probe.__name__, ref, order, limit_s=IMPORT_LIMIT_S, doing="imported")
    if "fault" in found:
        line = f" (line {found['line']})" if found.get("line") else ""
        allowed = "a function"
        if kind == "task":
            methods = ", ".join(probe.TASK_METHODS)
            allowed = f"a class with {methods}; an environment with {', '.join(probe.ENVIRONMENT_METHODS)}"
        raise _refuse(ref, found["fault"] + line, allowed)
    return found


def run_apart(
    module: str,
    ref: CodeRef,
    order: Mapping[str, Any],
    *,
    limit_s: float,
    doing: str,
    digest: str | None = None,
) -> dict[str, Any]:
    """Have a process do something with user code; return its answer.

    `module` is run as `python -m MODULE FD`: it reads the order with `ref` in it from standard input, and
    writes a table as JSON to the file. `doing` says in a message what was not done in time, `digest` which
    code it must be; otherwise it is what the file holds now.

    Raises: ConfigError if the file is missing or edited, the process ends without an answer or refuses.
    """
    if ref.is_file:
        if not ref.path.is_file():
            raise _refuse(ref, f"is in {ref.path}, which does not exist", "an existing file of Python")
        digest = digest or hash_sources(ref.path)
    whole = {**order, "ref": {"place": ref.place, "name": ref.name}, "digest": digest}
    text = json.dumps(whole, sort_keys=True)
    found: dict[str, Any] = json.loads(_ask(module, text, limit_s, doing))
    if "refused" in found:
        raise ConfigError(found["refused"])
    return found


@lru_cache(maxsize=64)
def _ask(module: str, order: str, limit_s: float, doing: str) -> str:
    """Ask a process. The order has the digest of the code, so that an edited file is looked at again."""
    ref = CodeRef(**json.loads(order)["ref"])
    with tempfile.TemporaryFile() as question, tempfile.TemporaryFile() as answers:
        question.write(order.encode())
        question.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(answers.fileno())],
            pass_fds=[answers.fileno()],
            stdin=question,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        is_late = not _has_ended(process.pid, limit_s)
        # Before it is waited for, so that its group is its own still: what it forked goes with it.
        os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        answers.seek(0)
        answer = answers.read().decode()
    if is_late:
        raise _refuse(ref, f"was not {doing} after {limit_s:g} s", "code that is done in less time")
    if not answer:
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        raise _refuse(ref, f"ended the process in which it was {doing} ({how})", "code that lets it go on")
    return answer


def _has_ended(pid: int, limit_s: float) -> bool:
    """Wait for a child's end; it stays to be waited for."""
    ends_at = time.monotonic() + limit_s
    while time.monotonic() < ends_at:
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None:
            return True
        time.sleep(_LOOK_EVERY_S)
    return False


def _refuse(ref: CodeRef, what: str, allowed: str) -> ConfigError:
    return ConfigError(f"{ref} {what}", allowed=allowed, next_step=f"correct {ref.place}")
