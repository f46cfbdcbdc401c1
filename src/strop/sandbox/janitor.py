"""Remove the leftovers of sandboxes whose supervisors and daemon were all killed.

A supervisor cleans up its sandbox, and a daemon cleans up after its supervisors. If all are killed together,
a container, a control group, a directory, and processes in that directory may remain. A daemon's directory is
locked as long as the daemon or one of its sandboxes runs: only leftovers of a directory that is not locked,
or is gone, are touched.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from strop.sandbox.cgroup import find_controllers, remove_abandoned
from strop.sandbox.daemon import FOLDER_PREFIX, SCRATCH_BASES
from strop.sandbox.engine import ENGINES, Engine, engine_environ
from strop.sandbox.family import end_inside
from strop.sandbox.spawning import remove_tree

_YOUNG_S = 2.0
"""A directory that was just made may not have been locked yet."""
_END_LIMIT_S = 5.0
_CONTAINER = re.compile(rf"({FOLDER_PREFIX}[0-9a-f]{{16}})-(image-)?[0-9]+")


def clear_abandoned() -> list[str]:
    """Remove everything that belongs to no running daemon; return a line for each removal. Idempotent."""
    cleared = []
    dead = list(_find_dead())
    try:
        names = {path.name for path, _ in dead}
        for engine_name in ENGINES:
            if (program := shutil.which(engine_name)) is not None:
                engine = Engine(name=engine_name, program=program, environ=engine_environ())
                cleared += [f"container {name}" for name in _remove_containers(engine, names)]
        for path, _ in dead:
            cleared += [f"process {pid} in {path}" for pid in end_inside(str(path))]
            remove_tree(str(path))
            cleared.append(f"directory {path}")
        remove_abandoned(find_controllers())
    finally:
        for _, descriptor in dead:
            os.close(descriptor)
    return cleared


def _find_dead() -> Iterator[tuple[Path, int]]:
    """Yield the directories of this user that no daemon holds, each locked by a descriptor."""
    for base in SCRATCH_BASES:
        for path in Path(base).glob(f"{FOLDER_PREFIX}*"):
            with suppress(OSError):
                info = path.lstat()
                is_young = abs(time.time() - info.st_mtime) < _YOUNG_S
                if info.st_uid != os.geteuid() or not stat.S_ISDIR(info.st_mode) or is_young:
                    continue
                descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    os.close(descriptor)
                    continue
                yield path, descriptor


def _remove_containers(engine: Engine, dead: set[str]) -> list[str]:
    """Remove the containers whose daemon's directory is dead or gone; return their names.

    Removal is retried, since to podman a process runs until init has reaped it.
    """
    removed: set[str] = set()
    deadline = time.monotonic() + _END_LIMIT_S
    while (containers := _find_containers(engine, dead)) and time.monotonic() < deadline:
        for name, container_id in containers.items():
            engine.remove(name, container_id)
        removed.update(containers)
    return sorted(removed)


def _find_containers(engine: Engine, dead: set[str]) -> dict[str, str]:
    """Return the containers whose daemon's directory is dead or gone: names and the engine's ids."""
    # Listing would make an ordinary user's podman create its image store, and a process.
    if os.geteuid() != 0 and not dead:
        return {}
    try:
        ids = engine.list_containers(FOLDER_PREFIX)
    except OSError:
        # An engine that does not work has made no containers.
        return {}
    matches = [match for name in ids if (match := _CONTAINER.fullmatch(name))]
    return {
        match[0]: ids[match[0]]
        for match in matches
        if match[1] in dead or not any(Path(base, match[1]).exists() for base in SCRATCH_BASES)
    }
