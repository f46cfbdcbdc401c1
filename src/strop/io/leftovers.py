"""Names of unfinished files, and the removal of those whose writer is gone.

An unfinished `x` is named `x.partial-<pid>-<host tag><random>`. The host tag identifies the machine and its
pid namespace, because a process id means nothing on another machine or in another container.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import socket
import time
from contextlib import suppress
from pathlib import Path

LEFTOVER_PATTERN = re.compile(r"\.partial-(?P<pid>\d+)-(?P<host_tag>[0-9a-f]{6})[0-9a-f]{8}(?P<old>-old)?$")
# A writer on another machine cannot be checked, but no single write stays untouched for a day.
FOREIGN_AGE_S = 86_400.0
# Boot time and file times come from clocks that may differ by a tick or a correction.
_CLOCK_SLACK_S = 2.0


def partial_path_of(path: Path) -> Path:
    """Return a fresh name beside `path` for its unfinished form."""
    return path.with_name(f"{path.name}.partial-{os.getpid()}-{_host_tag()}{secrets.token_hex(4)}")


def remove_leftovers(parent: Path, *, now: float | None = None) -> list[Path]:
    """Remove and return unfinished files of dead writers directly under `parent`.

    A writer is dead if its process id is unused on this machine, or belongs to a process that started after
    the last change of the file; a writer on another machine is dead if the file was not changed for a day.
    """
    removed = []
    for entry in sorted(parent.glob("*.partial-*")):
        match = LEFTOVER_PATTERN.search(entry.name)
        if match is None or not _is_abandoned(
            entry, int(match["pid"]), match["host_tag"], now or time.time()
        ):
            continue
        final_path = entry.with_name(entry.name[: match.start()])
        if match["old"] and not final_path.exists():
            # The writer died between the two renames of a replacement: this is the only good copy.
            entry.rename(final_path)
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)
        removed.append(entry)
    return removed


def process_started_at(pid: int) -> float | None:
    """Return a process's start in Unix seconds; None if it is gone or the system does not show it."""
    import psutil  # Here, because a node's agent has none.

    try:
        return float(psutil.Process(pid).create_time())
    except (psutil.Error, OSError, RuntimeError, LookupError, ValueError):
        # In some containers the files of /proc are empty or have other lines.
        return None


def _is_abandoned(entry: Path, pid: int, host_tag: str, now: float) -> bool:
    try:
        touched_at = entry.lstat().st_mtime
    except FileNotFoundError:
        return False
    if host_tag != _host_tag():
        return now - touched_at > FOREIGN_AGE_S
    try:
        with suppress(PermissionError):  # Another user's.
            os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return (process_started_at(pid) or 0.0) > touched_at + _CLOCK_SLACK_S


def _host_tag() -> str:
    namespace = ""
    with suppress(OSError):  # Linux alone has it.
        namespace = str(Path("/proc/self/ns/pid").readlink())
    return hashlib.sha256(f"{socket.gethostname()}/{namespace}".encode()).hexdigest()[:6]
