"""Names of unfinished files, and the removal of those whose writer is gone.

An unfinished `x` is called `x.partial-<pid>-<host tag><random>`. The host tag names the machine and its
process-id namespace, because on a shared disk or from another container a process id means nothing.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

LEFTOVER_PATTERN = re.compile(r"\.partial-(?P<pid>\d+)-(?P<host_tag>[0-9a-f]{6})[0-9a-f]{8}(?P<old>-old)?$")
# A writer on another machine cannot be asked; no single write stays untouched for a day.
FOREIGN_AGE_S = 86_400.0
# Boot time and file times come from clocks that may differ by a tick or a correction.
CLOCK_SLACK_S = 2.0


def partial_path_of(path: Path) -> Path:
    """Return a fresh name beside `path` for its unfinished form."""
    return path.with_name(f"{path.name}.partial-{os.getpid()}-{_host_tag()}{secrets.token_hex(4)}")


def remove_leftovers(parent: Path, *, now: float | None = None) -> list[Path]:
    """Remove what writers that are gone left unfinished directly under `parent`; return what went.

    Gone means: the process id is free on this machine, or was taken by a process that started after
    the leftover was last touched; or, for another machine's writer, untouched for a day.
    """
    instant = time.time() if now is None else now
    removed = []
    for entry in sorted(parent.glob("*.partial-*")) if parent.is_dir() else []:
        match = LEFTOVER_PATTERN.search(entry.name)
        if match is None or not _is_abandoned(entry, int(match["pid"]), match["host_tag"], instant):
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


def is_process_alive(pid: int) -> bool:
    """Whether a process id is in use on this machine, by anyone."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def process_started_at(pid: int) -> float | None:
    """Return when a process started (Unix seconds), or None if it is gone or the system does not tell."""
    import psutil

    try:
        return float(psutil.Process(pid).create_time())
    except (psutil.Error, OSError, RuntimeError, LookupError, ValueError):
        # Some containers show the files of /proc empty, or with other lines.
        return None


def _is_abandoned(entry: Path, pid: int, host_tag: str, now: float) -> bool:
    try:
        touched_at = entry.lstat().st_mtime
    except FileNotFoundError:
        return False
    if host_tag != _host_tag():
        return now - touched_at > FOREIGN_AGE_S
    if not is_process_alive(pid):
        return True
    started_at = process_started_at(pid)
    return started_at is not None and started_at > touched_at + CLOCK_SLACK_S


def _host_tag() -> str:
    namespace = ""
    if sys.platform == "linux":
        with suppress(OSError):
            namespace = str(Path("/proc/self/ns/pid").readlink())
    return hashlib.sha256(f"{socket.gethostname()}/{namespace}".encode()).hexdigest()[:6]
