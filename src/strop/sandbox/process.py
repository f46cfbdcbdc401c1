"""Backend `process`: a child process in a private directory, without namespaces.

Covered: every descendant is killed, whatever sessions and double forks it makes; clean environment;
per-process limits. As host root also a private user, which protects other users' files and makes the number
of processes a kernel limit, and a private directory of bounded size. Memory and number of processes are
kernel limits where control groups can be made, and watched otherwise.
Not covered: the network; world-readable and world-writable files (/tmp, /dev/shm); for an ordinary user
also that user's own files and processes, strop's included. Training on model-written code refuses it.
Tried on Linux 6.18, as root and as an ordinary user.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from strop.sandbox.cgroup import make_cgroup
from strop.sandbox.contract import Guard, Isolation, IsolationLevel
from strop.sandbox.linux import count_user_tasks, detach_mount, mount_tmpfs, remove_ipc
from strop.sandbox.place import Ground, Order, Watch, guard, inside_fields, own_namespaces
from strop.sandbox.spawning import remove_tree


class ProcessPlace:
    """A private directory of the host."""

    has_own_pids = False
    capabilities = 0
    holder: int | None = None

    def __init__(self, order: Order, ground: Ground, uid: int, *, is_private_uid: bool) -> None:
        self.limits = limits = order.limits
        self.first_id = uid
        self._namespaces = ground.namespaces
        self._kernel = ground.kernel
        self.scratch = str(Path(ground.runtime_dir, str(os.getpid())))
        self.moved_mounts = {host: ground.staged[host] for host, _, _ in order.binds if host in ground.staged}
        self._has_mount = False
        os.mkdir(self.scratch, 0o700)
        if ground.can_mount:
            owner = f"mode=700,uid={self.first_id},gid={self.first_id}"
            # One inode is the directory itself.
            num_inodes = self.limits.max_scratch_files + 1
            mount_tmpfs(self.scratch, f"size={self.limits.scratch_bytes},nr_inodes={num_inodes},{owner}")
            self._has_mount = True
        elif os.geteuid() == 0:
            os.chown(self.scratch, self.first_id, self.first_id)
        self.cgroup = make_cgroup(ground.controllers, f"strop-{os.getpid()}", limits)
        self.user = (uid, uid) if os.geteuid() == 0 else None
        self.ipc_uid = uid if is_private_uid else None
        self._has_private_uid = is_private_uid
        self.changes, self.has_own_disk = self.scratch, self._has_mount
        # A shared user also runs other processes: the limit only bounds a fork bomb, which the watch finds.
        others = 0 if is_private_uid else count_user_tasks(uid)
        self.max_user_processes: int | None = others + limits.max_processes
        self.watch = Watch(
            memory_bytes=None if "memory" in self.cgroup.dirs else limits.memory_bytes,
            max_processes=None if self._has_kernel_pids else limits.max_processes,
            scratch_bytes=None if self._has_mount else limits.scratch_bytes,
            max_scratch_files=None if self._has_mount else limits.max_scratch_files,
        )

    @property
    def _has_kernel_pids(self) -> bool:
        return self._has_private_uid or "pids" in self.cgroup.dirs

    def enter(self) -> None:
        """Do nothing: there is no namespace to join."""

    def kill(self) -> None:
        """Do nothing: only the commands themselves hold the directory."""

    def describe(self, facts: dict[str, Any]) -> Isolation:
        """Return the isolation reached; namespaces are the host's."""
        is_harmless = facts["no_new_privs"] and facts["permitted"] == 0 and self.first_id != 0
        own = own_namespaces(facts, self._namespaces)
        return Isolation(
            level=IsolationLevel.RLIMIT if is_harmless else IsolationLevel.NONE,
            backend="process",
            **inside_fields(facts, own),
            host_root_maps_to="0",
            host_uid=self.first_id,
            memory=guard("memory" in self.cgroup.dirs, is_watched=True),
            pids=guard(self._has_kernel_pids, is_watched=True),
            cpu=guard("cpu" in self.cgroup.dirs, is_watched=False),
            disk=guard(self._has_mount, is_watched=True),
            files=Guard.ENFORCED,
            network="host",
            kernel=self._kernel,
        )

    def close(self) -> None:
        """Remove the directory, whatever the modes in it, and the IPC objects of its user."""
        self.cgroup.remove()
        if self._has_private_uid:
            remove_ipc(self.first_id)
        if self._has_mount:
            detach_mount(self.scratch)
            os.rmdir(self.scratch)
            return
        remove_tree(self.scratch)
