"""Backends `podman` and `docker`: containers by the engines' command lines, of images or of this host's /usr.

Process 1 is the agent, started by this host's Python with its own loader and libraries from a read-only
mount, so an image needs neither Python nor a shell nor a libc. It connects to a socket in a mounted folder;
no command is run by the engine. The root is read-only, and programs are a private user of the host. With
`SandboxSpec.user` (podman) programs are a user of the image, root included, in a user namespace over unused
ids of the host, and may write to the engine's copy of the image, whose size nothing bounds.

For an ordinary user podman makes the containers in its own user namespace. Docker needs root and a daemon of
this machine; it has no images that are directories, and the root of its images is the host's: such a record
says level `none`. Tried with podman 4.3.1 and docker 20.10, runc 1.1.5, on Linux 6.18 with control groups of
version 1.
"""

from __future__ import annotations

import errno
import io
import json
import os
import platform
import shutil
import socket
import struct
import tarfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from strop.errors import SandboxRefused
from strop.sandbox.agent import read_or_empty
from strop.sandbox.bubblewrap import AGENT_CAPABILITIES, system_tree
from strop.sandbox.cgroup import Cgroup, find_controllers
from strop.sandbox.contract import WORKSPACE, SandboxSpec
from strop.sandbox.ground import (
    NUM_IDS,
    Ground,
    loader_argv,
    map_id,
    own_prefix,
    python_candidates,
    run_program,
)

ENGINES = ("podman", "docker")
"""The backends with containers and images, named like their programs."""
ROOT_CAPABILITIES = sum(1 << number for number in (0, 1, 3, 4, 5, 6, 7, 10, 18, 31))
"""What the root of an image keeps: over owners, users, modes, its processes, low ports, chroot, setfcap."""
_CAPABILITIES = ("CHOWN", "DAC_READ_SEARCH", "KILL", "SETGID", "SETUID", "SETPCAP", "SYS_ADMIN", "SYS_PTRACE")
"""The agent's, of which it gives two up after it has set the number of files."""
_ROOT_NAMES = ("DAC_OVERRIDE", "FOWNER", "FSETID", "NET_BIND_SERVICE", "SYS_CHROOT", "SETFCAP")
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_FIRST_ID, _NUM_RANGES = 0x70400000, 4032
"""Behind the private users of `ground`: ranges of `NUM_IDS` ids each."""
_START_LIMIT_S = 30.0
_ANSWER_LIMIT_S = 60.0
_PYTHON_FLAGS = ("-I", "-S", "-B")
_SKELETON = "localhost/strop-sandbox"
_UNFIT = {
    "name=rootless": "but its daemon belongs to an ordinary user",
    "name=userns": "but shows its images' files as those of other users (userns-remap)",
}
"""Security options of a docker daemon whose containers cannot be sandboxes, with the reason."""
_PEER = struct.Struct("3i")


def run_engine(engine: str, *words: str, stdin: bytes = b"", limit_s: float = 120.0) -> str:
    """Run podman or docker; return its standard output. Blocks. Raises: OSError with its standard error."""
    return run_program([shutil.which(engine) or engine, *words], stdin=stdin, limit_s=limit_s)


class Container:
    """One container."""

    def __init__(self, engine: str, program: str, ground: Ground, spec: SandboxSpec) -> None:
        self._engine, self._program, self._ground, self._spec = engine, program, ground, spec
        self._number = next(ground.numbers)
        self.name = f"{ground.folder.name}-{self._number}"
        self._link = ground.folder / str(self._number)
        self.is_writable = spec.user is not None
        """Whether programs may write to the image's files."""
        self.first_id = 0
        """The host's id of the image's root, where that is a private range."""
        self._claim: socket.socket | None = None
        self._is_rootless = os.geteuid() != 0

    def start(
        self, binds: Sequence[tuple[str, str, bool]], devices: Mapping[str, str]
    ) -> tuple[socket.socket, int]:
        """Start the container; return the connection to its agent, and the agent's process on this host.

        Raises: OSError.
        """
        self._link.mkdir(mode=0o711)
        path = self._link / "socket"
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(path))
                path.chmod(0o777)
                listener.listen(1)
                listener.settimeout(_START_LIMIT_S)
                words = self._words(binds, devices)
                try:
                    run_program([self._program, *words])
                except OSError:
                    if self._spec.image is not None:
                        raise
                    # Somebody may have tidied the images up.
                    _find_skeleton.cache_clear()
                    _find_skeleton(self._program)
                    run_program([self._program, *words])
                connection, _ = listener.accept()
            # Before any program runs.
            path.unlink()
        except (OSError, TimeoutError) as error:
            self.remove()
            raise OSError(str(error) or "its agent did not start") from error
        connection.settimeout(None)
        pid, _, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        return connection, pid

    def _words(self, binds: Sequence[tuple[str, str, bool]], devices: Mapping[str, str]) -> list[str]:
        spec, limits, is_podman = self._spec, self._spec.limits, self._engine == "podman"
        words = ["run", "--detach", "--rm", "--log-driver=none", "--hostname=sandbox", "--workdir=/"]
        words += ["--user=0:0", "--cgroupns=private", "--cap-drop=all", "--security-opt=no-new-privileges"]
        words += [
            "--env=LANG=C.UTF-8",
            "--name",
            self.name,
            "--network",
            "host" if spec.network == "host" else "none",
        ]
        names = (*_CAPABILITIES, *(_ROOT_NAMES if self.is_writable else ()))
        words += [word for name in names for word in ("--cap-add", name)]
        # The agent and a few runners are in the group too.
        words += ["--pids-limit", str(limits.max_processes + 16)]
        memory = f"{limits.group_bytes + (32 << 20)}b"
        words += ["--memory", memory, "--memory-swap", memory]
        if limits.cpus is not None:
            words += ["--cpus", f"{limits.cpus:.3f}"]
        # Set explicitly, because podman raises them by default, which fails inside another container.
        words += ["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=4096:4096"]
        words += ["--tmpfs", f"/tmp:rw,exec,mode=1777,size={limits.scratch_bytes}"]
        words += ["--tmpfs", f"/dev/shm:rw,mode=1777,size={limits.shm_bytes}"]
        if not self.is_writable:
            words += ["--read-only"]
            if spec.has_workspace and spec.image is not None:
                words += ["--tmpfs", f"{WORKSPACE}:rw,exec,mode=0777,size={limits.scratch_bytes}"]
        elif is_podman and not self._is_rootless:
            self.first_id = self._claim_ids()
            mapping = f"0:{self.first_id}:{NUM_IDS}"
            words += ["--uidmap", mapping, "--gidmap", mapping]
        for host_path, inside_path in devices.items():
            words += ["--device", f"{host_path}:{inside_path}:rw" if inside_path else host_path]
        shown = [(str(self._ground.inside), "/.strop", True), (str(self._link), "/.strop/link", False)]
        if spec.image is None:
            shown += [(path, path, True) for path in system_tree()[1]]
            start: tuple[str, ...] = (python_candidates()[0],)
        else:
            shown.append((own_prefix(), "/.strop/python", True))
            start = loader_argv(self._ground.inside)
        for host_path, inside_path, read_only in (*shown, *binds):
            words += ["--volume", f"{host_path}:{inside_path}:{'ro' if read_only else 'rw'}"]
        words += ["--entrypoint", start[0]]
        if is_podman:
            words += ["--no-hosts"] + (["--read-only-tmpfs=false"] if not self.is_writable else [])
        command = [*start[1:], *_PYTHON_FLAGS, "/.strop/agent.pyc", "/.strop/link/socket"]
        if spec.image is not None and os.path.isabs(spec.image):
            return [*words, "--rootfs", f"{spec.image}:O", *command]
        return [*words, "--pull", "never", spec.image or _find_skeleton(self._program), *command]

    def _claim_ids(self) -> int:
        """Reserve an unused range of this host's ids as long as the container lives; return the first."""
        for step in range(_NUM_RANGES):
            index = (os.getpid() + self._number + step) % _NUM_RANGES
            claim = socket.socket(socket.AF_UNIX)
            try:
                # An abstract socket ends with its process, so no file can be left behind.
                claim.bind(f"\0strop-sandbox-ids-{index}")
            except OSError:
                claim.close()
                continue
            self._claim = claim
            return _FIRST_ID + index * NUM_IDS
        raise OSError(errno.EAGAIN, f"all {_NUM_RANGES} ranges of user ids are taken")

    def rights(self, uid: int, user: int | None, pid: int) -> tuple[list[int] | None, int, int]:
        """Return ids and capabilities of programs inside, and the agent's own.

        `uid`: the private user of this host. `pid`: the agent.
        """
        if user == 0:
            return None, ROOT_CAPABILITIES & ~(1 << 5), ROOT_CAPABILITIES | AGENT_CAPABILITIES
        if user is None and self._is_rootless:
            # One of podman's own; the agent is this user.
            user = next(
                one for one in (1000, 1) if map_id(read_or_empty(f"/proc/{pid}/uid_map"), one) is not None
            )
        inside = uid if user is None else user
        return [inside, inside], 0, AGENT_CAPABILITIES

    def find_groups(self, pid: int) -> Cgroup:
        """Return the container's own control groups, which end with it."""
        membership = read_or_empty(f"/proc/{pid}/cgroup")
        if membership == read_or_empty("/proc/self/cgroup"):
            # Where the engine may not make groups, the container is in this process's own.
            return Cgroup()
        found = find_controllers(membership=membership, is_for_children=False)
        return Cgroup(
            {each.name: each.own_dir for each in found}, max((each.version for each in found), default=0)
        )

    def remove(self) -> None:
        """Remove the container, running or not."""
        remove_container(self._program, self.name)
        shutil.rmtree(self._link, ignore_errors=True)
        if self._claim is not None:
            self._claim.close()


def remove_container(program: str, name: str) -> None:
    """Remove a container if it exists, running or not."""
    is_podman = os.path.basename(program) == "podman"
    with suppress(OSError):
        run_program(
            [program, "rm", "--force", "--volumes", *(("--time", "0", "--ignore") if is_podman else ()), name]
        )


@cache
def _find_skeleton(program: str) -> str:
    """Return the name of an image that shows this host's /usr, made if it is not there. Raises: OSError."""
    with suppress(OSError):
        run_program([program, "image", "inspect", _SKELETON])
        return _SKELETON
    links, shown = system_tree()
    folders = ["tmp", "proc", "sys", "dev", "etc", "run", ".strop", *filter(os.path.isdir, shown)]
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, target in {**dict.fromkeys(folders, ""), **links, WORKSPACE: f"/tmp{WORKSPACE}"}.items():
            member = tarfile.TarInfo(name.strip("/"))
            member.mode, member.linkname = 0o755, target
            member.type = tarfile.SYMTYPE if target else tarfile.DIRTYPE
            archive.addfile(member)
    run_program([program, "import", "-", _SKELETON], stdin=packed.getvalue())
    return _SKELETON


@cache
def require_image(engine: str, image: str, *, has_users: bool) -> None:
    """Refuse an image that is not here, or is made for another machine. Blocks.

    Raises: SandboxRefused with kind image or architecture.
    """
    kind, why, architecture = "image", "", ""
    if os.path.isabs(image):
        why = "there is no such directory" if not os.path.isdir(image) else ""
        why = why or ("docker has no images that are directories" if engine == "docker" else "")
        if not why and has_users and os.geteuid() == 0:
            why = "a directory has no users of its own: import it into podman's store"
    else:
        try:
            architecture = run_engine(
                engine, "image", "inspect", "--format", "{{.Architecture}}", image
            ).strip()
        except OSError as error:
            why = str(error)
    if not why and _has_linked_dev(engine, image):
        # Runtimes follow it, and make device files in the directories of the host.
        why = "its /dev is a link"
    own = _ARCHITECTURES.get(platform.machine(), "")
    if architecture and own and architecture != own:
        kind, why = "architecture", f"it is for {architecture}, and this host is {own}"
    if why:
        raise SandboxRefused(
            f"image {image!r} in a {engine} sandbox: {why}",
            allowed=f"an image for this machine in {engine}'s store, or of podman a directory tree",
            next_step=f"build or pull the image: {engine} pull {image}",
            kind=kind,
        )


def _has_linked_dev(engine: str, image: str) -> bool:
    if os.path.isabs(image):
        return os.path.islink(f"{image}/dev")
    if engine == "docker":
        name = run_engine(engine, "create", "--network", "none", "--pull", "never", image, "none").strip()
        try:
            with suppress(OSError):
                # The kind of the first entry of an archive.
                return run_engine(engine, "cp", f"{name}:/dev", "-")[156:157] == "2"
            return False
        finally:
            remove_container(engine, name)
    look = 'place=$(podman image mount "$0") && { test -L "$place/dev"; echo $?; podman image unmount "$0"; }'
    ahead = () if os.geteuid() == 0 else ("podman", "unshare")
    return run_program([*ahead, "sh", "-c", look, image]).startswith("0")


@cache
def require_engine(name: str, program: str) -> None:
    """Refuse an engine that does not answer, or whose containers cannot be sandboxes.

    Blocks for a tenth of a second. Raises: SandboxRefused with the engine's name as its kind; for podman with
    kind graph_root, or for an ordinary user newuidmap or subuid.
    """
    is_podman, kind, why, next_step = (
        name == "podman",
        name,
        "",
        f"run {name} info, and mend the error that it reports",
    )
    if is_podman and os.geteuid() != 0:
        for helper in ("newgidmap", "newuidmap"):
            if shutil.which(helper) is None:
                kind, why, next_step = (
                    "newuidmap",
                    f"{helper} is not installed",
                    "as root, install the package uidmap",
                )
    template = "{{.Store.GraphRoot}}" if is_podman else "{{json .SecurityOptions}}"
    if not why:
        try:
            answer = run_program([program, "info", "--format", template], limit_s=_ANSWER_LIMIT_S).strip()
            options = [] if is_podman else list(json.loads(answer))
            why = next((f"docker answers, {_UNFIT[option]}" for option in options if option in _UNFIT), "")
        except (OSError, ValueError, TypeError) as error:
            why = f"{name} does not tell what it is: {error}"
    if not why and not is_podman and os.geteuid() != 0:
        why = "docker answers, and its containers belong to root, and this process to an ordinary user"
    if not why and is_podman and os.geteuid() != 0:
        maps = run_program([program, "unshare", "cat", "/proc/self/uid_map"])
        if sum(int(line.split()[2]) for line in maps.splitlines()) < 2:
            kind, why = "subuid", "/etc/subuid gives this user no ids"
            next_step = "as root: usermod --add-subuids 100000-165535 --add-subgids 100000-165535 USER"
    if not why and is_podman:
        from strop.hardware.disks import describe_disk

        disk = describe_disk(Path(answer))
        if disk.is_network:
            kind, why = "graph_root", f"podman keeps its containers on a disk that machines share: {disk}"
            next_step = "set graphroot in storage.conf to a directory of a local disk"
    if why:
        raise SandboxRefused(
            why,
            allowed=f"a {name} that works for this user; of docker, a daemon of this machine's root",
            next_step=next_step,
            kind=kind,
        )
