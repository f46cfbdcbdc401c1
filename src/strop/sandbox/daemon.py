"""The small process from which all sandboxes of a client process are forked.

Forking a process that has loaded a model costs far more than forking this one. The steps that need host root
(a directory that other users can enter, mounts that the host does not see) are also done here, once. Orders
arrive over a socket, each with the descriptor of the connection that its sandbox will serve. The daemon also
loads, once, the Python code that sandboxes run in forks of it. Such a fork inherits this process's memory
layout and the orders so far, with host paths of mounts, but never a sandbox's requests, environment or input.
When the client process ends, the daemon ends all sandboxes, kills its remaining descendants, and exits.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import itertools
import json
import os
import platform
import select
import signal
import socket
import stat
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from strop.sandbox.allowlist import parse_network
from strop.sandbox.bubblewrap import BubblewrapPlace, copy_first, system_tree
from strop.sandbox.cgroup import (
    Cgroup,
    find_controllers,
    hand_down_controllers,
    remove_abandoned,
)
from strop.sandbox.channel import Channel
from strop.sandbox.contract import IsolationLevel, Limits
from strop.sandbox.docker import DockerPlace
from strop.sandbox.engine import Engine, container_name, read_container_id
from strop.sandbox.family import end_inside, kill_strays, signal_descendants
from strop.sandbox.frames import pack
from strop.sandbox.inside import read_namespaces
from strop.sandbox.linux import (
    become_subreaper,
    bind,
    can_reach,
    detach_mount,
    hide_from_tracers,
    mount_tmpfs,
    own_mounts,
    remove_ipc,
    sandbox_uid,
    show_of,
)
from strop.sandbox.place import Ground, LoadedPython, Order, identify
from strop.sandbox.podman import PodmanPlace
from strop.sandbox.process import ProcessPlace
from strop.sandbox.sockets import Egress
from strop.sandbox.spawning import remove_tree
from strop.sandbox.supervisor import Supervisor

# Larger than any message of this kind of socket, so none is cut.
MAX_ORDER_BYTES = 1 << 18
_END_LIMIT_S = 10.0
FOLDER_PREFIX = "strop-sandbox-"
"""Prefix of the names of daemons' folders and of their containers."""
SCRATCH_BASES = ("/tmp", "/var/tmp", "/dev/shm")
"""A daemon creates its folder in the first of these that it can write to."""
_ABANDONED_AFTER_S = 60.0
_CONTAINERS: dict[str, type[PodmanPlace]] = {"podman": PodmanPlace, "docker": DockerPlace}
_PLACES: dict[str, type[ProcessPlace | BubblewrapPlace | PodmanPlace]] = {
    "process": ProcessPlace,
    "bubblewrap": BubblewrapPlace,
    **_CONTAINERS,
}


def main(descriptor: int, parent_pid: int) -> None:
    """Serve orders until the parent is gone."""
    parent = os.pidfd_open(os.getppid())
    if os.getppid() != parent_pid:
        return
    hide_from_tracers()
    become_subreaper()
    _Daemon(socket.socket(fileno=descriptor), parent).serve()


class _Daemon:
    def __init__(self, control: socket.socket, parent: int) -> None:
        self._control = control
        self._parent = parent
        self._host_mounts = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        self._ground = _prepare_ground()
        # Open as long as this process runs; each supervisor watches the other end.
        self._alive_r, self._alive_w = os.pipe()
        self._supervisors: set[int] = set()
        self._python = LoadedPython(source="", main=lambda: None)
        self._numbers = itertools.count()
        self._engines: dict[str, Engine] = {}
        """Engines of the orders so far, by backend."""
        self._images: dict[str, dict[str, str]] = {name: {} for name in _CONTAINERS}
        """Mount points of images, by backend and image."""

    def serve(self) -> None:
        wake_r, wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
        # Frozen objects stay where they are, so forks share their pages.
        gc.freeze()
        poll = select.poll()
        for descriptor in (self._control.fileno(), self._parent, wake_r):
            poll.register(descriptor, select.POLLIN)
        try:
            while True:
                ready = {descriptor for descriptor, _ in poll.poll()}
                if wake_r in ready:
                    with suppress(BlockingIOError):
                        os.read(wake_r, 4096)
                    self._reap()
                if self._parent in ready or (self._control.fileno() in ready and not self._take_order()):
                    return
        finally:
            self._end()

    def _take_order(self) -> bool:
        """Carry out an order; return False if there will be no more."""
        text, descriptors, _, _ = socket.recv_fds(self._control, MAX_ORDER_BYTES, 1)
        if not text:
            return False
        with socket.socket(fileno=descriptors[0]) as connection:
            connection.set_inheritable(False)
            values = json.loads(text)
            order = Order(**{**values, "limits": Limits(**values["limits"])})
            if order.python_source:
                names: dict[str, Any] = {"__name__": "loaded"}
                exec(compile(order.python_source, "<python_source>", "exec"), names)
                self._python = LoadedPython(source=order.python_source, main=names["main"])
                gc.freeze()
            try:
                for host_path in (*(path for path, _, _ in order.binds), *order.devices):
                    self._stage(host_path, order.seen[host_path])
                pid = os.fork() if self._find_image(order, connection) else None
            except OSError as error:
                _refuse(connection, "host", str(error))
                return True
            if pid is None:
                return True
            if pid == 0:
                os.close(self._alive_w)
                os.close(self._host_mounts)
                self._control.close()
                _become_supervisor(order, self._python, self._ground, connection, self._alive_r)
            self._supervisors.add(pid)
        return True

    def _find_image(self, order: Order, connection: socket.socket) -> bool:
        """Find an order's image; if it is missing, refuse the order and return False."""
        if order.backend not in _CONTAINERS:
            return True
        engine = Engine(name=order.backend, program=order.program, environ=order.engine_env)
        self._engines[order.backend] = engine
        images = self._images[order.backend]
        try:
            if order.image and not os.path.isabs(order.image) and order.image not in images:
                find_image = _CONTAINERS[order.backend].find_image
                images[order.image] = find_image(engine, order.image, self._ground.runtime_dir)
            if os.path.isabs(order.image):
                self._stage(order.image, order.seen[order.image], is_for_programs=False)
            order.image_root = {**self._ground.staged, **images}.get(order.image, order.image)
            if order.image:
                # Checked here, since mount does not say which lower tree is missing.
                os.close(os.open(order.image_root, os.O_RDONLY | os.O_DIRECTORY))
        except OSError as error:
            is_foreign = error.errno == errno.ENOEXEC
            _refuse(connection, "architecture" if is_foreign else "image", str(error))
            return False
        return True

    def _stage(self, host_path: str, seen: list[int] | None, *, is_for_programs: bool = True) -> None:
        """Bind a host path to a place that programs' users and this process can reach.

        `seen`: the client's `identify` of the path. Mounts that the host made since this process started may
        be missing here.
        """
        staged = self._ground.staged
        if not self._ground.can_mount or seen is None:
            return
        if host_path in staged:
            if identify(staged[host_path]) == seen:
                return
            # Another directory now has this path.
            detach_mount(staged.pop(host_path))
        is_here = identify(host_path) == seen
        if is_here and (can_reach(host_path) or not is_for_programs):
            return
        target = Path(self._ground.runtime_dir, f"stage-{next(self._numbers)}")
        if stat.S_ISDIR(seen[-1]):
            target.mkdir()
        else:
            target.touch()
        if is_here:
            bind(host_path, str(target))
        else:
            show_of(self._host_mounts, host_path, str(target), is_whole=True)
        staged[host_path] = str(target)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                break
            if pid in self._supervisors and status != 0:
                self._clear_after(pid)
            self._supervisors.discard(pid)
        # Processes of a supervisor that died before its sandbox are reparented to this process.
        kill_strays(os.getpid(), self._supervisors)

    def _clear_after(self, pid: int) -> None:
        """Clean up after a supervisor that was killed."""
        deadline = time.monotonic() + _END_LIMIT_S
        # To podman, a process runs until its parent has reaped it.
        while (strays := kill_strays(os.getpid(), self._supervisors)) and time.monotonic() < deadline:
            for stray in strays:
                with suppress(ChildProcessError):
                    os.waitpid(stray, os.WNOHANG)
            time.sleep(0.001)
        Cgroup({each.name: each.own_dir / f"strop-{pid}" for each in self._ground.controllers}).remove()
        uid, is_private_uid = sandbox_uid(pid)
        if is_private_uid:
            remove_ipc(uid)
        scratch = str(Path(self._ground.runtime_dir, str(pid)))
        for engine in self._engines.values():
            engine.remove(container_name(self._ground.runtime_dir, pid), read_container_id(scratch))
            for name in ("root", "users"):
                with suppress(OSError):
                    detach_mount(f"{scratch}/{name}")
        if os.path.isdir(scratch):
            if self._ground.can_mount:
                with suppress(OSError):
                    detach_mount(scratch)
            remove_tree(scratch)

    def _end(self) -> None:
        os.close(self._alive_w)
        deadline = time.monotonic() + _END_LIMIT_S
        while self._supervisors and time.monotonic() < deadline:
            self._reap()
            time.sleep(0.005)
        signal_descendants(os.getpid(), signal.SIGKILL)
        while self._supervisors and time.monotonic() < deadline + _END_LIMIT_S:
            # Supervisors that did not end in time, and their orphans.
            self._reap()
            time.sleep(0.005)
        for target in self._ground.staged.values():
            with suppress(OSError):
                detach_mount(target)
        for name, images in self._images.items():
            if images:
                with suppress(OSError):
                    _CONTAINERS[name].drop_images(self._engines[name], images)
        if self._ground.can_mount:
            with suppress(OSError):
                detach_mount(self._ground.runtime_dir)
        with suppress(OSError):
            os.rmdir(self._ground.runtime_dir)


def _become_supervisor(
    order: Order, python: LoadedPython, ground: Ground, connection: socket.socket, daemon_end: int
) -> NoReturn:
    """Create the place and serve it. Never returns into the daemon's code."""
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        become_subreaper()
        # If everything above is killed, `janitor` finds this process and its children by this directory.
        os.chdir(ground.runtime_dir)
        uid, is_private_uid = sandbox_uid(os.getpid())
        try:
            allowed = parse_network(order.network)
            # Before the place: a process forked after it may be in its namespaces.
            egress = None if allowed is None else Egress(allowed)
            place = _PLACES[order.backend](order, ground, uid, is_private_uid=is_private_uid)
            if egress is not None:
                egress.open_in(place)
        except OSError as error:
            is_full = error.errno == errno.ENOSPC
            _refuse(connection, "no_space" if is_full else order.backend, str(error))
            signal_descendants(os.getpid(), signal.SIGKILL)
        else:
            supervisor = Supervisor(place, python, Channel(connection), daemon_end, egress)
            supervisor.serve(IsolationLevel(order.min_level))
            os._exit(0)
    finally:
        if sys.exc_info()[0] is not None:
            # For the daemon's standard error; the client only sees its connection close.
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(1)


def _refuse(connection: socket.socket, kind: str, why: str) -> None:
    with suppress(OSError):
        connection.sendall(pack({"refused": kind, "why": why}))


def _prepare_ground() -> Ground:
    is_root = os.geteuid() == 0
    base = next(
        (path for path in SCRATCH_BASES if can_reach(path) and os.access(path, os.W_OK)), SCRATCH_BASES[0]
    )
    # Remove the directories of daemons that were killed.
    for path in Path(base).glob(f"{FOLDER_PREFIX}*"):
        with suppress(OSError):
            info = path.lstat()
            # A new directory may not be locked yet.
            is_old = abs(time.time() - info.st_mtime) > _ABANDONED_AFTER_S
            if info.st_uid == os.geteuid() and stat.S_ISDIR(info.st_mode) and is_old:
                descriptor = _lock(str(path))
                end_inside(str(path))
                remove_tree(str(path))
                os.close(descriptor)
    # Not tempfile, which reseeds its random numbers in each fork; that costs as much as the fork.
    runtime_dir = f"{base}/{FOLDER_PREFIX}{os.urandom(8).hex()}"
    os.mkdir(runtime_dir, 0o711)
    os.chmod(runtime_dir, 0o711)
    # The lock is held until this process and all its sandboxes have ended.
    _lock(runtime_dir)
    can_mount = False
    if is_root:
        try:
            own_mounts()
            mount_tmpfs(runtime_dir, "size=1m,mode=711")
            can_mount = True
        except OSError:
            # Root of a container that may not mount: paths stay where they are.
            can_mount = False
    hand_down_controllers()
    controllers = find_controllers()
    remove_abandoned(controllers)
    # Fill this function's cache for the forks.
    system_tree()
    return Ground(
        runtime_dir=runtime_dir,
        kernel=platform.release(),
        namespaces=read_namespaces(),
        can_mount=can_mount,
        first=copy_first(runtime_dir) if can_mount else "",
        controllers=controllers,
    )


def _lock(path: str) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
