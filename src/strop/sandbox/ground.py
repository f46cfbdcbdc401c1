"""What the sandboxes of one process share: its folder, the agent's file, control groups, this host's facts.

The folder is locked as long as this process lives. What belongs to no locked folder is swept by `janitor`,
also before the first sandbox of a process.
"""

from __future__ import annotations

import atexit
import fcntl
import itertools
import os
import py_compile
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from strop.sandbox import agent
from strop.sandbox.cgroup import Controller, find_controllers, hand_down_controllers

FOLDER_PREFIX = "strop-sandbox-"
"""Prefix of the names of folders, and of containers, which are called after them."""
SCRATCH_BASES = ("/tmp", "/var/tmp", "/dev/shm")
"""A folder is made in the first of these that this process can write to."""
NUM_IDS = 1 << 16
"""Users of a container's image: 0 to 65535."""
# systemd's table of user ids leaves 0x70000000 to 0x7fffffff unused; process ids are below 2**22.
_FIRST_UID = 0x70000000
_NOBODY = 65534
_MAX_ERROR_CHARACTERS = 600


@dataclass(kw_only=True, slots=True)
class Ground:
    """The preparations of one process."""

    folder: Path
    """A directory that every user may enter. It contains the private directories."""
    lock: int
    controllers: list[Controller]
    namespaces: dict[str, str]
    """Identities of this process's namespaces, by kind."""
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def inside(self) -> Path:
        """What containers see as /.strop: the agent, and the libraries of its Python."""
        return self.folder / "inside"


_grounds: dict[int, Ground] = {}
"""By process, since a fork inherits this table."""


def ground_of() -> Ground:
    """Return this process's ground; a fork gets another one. Raises: OSError."""
    from strop.sandbox.janitor import sweep

    if (ground := _grounds.get(os.getpid())) is None:
        base = next((path for path in SCRATCH_BASES if os.access(path, os.W_OK)), SCRATCH_BASES[0])
        sweep()
        folder = Path(base, f"{FOLDER_PREFIX}{os.urandom(8).hex()}")
        folder.mkdir()
        folder.chmod(0o711)
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        hand_down_controllers()
        ground = Ground(folder=folder, lock=lock, controllers=find_controllers(), namespaces={})
        for name in ("python", "link", "lib"):
            (ground.inside / name).mkdir(parents=True)
        py_compile.compile(agent.__file__, str(ground.inside / "agent.pyc"), doraise=True)
        _grounds[os.getpid()] = ground
    # They may change: a thread can enter others.
    ground.namespaces = agent.read_namespaces()
    return ground


@atexit.register
def leave_ground() -> None:
    """Remove this process's folder; sandboxes that are left end with their connections."""
    if (ground := _grounds.pop(os.getpid(), None)) is not None:
        agent.remove_tree(ground.folder)
        os.close(ground.lock)


@cache
def python_candidates() -> tuple[str, ...]:
    """Return interpreters to try inside, this process's own first."""
    base = getattr(sys, "_base_executable", None) or sys.executable
    paths = [os.path.realpath(base), "/usr/bin/python3", "/usr/local/bin/python3"]
    return tuple(dict.fromkeys(paths))


def own_prefix() -> str:
    """Return the folder of this process's Python."""
    return os.path.realpath(sys.base_prefix)


@cache
def loader_argv(inside: Path) -> tuple[str, ...]:
    """Copy the libraries of this process's Python; return the words that start it in a root without any.

    Raises: OSError if this Python has no dynamic loader.
    """
    python = python_candidates()[0]
    modules = Path(own_prefix(), "lib").glob("python*/lib-dynload/*.so")
    needed = (
        "_ctypes",
        "_json",
        "_socket",
        "_struct",
        "array",
        "fcntl",
        "math",
        "resource",
        "select",
        "termios",
    )
    files = [python, *(str(path) for path in modules if path.name.split(".")[0] in needed)]
    loader = ""
    for line in run_program(["ldd", *files]).splitlines():
        path = next((word for word in line.split("=>")[-1].split() if word.startswith("/")), "")
        if path.endswith(":") or not os.path.exists(path):
            continue
        shutil.copyfile(path, inside / "lib" / os.path.basename(path))
        if "=>" not in line:
            loader = os.path.basename(path)
    if not loader:
        raise OSError(f"{python} is not linked dynamically, so it cannot run in the root of an image")
    (inside / "lib" / loader).chmod(0o755)
    within = os.path.relpath(python, own_prefix())
    return (f"/.strop/lib/{loader}", "--library-path", "/.strop/lib", f"/.strop/python/{within}")


def private_user(pid: int) -> tuple[int, bool]:
    """Return a host user for the programs of a sandbox, and whether nobody else has it.

    `pid`: its first process. An ordinary user gets its own id.
    """
    if os.geteuid() != 0:
        return os.geteuid(), False
    ranges = [
        tuple(map(int, line.split())) for line in agent.read_or_empty("/proc/self/uid_map").splitlines()
    ]
    for uid, is_private in ((_FIRST_UID + pid, True), (_NOBODY, False)):
        # On a kernel without user namespaces every id exists.
        if not ranges or any(first <= uid < first + length for first, _, length in ranges):
            return uid, is_private
    return os.geteuid(), False


def count_user_tasks(uid: int) -> int:
    """Return how many processes and threads a user has on this host."""
    num_tasks = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            if os.stat(f"/proc/{name}").st_uid == uid:
                num_tasks += len(os.listdir(Path("/proc", name, "task")))
    return num_tasks


def map_id(uid_map: str, inside: int) -> int | None:
    """Return the id outside of an id in a user namespace, from its uid_map; None if there is none."""
    for first, outside, length in (map(int, line.split()) for line in uid_map.splitlines()):
        if first <= inside < first + length:
            return outside + inside - first
    return None


def run_program(
    words: Sequence[str], env: Mapping[str, str] | None = None, *, stdin: bytes = b"", limit_s: float = 120.0
) -> str:
    """Run a program of this host and return its standard output. Raises: OSError with its standard error."""
    try:
        done = subprocess.run(words, env=env, input=stdin, capture_output=True, check=False, timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        raise OSError(f"{words[0]} gave no answer in {limit_s:.0f} s") from error
    if done.returncode:
        told = done.stderr.decode(errors="replace").strip()[-_MAX_ERROR_CHARACTERS:]
        raise OSError(f"{os.path.basename(words[0])} {words[1]}: {told or f'exit code {done.returncode}'}")
    return done.stdout.decode(errors="replace")
