"""A piece of work in namespaces and directories of its own, so that what it leaves can be counted.

What a service of sandboxes leaves on a host is processes, mounts, sockets, control groups, directories,
containers, claims of user ids and System V memory. On a host that others use as well nobody could say whose
they are. Here the host is made anew: every one that is there at the end, and was not before, is a leftover.
Needs root, `unshare` and `ip`; where control groups are of version 2 alone, the work makes none of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from strop.sandbox.cgroup import find_controllers, find_freezers, remove_group
from strop.sandbox.daemon import SCRATCH_BASES
from strop.sandbox.linux import read_file

ROOT = Path(__file__).parents[1]
FOLDER = Path("/mnt")
"""Where the work finds the folder that it may keep things in."""
_FRESH = (*SCRATCH_BASES, "/run", "/var/lib/containers")
"""Directories that are empty for the work, and gone after it."""
_NAMESPACES = ("--mount", "--pid", "--ipc", "--net", "--fork", "--kill-child", "--mount-proc")
_FIRST_PID = 3_000_000
"""Above what a host counts to, where a kernel allows it: a sandbox's user is numbered by its process."""
_SETTLE_S = 5.0
"""What the kernel still lists so long after the end is a leftover."""
_SOCKETS = ("tcp", "tcp6", "udp", "udp6", "raw", "raw6")
_CLAIM = "@strop-"


def can_run_apart() -> bool:
    """Whether this user and host can."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "ip"))):
        return False
    return subprocess.run(["unshare", *_NAMESPACES, "true"], capture_output=True, check=False).returncode == 0


def run_apart(module: str, options: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Run `python -m MODULE OPTIONS` apart, and return the JSON object of its last line of output.

    Raises: RuntimeError if it fails.
    """
    words = [sys.executable, "-m", "benchmarks.apart", str(folder), module, json.dumps(options)]
    done = subprocess.run(["unshare", *_NAMESPACES, *words], stdout=subprocess.PIPE, cwd=ROOT, check=False)
    for path in _find_own_groups(f"apart-{folder.name}"):
        for inner in sorted(path.glob("**/"), reverse=True):
            remove_group(inner)
    lines = done.stdout.decode().splitlines()
    if done.returncode or not lines:
        raise RuntimeError(f"{module} ended with {done.returncode}")
    return dict(json.loads(lines[-1]))


def main(folder: str, module: str, options: str) -> int:
    """Be process 1: prepare the place, start the work, wait for it and for every orphan."""
    with suppress(OSError):
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(_FIRST_PID))
    subprocess.run(["mount", "--bind", folder, str(FOLDER)], check=True)
    for place in _FRESH:
        mode = "1777" if place in SCRATCH_BASES else "755"
        if os.path.isdir(place):
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"mode={mode}", "fresh", place], check=True)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    for path in _find_own_groups(f"apart-{Path(folder).name}"):
        with suppress(OSError):
            path.mkdir(exist_ok=True)
            (path / "cgroup.procs").write_text("0")
    work = subprocess.Popen([sys.executable, "-m", module, options], cwd=ROOT)
    while True:
        pid, status = os.wait()
        if pid == work.pid:
            return os.waitstatus_to_exitcode(status) & 0xFF


def _find_own_groups(name: str) -> list[Path]:
    places = {one.own_dir for one in find_controllers()} | {path for _, path in find_freezers()}
    return sorted(place / name for place in places)


class Leftovers:
    """What is there beyond what was there when this was made."""

    def __init__(self) -> None:
        self.container_ids: set[str] = set()
        """Of all containers that were seen. Their groups stand outside of the work's own."""
        self._before = self._list()

    def note_containers(self) -> None:
        """Remember the containers that are there now."""
        with suppress(OSError):
            names = os.listdir("/var/lib/containers/storage/overlay-containers")
            self.container_ids.update(name for name in names if len(name) == 64)

    def find(self) -> dict[str, list[str]]:
        """Return what is left, by kind, once the kernel has had time to let it go."""
        deadline = time.monotonic() + _SETTLE_S
        while True:
            now = self._list()
            left = {kind: sorted(now[kind] - self._before[kind]) for kind in now}
            if not any(left.values()) or time.monotonic() > deadline:
                return left
            time.sleep(0.1)

    def _list(self) -> dict[str, set[str]]:
        kinds: dict[str, Callable[[], Iterator[str]]] = {
            # First: podman makes what it keeps for ever.
            "containers": _containers,
            "processes": _processes,
            "mounts": _mounts,
            "sockets": _sockets,
            "control groups": self._groups,
            "directories": _directories,
            "claims": _claims,
            "shared memory": _shared_memory,
        }
        return {kind: set(find()) for kind, find in kinds.items()}

    def _groups(self) -> Iterator[str]:
        for own in {one.own_dir for one in find_controllers()} | {path for _, path in find_freezers()}:
            yield from (str(path) for path in own.iterdir() if path.is_dir())
        for path in Path("/sys/fs/cgroup").glob("*/libpod_parent/*"):
            if path.is_dir() and path.name.rpartition("-")[2] in self.container_ids:
                yield str(path)


def read_command(pid: int | str) -> str:
    """Return the command line of a process, empty if it is gone or of the kernel's."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


def _processes() -> Iterator[str]:
    own = {"1", str(os.getpid())}
    for name in os.listdir("/proc"):
        if name.isdigit() and name not in own and (words := read_command(name)):
            yield f"{name} {words[:160]}"


def _mounts() -> Iterator[str]:
    for line in read_file("/proc/self/mountinfo").splitlines():
        yield line.split()[4]


def _sockets() -> Iterator[str]:
    for kind in _SOCKETS:
        for line in read_file(f"/proc/net/{kind}").splitlines()[1:]:
            words = line.split()
            # TIME_WAIT is the kernel's own, and ends by itself.
            if words[3] != "06":
                yield f"{kind} {words[1]} {words[3]}"


def _directories() -> Iterator[str]:
    for base in SCRATCH_BASES:
        for name in os.listdir(base):
            yield f"{base}/{name}"


def _containers() -> Iterator[str]:
    if shutil.which("podman") is None:
        return
    words = ["podman", "ps", "--all", "--format", "{{.Names}}"]
    listed = subprocess.run(words, capture_output=True, text=True, check=False)
    yield from listed.stdout.split()
    for place in ("/run/runc", "/run/crun"):
        with suppress(OSError):
            yield from (f"{place}/{name}" for name in os.listdir(place))


def _claims() -> Iterator[str]:
    for line in read_file("/proc/net/unix").splitlines()[1:]:
        name = line.split()[-1]
        if name.startswith(_CLAIM):
            yield name


def _shared_memory() -> Iterator[str]:
    for kind in ("shm", "sem", "msg"):
        for line in read_file(f"/proc/sysvipc/{kind}").splitlines()[1:]:
            yield f"{kind} {line.split()[1]}"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
