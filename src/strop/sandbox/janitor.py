"""Remove what is left of sandboxes whose client was killed: folders, processes, groups, containers.

A client's folder is locked as long as it lives. Only what belongs to a folder that nobody locks is touched.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from strop.sandbox.agent import remove_tree
from strop.sandbox.cgroup import find_controllers, remove_abandoned
from strop.sandbox.container import ENGINES, remove_container, run_engine
from strop.sandbox.ground import FOLDER_PREFIX, SCRATCH_BASES

_YOUNG_S = 2.0
"""A folder that was just made may not have been locked yet."""
_END_LIMIT_S = 5.0
_CONTAINER = re.compile(rf"({FOLDER_PREFIX}[0-9a-f]{{16}})-[0-9]+")


def clear_abandoned() -> list[str]:
    """Remove everything that belongs to no living client; return a line for each removal. Idempotent."""
    dead = {path.name for path in _find_dead()}
    return [
        *(f"container {name}" for engine in ENGINES for name in _remove_containers(engine, dead)),
        *sweep(),
    ]


def sweep() -> list[str]:
    """Remove folders, with the processes that work in them, and control groups; return a line for each."""
    cleared = []
    for path in _find_dead():
        cleared += [f"process {pid} in {path}" for pid in end_inside(path)]
        remove_tree(path)
        cleared.append(f"directory {path}")
    remove_abandoned(find_controllers())
    return cleared


def end_inside(path: Path) -> list[int]:
    """Kill the processes whose working directory is in a tree, until none is left; return them."""
    ended: set[int] = set()
    deadline = time.monotonic() + _END_LIMIT_S
    while time.monotonic() < deadline:
        found = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError):
                if f"{os.readlink(f'/proc/{name}/cwd')}/".startswith(f"{path}/"):
                    found.append(int(name))
                    os.kill(int(name), signal.SIGKILL)
        if not found:
            break
        ended.update(found)
        time.sleep(0.01)
    return sorted(ended)


def _find_dead() -> Iterator[Path]:
    """Yield this user's folders that no client holds."""
    for base in SCRATCH_BASES:
        for path in Path(base).glob(f"{FOLDER_PREFIX}*"):
            with suppress(OSError):
                info = path.lstat()
                if info.st_uid != os.geteuid() or abs(time.time() - info.st_mtime) < _YOUNG_S:
                    continue
                lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    yield path
                finally:
                    os.close(lock)


def _remove_containers(engine: str, dead: set[str]) -> list[str]:
    """Remove the containers whose client's folder is dead or gone; return their names."""
    # Listing would make an ordinary user's podman create its image store, and a process.
    program = shutil.which(engine)
    if program is None or (os.geteuid() != 0 and not dead):
        return []
    try:
        names = run_engine(
            engine, "ps", "--all", "--format", "{{.Names}}", "--filter", f"name={FOLDER_PREFIX}"
        )
    except OSError:
        # An engine that does not work has made no containers.
        return []
    removed = []
    for name in names.split():
        match = _CONTAINER.fullmatch(name)
        if match and (match[1] in dead or not any(Path(base, match[1]).exists() for base in SCRATCH_BASES)):
            remove_container(program, name)
            removed.append(name)
    return removed
