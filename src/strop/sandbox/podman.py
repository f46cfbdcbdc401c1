"""Backend `podman`: a container with its own root file system, from an image or a directory.

The root is an overlay that the supervisor mounts over the image. Changes go into a tmpfs of bounded size and
number of files, on every kind of disk. podman makes the namespaces, the control groups and the masks over
/proc and /sys. Process 1 is 200 bytes of machine code that ignore SIGCHLD and wait: nothing of the image is
started, so an image needs no shell, no Python and no libc. Commands join from outside, without a start of
podman for each, and filter their own system calls.

Programs run as a private user of the host, without a user namespace; or, with `SandboxSpec.user`, as a user
of the image, root included, in a user namespace over unused ids of the host (`idmap`). That root may only
change owners and users in its container. It may also trace process 1 and break it, which ends its own sandbox
and is noticed.

For an ordinary user, all this happens in podman's own user namespace (`rootless`). That is level `namespace`
with a private root, or `container` where control groups are delegated.

Tried with podman 4.3.1 and runc 1.1.5 on Linux 6.18 with control groups of version 1, as root and as an
ordinary user.
"""

from __future__ import annotations

import errno
import os
import platform
import signal
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from strop.sandbox.bubblewrap import root_inside, system_tree
from strop.sandbox.cgroup import Cgroup, find_controllers, may_join
from strop.sandbox.contract import WORKSPACE, Guard, Isolation, IsolationLevel
from strop.sandbox.engine import Engine, container_name, id_file, read_container_id
from strop.sandbox.idmap import NUM_IDS, claim_ids, mount_for
from strop.sandbox.linux import (
    NAMESPACE_FLAGS,
    detach_mount,
    enter_namespaces,
    limit_files,
    mount_overlay,
    mount_tmpfs,
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
from strop.sandbox.rootless import claim_id, enter_podman

INIT = "/.strop-init"
"""Process 1 of a container."""
_NUM_OWN_FILES = 26
ROOT_CAPABILITIES = sum(1 << number for number in (0, 1, 3, 4, 6, 7, 10, 18, 31))
"""Capabilities of a container's root: over owners, users and modes (chown, dac_override, fowner, fsetid,
setgid, setuid, setfcap), net_bind_service and sys_chroot. Not `kill`, which would reach the runners."""
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
"""Names of machines in images."""
# rt_sigaction(SIGCHLD, {SIG_IGN}, NULL, 8), so that the kernel reaps; then pause() for ever. {act} is the
# address of the structure behind the code.
_X86_64 = (62, "bf11000000be{act}31d241ba08000000b80d0000000f05b8220000000f05ebf7", 0)
# The same with ppoll(NULL, 0, NULL, NULL), since AArch64 has no pause.
_AARCH64 = (
    183,
    "200280d2{act}020080d2030180d2c81080d2010000d4000080d2010080d2020080d2030080d2280980d2010000d4faffff17",
    1,
)
_LOAD_ADDRESS = 0x400000
_HEADERS_BYTES = 64 + 56


class PodmanPlace:
    """A container, held by its process 1."""

    scratch = "/tmp"
    has_own_disk = True
    moved_mounts: Mapping[str, str] = {}
    capabilities = 0
    has_own_pids = True
    _sees_own_mounts = True
    """Whether the engine sees a supervisor's mounts."""

    def __init__(self, order: Order, ground: Ground, uid: int, *, is_private_uid: bool) -> None:
        # Only podman supports ordinary users.
        self._is_rootless = os.geteuid() != 0
        environ = order.engine_env
        if self._is_rootless:
            environ = enter_podman(order.program, environ)
        elif not ground.can_mount:
            raise OSError(
                errno.EPERM,
                f"backend {order.backend} mounts the root of its containers, which needs root here",
            )
        self._engine = Engine(name=order.backend, program=order.program, environ=environ)
        self.limits = limits = order.limits
        self._order = order
        self._ground = ground
        self.first_id = self._host_uid = uid
        self.user: tuple[int, int] | None = (uid, uid)
        self._claim: socket.socket | None = None
        self._has_users = order.user is not None
        if order.user is not None:
            self._give_users(order.user)
        if self._is_rootless:
            self.first_id, self._host_uid, self._claim = claim_id(os.getpid())
            self.user, is_private_uid = (self.first_id, self.first_id), True
        self.ipc_uid: int | None = None if self.user is None else self.user[0]
        self._base = f"{ground.runtime_dir}/{os.getpid()}"
        self.changes = f"{self._base}/upper"
        self._name = container_name(ground.runtime_dir, os.getpid())
        try:
            pid = self._start()
            self._pid = pid
            self.holder = os.pidfd_open(pid)
            # podman only limits the size.
            limit_files(pid, {"/dev/shm": False}, limits.max_scratch_files + 1)
        except OSError:
            self._clear()
            raise
        # Only the kinds that differ: with version 1 podman makes no cgroup namespace.
        self._joined = sum(
            flag
            for name, flag in NAMESPACE_FLAGS.items()
            if os.readlink(f"/proc/self/ns/{name}") != os.readlink(f"/proc/{pid}/ns/{name}")
        )
        membership = read_file(f"/proc/{pid}/cgroup")
        # Where podman may not make groups, the container is in this process's own.
        has_own_groups = membership != read_file("/proc/self/cgroup")
        controllers = find_controllers(membership=membership, is_for_children=False) if has_own_groups else []
        # An ordinary user's programs may not leave the group of a login session for the container's.
        controllers = [each for each in controllers if each.version == 1 or may_join(each.own_dir)]
        self.cgroup = Cgroup(
            {controller.name: controller.own_dir for controller in controllers},
            max((controller.version for controller in controllers), default=0),
        )
        is_counted = is_private_uid and "pids" not in self.cgroup.dirs
        self.max_user_processes: int | None = limits.max_processes if is_counted else None
        self.watch = Watch(
            memory_bytes=None if "memory" in self.cgroup.dirs else limits.memory_bytes,
            max_processes=None if "pids" in self.cgroup.dirs else limits.max_processes,
        )

    @staticmethod
    def find_image(engine: Engine, image: str, _runtime_dir: str) -> str:
        """Return the path where an image is mounted, read-only, until `drop_images`.

        Raises: OSError if there is no such image; with ENOEXEC if its programs are for another machine.
        """
        # An ordinary user's images are mounted in podman's user namespace.
        ahead = () if os.geteuid() == 0 else ("unshare", engine.program)
        path = engine.run(*ahead, "image", "mount", image).strip()
        try:
            require_architecture(engine, image)
        except OSError:
            engine.run(*ahead, "image", "unmount", image)
            raise
        return path

    @staticmethod
    def drop_images(engine: Engine, images: Mapping[str, str]) -> None:
        """Unmount images, by their names. Raises: OSError."""
        engine.run("image", "unmount", *images)

    def _give_users(self, user: int) -> None:
        """Run programs as a user of the image, in a private range of host ids."""
        self.first_id, self._claim = claim_ids(os.getpid())
        self._host_uid = self.first_id + user
        self.user = (user, user)
        self.capabilities = ROOT_CAPABILITIES if user == 0 else 0

    def _start(self) -> int:
        """Mount the root, start the container and return its process 1."""
        binds = [(f"{self._base}/init", INIT, True), *self._mount_root(), *self._order.binds]
        words = ["--pidfile", f"{self._base}/pid", "--no-hosts"]
        if self._has_users:
            mapping = f"0:{self.first_id}:{NUM_IDS}"
            words += ["--uidmap", mapping, "--gidmap", mapping]
        for host, inside, read_only in binds:
            source = self._ground.staged.get(host, host)
            words += ["--volume", f"{source}:{inside}:{'ro' if read_only else 'rw'}"]
        Path(self._base, "init").write_bytes(make_init(platform.machine()))
        Path(self._base, "init").chmod(0o755)
        self._engine.run(*self._words(), *words, "--rootfs", f"{self._base}/root")
        return int(read_file(f"{self._base}/pid"))

    def _words(self) -> list[str]:
        """Return the engine's arguments that start a container, except its root."""
        limits = self.limits
        network = "host" if self._order.network == "host" else "none"
        words = ["run", "--detach", "--name", self._name, "--cidfile", id_file(self._base)]
        words += ["--log-driver", "none", "--network", network, "--hostname", "sandbox", "--entrypoint", INIT]
        words += ["--cap-drop", "all", "--security-opt", "no-new-privileges"]
        words += ["--pids-limit", str(limits.max_processes + 1), "--shm-size", f"{limits.shm_bytes}b"]
        words += ["--memory", f"{limits.group_bytes}b", "--memory-swap", f"{limits.group_bytes}b"]
        if limits.cpus is not None:
            words += ["--cpus", f"{limits.cpus:.3f}"]
        for host, inside in self._order.devices.items():
            source = self._ground.staged.get(host, host) if self._sees_own_mounts else host
            words += ["--device", f"{source}:{inside}:rw"]
        # Set explicitly, because podman raises them by default, which fails inside another container.
        return [*words, "--ulimit", "nofile=1024:1024", "--ulimit", "nproc=4096:4096"]

    def _mount_root(self) -> list[tuple[str, str, bool]]:
        """Mount the root; return further bind mounts for it, in the format of `Order.binds`."""
        limits, base = self.limits, Path(self._base)
        base.mkdir(mode=0o711)
        # Besides programs' files the inodes include the overlay's directories and mount points.
        mount_tmpfs(
            self._base,
            f"size={limits.scratch_bytes},nr_inodes={limits.max_scratch_files + _NUM_OWN_FILES},mode=711",
        )
        # An image whose /dev is a link out of it would have the engine write into the host's directories.
        for name in ("upper", "work", "root", "upper/dev", "upper/proc", "upper/sys"):
            (base / name).mkdir()
        temp = base / "upper" / "tmp"
        temp.mkdir()
        temp.chmod(0o1777)
        if self._has_users:
            for directory in (temp, temp.parent):
                os.chown(directory, self.first_id, self.first_id)
        binds: list[tuple[str, str, bool]] = []
        lower = self._order.image_root
        if not lower:
            # Without an image, the host's programs, as in the other backends.
            lower = str(base / "lower")
            Path(lower).mkdir()
            links, shown = system_tree()
            for place, target in links.items():
                Path(lower, place.lstrip("/")).symlink_to(target)
            for path in shown:
                # Created here: the container's root could not write into mount points that podman creates.
                where = Path(lower, path.lstrip("/"))
                where.parent.mkdir(parents=True, exist_ok=True)
                where.mkdir() if os.path.isdir(path) else where.touch()
            binds += [(path, path, True) for path in shown]
        if self._order.has_workspace:
            self._make_workspace(Path(lower))
        if self._has_users:
            (base / "mapped").mkdir()
            lower = mount_for(lower, str(base / "mapped"), self.first_id)
        mount_overlay(
            lower,
            str(base / "upper"),
            str(base / "work"),
            str(base / "root"),
            has_host_root=not self._is_rootless,
        )
        return binds

    def _make_workspace(self, image_root: Path) -> None:
        """Make a workspace that programs own; the image's files in it keep their owners."""
        in_image = image_root / WORKSPACE.lstrip("/")
        if in_image.is_symlink() or (in_image.exists() and not in_image.is_dir()):
            return
        workspace = Path(self.changes, in_image.name)
        workspace.mkdir()
        owner = self.first_id if self._is_rootless else self._host_uid
        os.chown(workspace, owner, owner)

    def enter(self) -> None:
        """Join the namespaces of process 1."""
        enter_namespaces(self.holder, self._joined)

    def kill(self) -> None:
        """Kill process 1; the kernel then kills all others."""
        with suppress(OSError):
            signal.pidfd_send_signal(self.holder, signal.SIGKILL)

    def describe(self, facts: dict[str, Any]) -> Isolation:
        """Return the isolation reached, by comparing namespaces with this process's own."""
        own = own_namespaces(facts, self._ground.namespaces)
        has_memory, has_pids = "memory" in self.cgroup.dirs, "pids" in self.cgroup.dirs
        needed = own.keys() - {"user"}
        is_separate = is_contained(
            facts,
            own,
            needed,
            uid=self._host_uid,
            network=self._order.network,
            capabilities=self.capabilities,
        )
        level = IsolationLevel.NAMESPACE if is_separate else IsolationLevel.NONE
        if is_separate and facts["seccomp"] and has_memory and has_pids:
            level = IsolationLevel.CONTAINER
        return Isolation(
            level=level,
            backend=self._engine.name,
            **inside_fields(facts, own),
            host_root_maps_to=root_inside(self._user_map()),
            host_uid=self._host_uid,
            memory=guard(has_memory, is_watched=True),
            pids=guard(has_pids or self.max_user_processes is not None, is_watched=True),
            cpu=guard(self.limits.cpus is not None and "cpu" in self.cgroup.dirs, is_watched=False),
            disk=Guard.ENFORCED,
            files=Guard.ENFORCED,
            network=network_word(own, self._order.network),
            kernel=self._ground.kernel,
            lacks=("users",) if self._is_rootless else (),
        )

    def _user_map(self) -> str:
        return read_file(f"/proc/{self._pid}/uid_map")

    def close(self) -> None:
        """Remove the container and its root."""
        self._clear()
        os.close(self.holder)

    def _clear(self) -> None:
        self._engine.remove(self._name, read_container_id(self._base))
        for place in (*(f"{self._base}/{name}" for name in ("root", "mapped", "users")), self._base):
            with suppress(OSError):
                detach_mount(place)
        with suppress(OSError):
            os.rmdir(self._base)
        if self._claim is not None:
            self._claim.close()


def require_architecture(engine: Engine, image: str) -> None:
    """Refuse an image whose programs are for another machine. Raises: OSError with ENOEXEC."""
    of_image = engine.run("image", "inspect", "--format", "{{.Architecture}}", image).strip()
    of_host = ARCHITECTURES.get(platform.machine(), "")
    if of_image and of_host and of_image != of_host:
        raise OSError(errno.ENOEXEC, f"image {image} is for {of_image}, and this host is {of_host}")


def make_init(machine: str) -> bytes:
    """Return a program that waits for ever and leaves no zombies.

    Raises: OSError for an unknown machine.
    """
    codes = {"x86_64": _X86_64, "aarch64": _AARCH64}
    if machine not in codes:
        raise OSError(errno.ENOEXEC, f"containers have no process 1 for {machine}: x86_64 or aarch64")
    kind, text, is_arm = codes[machine]
    num_bytes = len(bytes.fromhex(text.format(act="00000000" if not is_arm else "0" * 16)))
    address = _LOAD_ADDRESS + _HEADERS_BYTES + num_bytes
    if is_arm:
        # movz x1, low half; movk x1, high half, lsl 16.
        low, high = address & 0xFFFF, address >> 16
        act = struct.pack("<II", 0xD2800001 | low << 5, 0xF2A00001 | high << 5)
    else:
        act = struct.pack("<I", address)
    # The handler SIG_IGN, no flags, no restorer, no mask.
    body = bytes.fromhex(text.format(act=act.hex())) + struct.pack("<QQQQ", 1, 0, 0, 0)
    size = _HEADERS_BYTES + len(body)
    ident = b"\x7fELF" + bytes([2, 1, 1]) + bytes(9)
    entry = _LOAD_ADDRESS + _HEADERS_BYTES
    header = struct.pack("<HHIQQQIHHHHHH", 2, kind, 1, entry, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    # One segment, readable and executable, with the whole file.
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, _LOAD_ADDRESS, _LOAD_ADDRESS, size, size, 0x1000)
    return ident + header + segment + body
