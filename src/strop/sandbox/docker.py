"""Backend `docker`: the containers of backend `podman`, made by a docker daemon of this machine.

docker starts no container over a root that it did not create, and its daemon does not see the mounts of a
supervisor. So each container starts from an image of two files; then its root is replaced, from outside, with
the same overlay as in `podman`, and docker's mounts in /proc, /sys and /dev stay. docker also makes no user
namespace for a single container: for `SandboxSpec.user` the supervisor makes one for the programs. Process 1
has no user in it, and programs have no capability over the container's other namespaces.

docker does not mount images on the host either: one idle container per image runs as long as the daemon of
its sandboxes, which use its root file system. Nothing is copied, whatever docker's storage driver.

Covered: all of level `container`, for root, with a docker daemon on the same machine. Not covered: ordinary
users; a docker daemon on another machine, in a virtual one (Docker Desktop), rootless, or with userns-remap.
Tried with docker 20.10 and runc 1.1.5 on Linux 6.18 with control groups of version 1.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path

from strop.sandbox.engine import Engine, container_name
from strop.sandbox.idmap import make_users, users_map
from strop.sandbox.linux import (
    CLONE_NEWUSER,
    bind,
    detach_mount,
    enter_namespaces,
    read_file,
    replace_root,
    show_of,
)
from strop.sandbox.podman import ARCHITECTURES, INIT, PodmanPlace, make_init, require_architecture

_OWN_WORDS = ("--pull", "never", "--stop-signal", "KILL")
"""No registry is asked; and a docker daemon that ends need not wait for process 1, which ignores SIGTERM."""
_NEW_ROOT = "/new"
_KEPT = ("/proc", "/sys", "/dev")
_KEPT_OF_HOST = ("/etc/resolv.conf", "/etc/hosts")
"""Files that the host's network needs."""


class DockerPlace(PodmanPlace):
    """A docker container, held by its process 1."""

    _sees_own_mounts = False

    @staticmethod
    def find_image(engine: Engine, image: str, runtime_dir: str) -> str:
        """Return the path where an image is mounted until `drop_images`; see `PodmanPlace.find_image`."""
        require_architecture(engine, image)
        number = len(list(Path(runtime_dir).glob("image-*")))
        folder = Path(runtime_dir, f"image-{number}")
        folder.mkdir()
        holder = container_name(runtime_dir, folder.name)
        try:
            words = ("--name", holder, "--network", "none", "--cap-drop", "all", "--log-driver", "none")
            engine.run("create", *words, *_OWN_WORDS, "--entrypoint", INIT, image)
            _give(engine, {INIT: make_init(platform.machine())}, "cp", "-", f"{holder}:/")
            engine.run("start", holder)
            mounts = os.open(f"/proc/{_find_process(engine, holder)}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
            try:
                show_of(mounts, "/", str(folder), is_whole=False)
            finally:
                os.close(mounts)
        except OSError:
            engine.remove(holder)
            folder.rmdir()
            raise
        return str(folder)

    @staticmethod
    def drop_images(engine: Engine, images: Mapping[str, str]) -> None:
        """Unmount images, and remove the idle containers that hold them. Raises: OSError."""
        for place in images.values():
            engine.remove(container_name(str(Path(place).parent), Path(place).name))
            detach_mount(place)

    def _start(self) -> int:
        binds = [
            (self._ground.staged.get(host, host), inside, read_only)
            for host, inside, read_only in (*self._mount_root(), *self._order.binds)
        ]
        if self._has_users:
            namespace = make_users(self.first_id)
            # Bound to a name, since processes inside keep no descriptor but that of process 1.
            Path(self._base, "users").touch()
            bind(f"/proc/self/fd/{namespace}", f"{self._base}/users")
            os.close(namespace)
        words = [*self._words(), *_OWN_WORDS]
        has_host_network = self._order.network == "host"
        if not has_host_network:
            # Root of a user namespace has no rights over the network.
            words += ["--sysctl", "net.ipv4.ip_unprivileged_port_start=0"]
        name, archive = _own_image()
        try:
            self._engine.run(*words, name)
        except OSError as error:
            if "No such image" not in str(error):
                raise
            # This is the first container, or the image was removed.
            _give(self._engine, archive, "load", "--quiet")
            self._engine.run(*words, name)
        pid = _find_process(self._engine, self._name)
        kept = (*_KEPT, *(_KEPT_OF_HOST if has_host_network else ()))
        replace_root(pid, _NEW_ROOT, f"{self._base}/root", kept=kept, binds=binds)
        return pid

    def enter(self) -> None:
        """Join the namespaces of process 1, then the user namespace of programs."""
        users = os.open(f"{self._base}/users", os.O_RDONLY | os.O_CLOEXEC) if self._has_users else None
        super().enter()
        if users is not None:
            enter_namespaces(users, CLONE_NEWUSER)
            os.close(users)

    def _user_map(self) -> str:
        return users_map(self.first_id) if self._has_users else super()._user_map()


def _find_process(engine: Engine, container: str) -> int:
    """Return process 1 of a container. Raises: OSError if it is not a process of this machine."""
    words = ("inspect", "--format", "{{.Id}} {{.State.Pid}}", container)
    container_id, _, pid = engine.run(*words).strip().partition(" ")
    try:
        is_here = container_id in read_file(f"/proc/{pid}/cgroup")
    except OSError:
        is_here = False
    if not is_here:
        raise OSError(
            errno.ENOTSUP,
            "the containers of this docker daemon are not processes of this machine, as seen here",
        )
    return int(pid)


def _own_image() -> tuple[str, dict[str, bytes]]:
    """Return the image that containers start from: a name made of its digest, and its archive."""
    init = make_init(platform.machine())
    layer = _pack({INIT: init, f"{_NEW_ROOT}/": b""})
    config = json.dumps(
        {
            "architecture": ARCHITECTURES[platform.machine()],
            "os": "linux",
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
        }
    ).encode()
    digest = hashlib.sha256(config).hexdigest()
    name = f"localhost/strop-sandbox:{digest[:16]}"
    manifest = [{"Config": f"{digest}.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    return name, {
        "manifest.json": json.dumps(manifest).encode(),
        f"{digest}.json": config,
        "layer.tar": layer,
    }


def _give(engine: Engine, files: Mapping[str, bytes], *words: str) -> None:
    """Run docker with an archive of files as its standard input. Raises: OSError."""
    archive = os.memfd_create("archive")
    try:
        os.write(archive, _pack(files))
        os.lseek(archive, 0, os.SEEK_SET)
        engine.run(*words, stdin=archive)
    finally:
        os.close(archive)


def _pack(files: Mapping[str, bytes]) -> bytes:
    """Return a reproducible tar archive of files; a name that ends with / is a directory's."""
    # Imported here, since only docker needs it.
    import tarfile

    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name.strip("/"))
            member.type = tarfile.DIRTYPE if name.endswith("/") else tarfile.REGTYPE
            member.mode, member.size = 0o755, len(content)
            archive.addfile(member, io.BytesIO(content))
    return packed.getvalue()
