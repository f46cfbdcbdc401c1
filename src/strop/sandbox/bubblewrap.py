"""Backend `bubblewrap`: user, process, mount, network, IPC and host-name namespaces, made by bwrap.

bwrap starts with an empty environment and, as host root, as the sandbox's private user: inside a user
namespace the host's root could still read every file. The root directory holds /usr, the links into it,
/proc, a small /dev and the spec's mounts, all read-only; /tmp and /dev/shm are in memory and bounded. Process
1 is `cat`, which nothing inside can kill; commands join it from outside in about 2 ms each.

Covered: all of level `namespace`; the end of process 1 kills all processes.
Not covered: a private root; total memory is watched where control groups cannot be made; for an ordinary
user, a program may trace process 1 and break it, which ends its own sandbox and is noticed.
Tried with bubblewrap 0.8.0 on Linux 6.18, as root and as an ordinary user.
"""

from __future__ import annotations

import json
import os
import select
import signal
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from strop.sandbox.cgroup import make_cgroup
from strop.sandbox.contract import WORKSPACE, Guard, Isolation, IsolationLevel
from strop.sandbox.linux import (
    ALL_NAMESPACES,
    CLONE_NEWNET,
    CLONE_NEWPID,
    acting_as,
    enter_namespaces,
    limit_files,
    read_file,
)
from strop.sandbox.place import (
    Ground,
    Order,
    Watch,
    guard,
    inside_fields,
    is_contained,
    network_word,
    own_namespaces,
)

_FIRST = "/.strop/cat"
INSIDE_ID = 1000
"""User and group id of programs inside."""
_START_LIMIT_S = 10.0
# Since Linux 5.14 a user's processes are counted per user namespace.
_KERNEL_WITH_COUNTS = (5, 14)


class BubblewrapPlace:
    """A set of namespaces, held by process 1."""

    scratch = "/tmp"
    has_own_disk = True
    moved_mounts: Mapping[str, str] = {}
    capabilities = 0

    def __init__(self, order: Order, ground: Ground, uid: int, *, is_private_uid: bool) -> None:
        self.limits = limits = order.limits
        self.first_id = uid
        self._network = order.network
        self._namespaces = ground.namespaces
        self.user = (INSIDE_ID, INSIDE_ID) if os.geteuid() == 0 else None
        self.ipc_uid: int | None = INSIDE_ID
        self._cat_in, self.holder = self._start(_bwrap_argv(order, ground))
        # Root can put its children into the process namespace, which saves a fork each. An ordinary user may
        # only join all namespaces together.
        self.has_own_pids = self.user is None
        if not self.has_own_pids:
            enter_namespaces(self.holder, CLONE_NEWPID)
        self.changes = f"/proc/{self._holder_pid}/root{self.scratch}"
        self.cgroup = make_cgroup(ground.controllers, f"strop-{os.getpid()}", limits)
        self._kernel = ground.kernel
        version = tuple(int(part) for part in ground.kernel.split("-")[0].split(".")[:2])
        self._has_own_count = is_private_uid or version >= _KERNEL_WITH_COUNTS
        try:
            # Needs a recent kernel, since bwrap has no option for the number of files. One more for the
            # directory itself.
            limit_files(self._holder_pid, {"/tmp": True, "/dev/shm": True}, limits.max_scratch_files + 1)
            self._has_kernel_files = True
        except OSError:
            self._has_kernel_files = False
        # Process 1 has the same user.
        self.max_user_processes = limits.max_processes + 1 if self._has_own_count else None
        self.watch = Watch(
            memory_bytes=None if "memory" in self.cgroup.dirs else limits.memory_bytes,
            max_processes=None if self._has_kernel_pids else limits.max_processes,
            max_scratch_files=None if self._has_kernel_files else limits.max_scratch_files,
        )

    @property
    def _has_kernel_pids(self) -> bool:
        return self._has_own_count or "pids" in self.cgroup.dirs

    def _start(self, argv: list[str]) -> tuple[int, int]:
        """Start bwrap; return the pipe that keeps it running and a pidfd of process 1."""
        cat_in_r, cat_in_w = os.pipe()
        cat_out_r, cat_out_w = os.pipe()
        error_r, error_w = os.pipe()
        # Not a pipe: bwrap would die when it writes to a closed one, and its child would wait for it for
        # ever.
        info = os.memfd_create("info")
        ends = (cat_in_r, cat_out_w, error_w, info)
        actions = [(os.POSIX_SPAWN_DUP2, descriptor, target) for target, descriptor in enumerate(ends)]
        # Inside a user namespace the host's root could still read every file.
        with acting_as(self.first_id):
            # Not os.fork, which would copy the interpreter's page tables.
            bwrap_pid = os.posix_spawn(argv[0], argv, {}, file_actions=actions)
        self._bwrap = os.pidfd_open(bwrap_pid)
        for descriptor in ends[:3]:
            os.close(descriptor)
        # cat echoes once everything is set up; a bwrap that failed does not.
        with suppress(BrokenPipeError):
            os.write(cat_in_w, b"\n")
        ready, _, _ = select.select([cat_out_r], [], [], _START_LIMIT_S)
        if not ready or not os.read(cat_out_r, 1):
            os.set_blocking(error_r, False)
            with suppress(BlockingIOError):
                raise OSError(os.read(error_r, 4096).decode(errors="replace").strip() or "bwrap is silent")
            raise OSError("bwrap is silent")
        self._holder_pid = json.loads(os.pread(info, 4096, 0))["child-pid"]
        holder = os.pidfd_open(self._holder_pid)
        for descriptor in (error_r, info):
            os.close(descriptor)
        # A program of the same user may write to cat's input, and cat must not die of SIGPIPE.
        self._cat_out = cat_out_r
        return cat_in_w, holder

    def enter(self) -> None:
        """Join all namespaces of process 1."""
        left_out = CLONE_NEWNET if self._network == "host" else 0
        if not self.has_own_pids:
            left_out |= CLONE_NEWPID
        enter_namespaces(self.holder, ALL_NAMESPACES & ~left_out)

    def kill(self) -> None:
        """Kill process 1; the kernel then kills all others."""
        for descriptor in (self.holder, self._bwrap):
            with suppress(OSError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)

    def describe(self, facts: dict[str, Any]) -> Isolation:
        """Return the isolation reached, by comparing namespaces with this process's own."""
        own = own_namespaces(facts, self._namespaces)
        root_is = root_inside(read_file(f"/proc/{self._holder_pid}/uid_map"))
        is_separate = is_contained(facts, own, own, uid=self.first_id, network=self._network)
        return Isolation(
            level=IsolationLevel.NAMESPACE if is_separate else IsolationLevel.NONE,
            backend="bubblewrap",
            **inside_fields(facts, own),
            host_root_maps_to=root_is,
            host_uid=self.first_id,
            memory=guard("memory" in self.cgroup.dirs, is_watched=True),
            pids=guard(self._has_kernel_pids, is_watched=True),
            cpu=guard("cpu" in self.cgroup.dirs, is_watched=False),
            disk=guard(self._has_kernel_files, is_watched=True),
            files=Guard.ENFORCED,
            network=network_word(own, self._network),
            kernel=self._kernel,
        )

    def close(self) -> None:
        """Remove the groups and close descriptors; the file systems went with their last process."""
        self.cgroup.remove()
        for descriptor in (self._cat_in, self._cat_out, self.holder, self._bwrap):
            os.close(descriptor)


def _bwrap_argv(order: Order, ground: Ground) -> list[str]:
    words = [order.program, "--unshare-all", "--unshare-user", "--disable-userns", "--cap-drop", "ALL"]
    if order.network == "host":
        words.append("--share-net")
    words += ["--new-session", "--die-with-parent", "--as-pid-1", "--hostname", "sandbox"]
    words += ["--uid", str(INSIDE_ID), "--gid", str(INSIDE_ID), "--info-fd", "3"]
    links, shown = system_tree()
    for place, target in links.items():
        words += ["--symlink", target, place]
    for path in shown:
        words += ["--ro-bind", path, path]
    words += ["--proc", "/proc", "--dev", "/dev"]
    for host_path, inside_path in order.devices.items():
        words += ["--dev-bind", ground.staged.get(host_path, host_path), inside_path]
    for where, size in (("/tmp", order.limits.scratch_bytes), ("/dev/shm", order.limits.shm_bytes)):
        words += ["--perms", "1777", "--size", str(size), "--tmpfs", where]
    if order.has_workspace:
        # The root is read-only, and another tmpfs would add another size limit.
        inside = f"/tmp{WORKSPACE}"
        words += ["--dir", inside, "--symlink", inside, WORKSPACE]
    for host_path, inside_path, read_only in order.binds:
        source = ground.staged.get(host_path, host_path)
        words += ["--ro-bind" if read_only else "--bind", source, inside_path]
    if ground.first:
        words += ["--ro-bind", ground.first, _FIRST]
    # The file systems in which bwrap created these directories have no size limit.
    words += ["--remount-ro", "/dev", "--remount-ro", "/"]
    return [*words, "--", _FIRST if ground.first else "/usr/bin/cat"]


def copy_first(runtime_dir: str) -> str:
    """Copy `cat`, the future process 1, and return its path.

    Only this user, who must be root, may read the copy, so the kernel lets no program trace the process or
    see its memory, although both have the same user.
    """
    path = f"{runtime_dir}/cat"
    with open("/usr/bin/cat", "rb") as original:
        code = original.read()
    # Created with its final mode, so that others cannot read it even for a moment.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o711)
    with open(descriptor, "wb") as copy:
        copy.write(code)
        os.fchmod(descriptor, 0o711)
    return path


@cache
def system_tree() -> tuple[dict[str, str], tuple[str, ...]]:
    """Return this host's links into /usr, and the paths to show: /usr and files of the dynamic loader."""
    links, shown = {}, ["/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        path = Path("/", name)
        if path.is_symlink():
            links[str(path)] = os.readlink(path)
        elif path.is_dir():
            shown.append(str(path))
    shown += [path for path in ("/etc/ld.so.cache", "/etc/alternatives") if os.path.exists(path)]
    return links, tuple(shown)


def root_inside(uid_map: str) -> str:
    """Return the id of the host's root in a user namespace, from its uid_map; or 'unmapped'."""
    for line in uid_map.splitlines():
        inside, outside, length = map(int, line.split())
        if outside <= 0 < outside + length:
            return str(inside - outside)
    return "unmapped"
