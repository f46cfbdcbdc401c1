"""What judged programs leave on this machine, and their ancestors: read from /proc and temporary folders.

Linux only; elsewhere nothing is found, and the probes that need it do not apply.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from strop.sandbox.daemon import SCRATCH_BASES

_PROC = Path("/proc")
_MAX_DEPTH = 3
_LOOK_EVERY_S = 0.05
_MAX_ENTRIES = 50_000


def can_look() -> bool:
    """Whether processes of this machine can be listed."""
    return (_PROC / "self" / "comm").exists()


def find_processes(name: str) -> list[int]:
    """Return the ids of processes that named themselves so, in any namespace."""
    return [pid for pid in _list_pids() if _read(pid, "comm").strip() == name]


def wait_for_end(name: str, limit_s: float) -> list[int]:
    """Wait until no process has this name, at most `limit_s`; return those that are left."""
    until = time.monotonic() + limit_s
    while (left := find_processes(name)) and time.monotonic() < until:
        time.sleep(_LOOK_EVERY_S)
    return left


def find_files(name: str) -> list[str]:
    """Return files of this name, or with it as their stem, near the tops of all temporary folders."""
    tops = dict.fromkeys([tempfile.gettempdir(), *SCRATCH_BASES, os.getcwd()])
    return [path for top in tops for path in _walk(top) if os.path.basename(path).partition(".")[0] == name]


def kill_sandbox_of(pid: int) -> bool:
    """Kill the process outside that holds a program's namespace; return whether there is one.

    It is the first ancestor that the program cannot see, so its end is never the program's doing.
    """
    depth = _namespace_depth(pid)
    ancestor = _parent_of(pid)
    while ancestor and ancestor != os.getpid() and _namespace_depth(ancestor) >= depth:
        ancestor = _parent_of(ancestor)
    if not ancestor or ancestor == os.getpid() or os.getpid() not in _ancestors_of(ancestor):
        return False
    with suppress(ProcessLookupError, PermissionError):
        os.kill(ancestor, signal.SIGKILL)
        return True
    return False


def _ancestors_of(pid: int) -> Iterator[int]:
    while pid := _parent_of(pid):
        yield pid


def _list_pids() -> list[int]:
    with suppress(OSError):
        return [int(entry) for entry in os.listdir(_PROC) if entry.isdigit()]
    return []


def _read(pid: int, name: str) -> str:
    try:
        return (_PROC / str(pid) / name).read_text(errors="replace")
    except OSError:
        return ""


def _status(pid: int, key: str) -> list[str]:
    lines = [line for line in _read(pid, "status").splitlines() if line.startswith(f"{key}:")]
    return lines[0].split()[1:] if lines else []


def _parent_of(pid: int) -> int:
    words = _status(pid, "PPid")
    return int(words[0]) if words else 0


def _namespace_depth(pid: int) -> int:
    """Return in how many process namespaces a process has an id."""
    return len(_status(pid, "NSpid"))


def _walk(top: str) -> Iterator[str]:
    num = 0
    queue = [(top, 0)]
    while queue and num < _MAX_ENTRIES:
        folder, depth = queue.pop(0)
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                num += 1
                yield entry.path
                if depth + 1 < _MAX_DEPTH and entry.is_dir(follow_symlinks=False):
                    queue.append((entry.path, depth + 1))
