"""Clears up after sandboxes whose supervisors and daemon were all killed, and after no others.

Sandboxes clear up after themselves, and a daemon after its supervisors. When both are killed together, most
of it ends with them; what can stay is a container, a control group, a directory, and processes that work in
it. A daemon holds a lock on its directory as long as it or one of its sandboxes lives: only what belongs to a
directory that is not locked, or is gone, is touched.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from strop.hardware.identity import read_start_ticks, send_signal
from strop.sandbox.cgroup import find_controllers, find_freezers, remove_abandoned, remove_group
from strop.sandbox.daemon import FOLDER_PREFIX, SCRATCH_BASES
from strop.sandbox.engine import ENGINES, Engine, engine_environ
from strop.sandbox.family import end_inside, parent_of
from strop.sandbox.freezer import FREEZER_FILES
from strop.sandbox.linux import read_file, write_file
from strop.sandbox.spawning import remove_tree

_YOUNG_S = 2.0
"""A directory that was just made may not have been locked yet."""
_END_LIMIT_S = 5.0
_CONTAINER = re.compile(rf"({FOLDER_PREFIX}[0-9a-f]{{16}})-(image-)?[0-9]+")


def clear_abandoned() -> list[str]:
    """Remove what belongs to no living daemon; return a line for each thing removed. Idempotent."""
    cleared = []
    dead = list(_find_dead())
    try:
        # First: a container whose processes cannot end is not removed.
        cleared += [f"process {pid}, frozen" for pid in _end_frozen()]
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
                found = path.lstat()
                is_young = abs(time.time() - found.st_mtime) < _YOUNG_S
                if found.st_uid != os.geteuid() or not stat.S_ISDIR(found.st_mode) or is_young:
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

    It tries more than once: to podman a process still runs until init has waited for it.
    """
    removed: set[str] = set()
    deadline = time.monotonic() + _END_LIMIT_S
    while (found := _find_containers(engine, dead)) and time.monotonic() < deadline:
        for name, container_id in found.items():
            engine.remove(name, container_id)
        removed.update(found)
    return sorted(removed)


def _find_containers(engine: Engine, dead: set[str]) -> dict[str, str]:
    """Return the containers whose daemon's directory is dead or gone, with the engine's ids of them."""
    # An ordinary user's podman makes a place for its images, and a process, where there was none.
    if os.geteuid() != 0 and not dead:
        return {}
    try:
        found = engine.list_containers(FOLDER_PREFIX)
    except OSError:
        # An engine that does not work has made no containers.
        return {}
    matches = [match for name in found if (match := _CONTAINER.fullmatch(name))]
    return {
        one[0]: found[one[0]]
        for one in matches
        if one[1] in dead or not any(Path(base, one[1]).exists() for base in SCRATCH_BASES)
    }


def _end_frozen() -> list[int]:
    """Kill what stands still in groups whose supervisors, and all above them, were killed; return it.

    The kernel lets nothing that is frozen end before it is thawed.
    """
    ended = []
    for version, own_dir in find_freezers():
        file, _, word = FREEZER_FILES[version]
        for path in own_dir.glob("strop-[0-9]*"):
            with suppress(OSError):
                supervisor = int(path.name.rpartition("-")[2])
                pids = list(map(int, read_file(path / "cgroup.procs").split()))
                # 0 is a process of another namespace, whose numbers say nothing here.
                # Its own may look like a daemon, whose forks they are.
                above = {parent_of(pid) for pid in pids} - set(pids)
                if 0 in pids or any(map(_is_watched, [supervisor, *above])):
                    continue
                ended += [pid for pid in pids if _kill(pid)]
                write_file(path / file, word)
                remove_group(path)
    return ended


def _is_watched(pid: int | None) -> bool:
    """Whether a sandbox's daemon is a process, or above it."""
    while pid:
        with suppress(OSError):
            if "strop.sandbox.daemon" in read_file(f"/proc/{pid}/cmdline"):
                return True
        pid = parent_of(pid)
    return False


def _kill(pid: int) -> bool:
    start_ticks = read_start_ticks(pid)
    return start_ticks is not None and send_signal(pid, start_ticks, signal.SIGKILL)
