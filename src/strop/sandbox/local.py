"""The client's side of the sandboxes of this machine.

Beyond the contract they offer Python: `python_argv`, and `run_main`, which runs a function in a fork of an
interpreter that has loaded it. Judges of programs use it.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import site
import socket
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import strop
from strop.errors import SandboxRefused
from strop.sandbox.allowlist import parse_network, refuse_network
from strop.sandbox.bubblewrap import system_tree
from strop.sandbox.client import Client
from strop.sandbox.contract import (
    WORKSPACE,
    ExecKind,
    Isolation,
    IsolationLevel,
    SandboxSpec,
)
from strop.sandbox.daemon_handle import daemon_of, python_candidates
from strop.sandbox.engine import ENGINES, engine_environ, require_engine
from strop.sandbox.idmap import NUM_IDS
from strop.sandbox.place import identify
from strop.sandbox.served import MIN_PYTHON, ServedSandbox, read_isolation
from strop.sandbox.spawning import run_program

_START_LIMIT_S = 60.0
_PROBE_LIMIT_S = 60.0
_MIN_BUBBLEWRAP = (0, 8)
_PYTHON_FLAGS = ("-I", "-S", "-B")


class LocalSandbox(ServedSandbox):
    """A sandbox that a daemon's supervisor serves. Usable from one event loop."""

    def __init__(
        self,
        client: Client,
        isolation: Isolation,
        spec: SandboxSpec,
        header: Mapping[str, Any],
        python_argv: tuple[str, ...],
    ) -> None:
        super().__init__(
            client,
            isolation,
            scratch=str(header["scratch"]),
            env=spec.env,
            python_argv=python_argv,
            supervisor_pid=int(header["pid"]),
        )
        self._mounts = {os.path.realpath(mount.host_path): mount.inside_path for mount in spec.mounts}
        self._mounts.update(header["moved_mounts"])

    def find_mount(self, host_path: str) -> str:
        """Return the path inside of a mounted path. Raises: LookupError if it was not mounted."""
        return self._mounts[os.path.realpath(host_path)]

    async def connect(self, address: int | str) -> socket.socket:
        """Return a connection to a server inside; see `Sandbox.connect`."""
        header, _ = await self.client.ask({"op": "connect", "address": address})
        return socket.socket(fileno=header["descriptor"])

    async def find_python(self) -> tuple[str, ...]:
        """Return the first Python that starts inside, with its flags; empty if none does."""
        for path in python_candidates():
            code = "import sys; print(*sys.version_info[:2])"
            result = await self.exec([path, *_PYTHON_FLAGS, "-c", code], wall_limit_s=_PROBE_LIMIT_S)
            version = tuple(int(word) for word in result.stdout.split() if word.isdigit())
            if result.kind is ExecKind.EXITED and version >= MIN_PYTHON:
                return (path, *_PYTHON_FLAGS)
        return ()


class LocalBackend:
    """Make sandboxes on this machine, by one of `strop.sandbox.choose.BACKENDS`."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def create(
        self, spec: SandboxSpec, *, main_source: str = "", beside: ServedSandbox | None = None
    ) -> LocalSandbox:
        """Return a fresh sandbox that is ready for its first command.

        `main_source`: trusted Python that defines `main`, for `run_main`. It is loaded once, outside of every
        sandbox, and must only import and define. `beside` has no effect: see `RayBackend.create`.

        Raises: SandboxError as `write`, for a file of the spec; SandboxRefused with kind image, architecture,
        user, gpus, mounts, workspace, network, no_space, missing (no bwrap, podman or docker), graph_root,
        bubblewrap, podman, docker, level or host.
        """
        refuse_network(spec.network, self.name)
        _refuse_unsupported(spec, self.name)
        program = find_program(*_PROGRAMS[self.name]) if self.name in _PROGRAMS else ""
        if self.name in ENGINES:
            await asyncio.to_thread(require_engine, self.name, program)
        elif program:
            await asyncio.to_thread(_require_bubblewrap, program)
        devices: Mapping[str, str] = {}
        if spec.gpus:
            spec, devices = await asyncio.to_thread(give_gpus, spec, self.name)
        key = (self.name, spec.image)
        if key not in _pythons:
            # Once, in a separate sandbox, because the limits of `spec` may be too tight for it.
            plain = SandboxSpec(min_level=IsolationLevel.NONE, image=spec.image)
            async with await _start(self.name, plain, program, main_source, ()) as sandbox:
                _pythons[key] = await sandbox.find_python()
        async with AsyncExitStack() as stack:
            made = await _start(self.name, spec, program, main_source, _pythons[key], devices=devices)
            await stack.enter_async_context(made)
            for path, data in spec.files.items():
                await made.write(path, data)
            # All files are written: the sandbox is the caller's.
            stack.pop_all()
        return made


@cache
def package_folders() -> tuple[str, ...]:
    """Return the folders of this Python's installed packages, and strop's own."""
    folders = [*site.getsitepackages(), site.getusersitepackages(), str(Path(strop.__file__).parent.parent)]
    return tuple(dict.fromkeys(str(folder) for folder in folders if Path(folder).is_dir()))


def shown_folders() -> tuple[str, ...]:
    """Return the folders of this host that programs of sandboxes without an image may read."""
    return (*system_tree()[1], os.path.realpath(sys.base_prefix), *package_folders())


_PROGRAMS = {
    "bubblewrap": ("bwrap", "bubblewrap"),
    "podman": ("podman", "podman"),
    "docker": ("docker", "docker.io"),
}
"""The program of each backend, and the package that contains it."""
_pythons: dict[tuple[str, str | None], tuple[str, ...]] = {}
"""A cache of `find_python` by backend and image."""


async def _start(
    backend: str,
    spec: SandboxSpec,
    program: str,
    main_source: str,
    python_argv: tuple[str, ...],
    *,
    devices: Mapping[str, str] = MappingProxyType({}),
) -> LocalSandbox:
    binds = _binds(spec, has_python=bool(program))
    order = {
        "backend": backend,
        "limits": asdict(spec.limits),
        "min_level": int(spec.min_level),
        "network": str(parse_network(spec.network) or spec.network),
        "binds": binds,
        "devices": dict(devices),
        "seen": {path: identify(path) for path in (*(bind[0] for bind in binds), *devices, spec.image or "")},
        "program": program,
        "image": spec.image or "",
        "user": spec.user,
        "has_workspace": spec.has_workspace,
        "engine_env": engine_environ(),
    }
    client = Client(daemon_of(os.getpid(), main_source).start(order), backend)
    try:
        async with asyncio.timeout(_START_LIMIT_S):
            header = await client.first_frame()
    except (ConnectionError, TimeoutError) as error:
        header = {
            "refused": "host",
            "why": f"its supervisor was not ready: {str(error) or 'no answer in time'}",
        }
    except asyncio.CancelledError:
        client.close()
        raise
    if "refused" in header:
        client.close()
        raise SandboxRefused(
            f"no {backend} sandbox of level {spec.min_level.word} or better was created: {header['why']}",
            allowed=f"a host where {backend} reaches that level",
            next_step="look at its message; user namespaces may be off, or a mounted path unreadable",
            kind=header["refused"],
        )
    return LocalSandbox(client, read_isolation(header["ready"]), spec, header, python_argv)


def give_gpus(spec: SandboxSpec, backend: str) -> tuple[SandboxSpec, Mapping[str, str]]:
    """Return a spec with variables for its GPUs, and device files: path here to path inside.

    Asks the driver. Raises: SandboxRefused with kind gpus.
    """
    # Imported here, because they need packages, and sandboxes without GPUs need only the standard library.
    from strop.hardware.allocation import DEVICE_ORDER, PCI_BUS_ID
    from strop.hardware.gpus import list_device_files, match_devices, report_gpus
    from strop.hardware.visible_devices import VISIBLE_DEVICES

    if backend == "process":
        raise SandboxRefused(
            f"GPUs {', '.join(spec.gpus)} in a process sandbox, whose programs reach all GPUs of the machine",
            allowed="a backend with a private /dev: bubblewrap, podman, docker",
            next_step="use one of them, or give the sandbox no GPUs",
            kind="gpus",
        )
    report = report_gpus()
    found = [match_devices(name, report.gpus) for name in spec.gpus]
    try:
        devices = [device for (device,) in found]
        paths = list_device_files(devices)
    except (OSError, LookupError, ValueError) as error:
        listed = ", ".join(device.uuid for device in report.devices) or report.complaint or "no GPU"
        raise SandboxRefused(
            f"GPUs {', '.join(spec.gpus)}: their device files are not known here ({error}); found: {listed}",
            allowed="GPUs or MIG slices of this machine, as CUDA_VISIBLE_DEVICES names them",
            next_step="look at nvidia-smi -L and /dev; nvidia-modprobe -u -c=0 as root makes the files",
            kind="gpus",
        ) from error
    # By UUID, since an index depends on the device files that a program has.
    visible = ",".join(device.uuid for device in devices)
    env = {**spec.env, VISIBLE_DEVICES: visible, DEVICE_ORDER: PCI_BUS_ID}
    # CUDA reserves addresses for the memory of all GPUs.
    limits = replace(spec.limits, has_address_limit=False)
    spec = replace(spec, env=env, limits=limits)
    return spec, {path: f"/dev/{path.partition('/dev/')[2]}" for path in paths}


def _refuse_unsupported(spec: SandboxSpec, backend: str) -> None:
    """Refuse settings that the backend does not support.

    Raises: SandboxRefused with kind image, user, mounts or workspace.
    """
    if spec.image is not None and spec.image.startswith("-"):
        raise SandboxRefused(
            f"image {spec.image!r}",
            allowed="the name of an image, or the absolute path of a directory tree",
            next_step="name the image",
            kind="image",
        )
    if spec.image is not None and backend not in ENGINES:
        raise SandboxRefused(
            f"image {spec.image!r} in a {backend} sandbox",
            allowed="no image: its programs see this host's /usr",
            next_step="leave the image out, or use backend podman or docker",
            kind="image",
        )
    is_user_there = backend in ENGINES and os.geteuid() == 0
    if spec.user is not None and not (is_user_there and 0 <= spec.user < NUM_IDS):
        raise SandboxRefused(
            f"user {spec.user} in a {backend} sandbox",
            allowed=f"0 to {NUM_IDS - 1} of podman or docker as root; else programs are a user of their own",
            next_step="leave the user out, or use backend podman or docker",
            kind="user",
        )
    if backend != "process":
        return
    for mount in spec.mounts:
        if not mount.read_only or mount.inside_path != mount.host_path:
            raise SandboxRefused(
                f"backend process was asked to mount {mount.host_path!r} at {mount.inside_path!r}"
                + (", to write to it" if not mount.read_only else ""),
                allowed="files that a program reads at their own paths, or at those of `find_mount`",
                next_step="use backend bubblewrap, or write the files into the sandbox",
                kind="mounts",
            )
    if spec.has_workspace:
        raise SandboxRefused(
            f"backend process was asked for a directory {WORKSPACE}",
            allowed="the private directory, which `scratch` names",
            next_step="use backend bubblewrap, or work in the private directory",
            kind="workspace",
        )


def find_program(name: str, package: str) -> str:
    """Return the path of a program on PATH. Raises: SandboxRefused with kind missing."""
    path = shutil.which(name)
    if path is None:
        raise SandboxRefused(
            f"program {name} was not found on PATH",
            allowed="a host where it is installed",
            next_step=f"as root, run make system-deps, or install the package {package}",
            kind="missing",
        )
    return path


@cache
def _require_bubblewrap(program: str) -> None:
    """Refuse a bwrap without the options that sandboxes need. Raises: SandboxRefused with kind bubblewrap."""
    told = run_program([program, "--version"], {}, limit_s=_PROBE_LIMIT_S).stdout.decode(errors="replace")
    version = tuple(map(int, re.findall(r"\d+", told)[:2]))
    if version and version < _MIN_BUBBLEWRAP:
        raise SandboxRefused(
            f"{program} is {told.strip()}",
            allowed="bubblewrap 0.8 or newer, whose --disable-userns keeps programs from new namespaces",
            next_step="install a newer one, put it first on PATH, or use backend podman",
            kind="bubblewrap",
        )


def _binds(spec: SandboxSpec, *, has_python: bool) -> list[tuple[str, str, bool]]:
    """Return host path, path inside and read-only of all mounts; with `has_python` also of this Python."""
    prefix = os.path.realpath(sys.base_prefix)
    is_below_usr = prefix == "/usr" or prefix.startswith("/usr/")
    python = [(prefix, prefix, True)] if has_python and not is_below_usr else []
    return python + [
        (os.path.realpath(mount.host_path), mount.inside_path, mount.read_only) for mount in spec.mounts
    ]
