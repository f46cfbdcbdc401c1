"""The small process that all sandboxes of one process are forked from.

A fork of a process that has loaded a model costs far more than one of this; and what must be done as
host root before privileges are dropped (a directory that other users can enter, mounts that the host
does not see) is done here once. Orders come over a socket, each with the descriptor of the connection
that its sandbox will serve. It also loads, once, the Python that sandboxes run in forks of itself. What
such a fork inherits is this process's addresses and the orders so far, with host paths of mounts; never
what a sandbox was asked, its environment or its input. When the process that started this one is gone, it
ends all sandboxes, kills what is left below it, and goes.
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
from strop.sandbox.cgroup import Cgroup, find_controllers, remove_abandoned
from strop.sandbox.channel import Channel
from strop.sandbox.contract import IsolationLevel, Limits
from strop.sandbox.docker import DockerPlace
from strop.sandbox.engine import Engine, container_name, read_container_id
from strop.sandbox.family import end_inside, kill_strays, signal_descendants
from strop.sandbox.frames import pack
from strop.sandbox.freezer import clear_freezers
from strop.sandbox.inside import read_namespaces
from strop.sandbox.layers import PREFIX, layer_files, remove_layer, remove_unfinished
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

# More than a socket of this kind takes in one message, so none is cut.
MAX_ORDER_BYTES = 1 << 18
_END_LIMIT_S = 10.0
FOLDER_PREFIX = "strop-sandbox-"
"""What the names of daemons' folders begin with, and those of their containers."""
SCRATCH_BASES = ("/tmp", "/var/tmp", "/dev/shm")
"""Where a daemon may make its folder; the first that it can write to."""
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
        # Held open while this process runs; each sandbox watches the other end.
        self._alive_r, self._alive_w = os.pipe()
        self._supervisors: set[int] = set()
        self._python = LoadedPython(source="", main=lambda: None)
        self._numbers = itertools.count()
        self._engines: dict[str, Engine] = {}
        """Of the orders so far, by backend."""
        self._images: dict[str, dict[str, str]] = {name: {} for name in _CONTAINERS}
        """Where images of each backend are mounted."""

    def serve(self) -> None:
        wake_r, wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
        # Objects that exist now stay where they are, so forks share their pages.
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
        if not descriptors:
            # The client knows a layer by its path; what is removed is one of this daemon's own.
            name = Path(text.decode()).name.removeprefix(PREFIX)
            remove_layer(f"{self._ground.runtime_dir}/{PREFIX}{name}", can_mount=self._ground.can_mount)
            return True
        with socket.socket(fileno=descriptors[0]) as connection:
            connection.set_inheritable(False)
            values = json.loads(text)
            order = Order(**{**values, "limits": Limits(**values["limits"])})
            if order.python_source:
                self._load(order.python_source)
            try:
                for host_path in (*(one for one, _, _ in order.binds), *order.devices):
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

    def _load(self, source: str) -> None:
        """Load what sandboxes run in a fork of this interpreter."""
        names: dict[str, Any] = {"__name__": "loaded"}
        exec(compile(source, "<python_source>", "exec"), names)
        self._python = LoadedPython(source=source, main=names["main"])
        gc.freeze()

    def _find_image(self, order: Order, connection: socket.socket) -> bool:
        """Find an order's image on this host; if it is not there, refuse the order and return False."""
        try:
            for layer in order.layers:
                layer_files(layer)
        except OSError as error:
            _refuse(connection, "snapshot", f"the snapshot is gone: {error}")
            return False
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
                # Of a lower tree that is missing, mount would not say which.
                os.close(os.open(order.image_root, os.O_RDONLY | os.O_DIRECTORY))
        except OSError as error:
            is_foreign = error.errno == errno.ENOEXEC
            _refuse(connection, "architecture" if is_foreign else "image", str(error))
            return False
        return True

    def _stage(self, host_path: str, seen: list[int] | None, *, is_for_programs: bool = True) -> None:
        """Show a path at a place that programs' users and this process can reach, until it ends.

        `seen`: `identify` of it by the client. What the host has mounted since this process began may not
        have arrived here.
        """
        staged = self._ground.staged
        if not self._ground.can_mount or seen is None:
            return
        if host_path in staged:
            if identify(staged[host_path]) == seen:
                return
            # Another directory has its name now.
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
        # A supervisor that died before its sandbox leaves its processes to this one.
        kill_strays(os.getpid(), self._supervisors)

    def _clear_after(self, pid: int) -> None:
        """Remove what a supervisor that was killed has left."""
        deadline = time.monotonic() + _END_LIMIT_S
        remove_freezers = clear_freezers(f"strop-{pid}")
        # To podman, a process still runs until its parent has waited for it.
        while (strays := kill_strays(os.getpid(), self._supervisors)) and time.monotonic() < deadline:
            for stray in strays:
                with suppress(ChildProcessError):
                    os.waitpid(stray, os.WNOHANG)
            time.sleep(0.001)
        Cgroup({each.name: each.own_dir / f"strop-{pid}" for each in self._ground.controllers}).remove()
        remove_freezers()
        uid, is_private_uid = sandbox_uid(pid)
        if is_private_uid:
            remove_ipc(uid)
        remove_unfinished(self._ground.runtime_dir, pid, can_mount=self._ground.can_mount)
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
            # Those that did not end in time, and what they leave.
            self._reap()
            time.sleep(0.005)
        for target in self._ground.staged.values():
            with suppress(OSError):
                detach_mount(target)
        for name, images in self._images.items():
            if images:
                with suppress(OSError):
                    _CONTAINERS[name].drop_images(self._engines[name], images)
        for path in Path(self._ground.runtime_dir).glob(f"{PREFIX}*"):
            remove_layer(str(path), can_mount=self._ground.can_mount)
        if self._ground.can_mount:
            with suppress(OSError):
                detach_mount(self._ground.runtime_dir)
        with suppress(OSError):
            os.rmdir(self._ground.runtime_dir)


def _become_supervisor(
    order: Order, python: LoadedPython, ground: Ground, connection: socket.socket, daemon_end: int
) -> NoReturn:
    """Make the place and serve it. Nothing returns into the daemon's code."""
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        become_subreaper()
        # And what it starts: where all above it are killed, `janitor` finds it by this.
        os.chdir(ground.runtime_dir)
        uid, is_private_uid = sandbox_uid(os.getpid())
        if order.backend in _CONTAINERS and order.snapshot_uid is not None:
            # The snapshot's files are its programs' own, without a copy.
            uid, is_private_uid = order.snapshot_uid, False
        try:
            allowed = parse_network(order.network)
            # Ahead: what is forked behind a place may be in its namespaces.
            egress = None if allowed is None else Egress(allowed)
            place = _PLACES[order.backend](order, ground, uid, is_private_uid=is_private_uid)
            if egress is not None:
                egress.open_in(place)
        except OSError as error:
            is_full = error.errno == errno.ENOSPC
            _refuse(connection, "no_space" if is_full else order.backend, str(error))
            signal_descendants(os.getpid(), signal.SIGKILL)
        else:
            supervisor = Supervisor(place, python, ground, Channel(connection), daemon_end, egress)
            supervisor.serve(IsolationLevel(order.min_level))
            os._exit(0)
    finally:
        if sys.exc_info()[0] is not None:
            # For the daemon's standard error; the client of this sandbox sees its connection close.
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
    # Daemons that were killed left their directories.
    for path in Path(base).glob(f"{FOLDER_PREFIX}*"):
        with suppress(OSError):
            found = path.lstat()
            # A young one may not have been locked yet.
            is_old = abs(time.time() - found.st_mtime) > _ABANDONED_AFTER_S
            if found.st_uid == os.geteuid() and stat.S_ISDIR(found.st_mode) and is_old:
                descriptor = _lock(str(path))
                end_inside(str(path))
                remove_tree(str(path))
                os.close(descriptor)
    # Not tempfile: its random numbers are made anew in each fork, which costs as much as the fork.
    runtime_dir = f"{base}/{FOLDER_PREFIX}{os.urandom(8).hex()}"
    os.mkdir(runtime_dir, 0o711)
    os.chmod(runtime_dir, 0o711)
    # Held until this process and all of its sandboxes have ended.
    _lock(runtime_dir)
    can_mount = False
    if is_root:
        try:
            own_mounts()
            mount_tmpfs(runtime_dir, "size=1m,mode=711")
            can_mount = True
        except OSError:
            # Root of a container without the right to mount: paths stay where they are.
            can_mount = False
    controllers = find_controllers()
    remove_abandoned(controllers)
    # Looked up once, so that the forks need not.
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
