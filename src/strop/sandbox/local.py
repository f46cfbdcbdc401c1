"""The sandboxes of this machine: agents that one of the backends starts, and this process's end of them.

Backend `process` is a child in a private directory, without namespaces. Covered: every descendant is killed,
clean environment, per-process limits; as host root also a private user, which protects other users' files and
makes the number of processes a kernel limit. Not covered: the network; world-readable and world-writable
files; for an ordinary user also that user's own files and processes, strop's included. Training on
model-written code refuses it.
"""

from __future__ import annotations

import asyncio
import marshal
import os
import platform
import shutil
import signal
import site
import socket
import subprocess
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import strop
from strop.errors import SandboxRefused
from strop.sandbox.agent import PROXY_PORT, remove_ipc, remove_tree
from strop.sandbox.allowlist import parse_network, refuse_network
from strop.sandbox.bubblewrap import AGENT, AGENT_CAPABILITIES, bubblewrap_argv, system_tree
from strop.sandbox.cgroup import Cgroup, make_cgroup
from strop.sandbox.client import Client
from strop.sandbox.container import ENGINES, Container, require_engine, require_image
from strop.sandbox.contract import WORKSPACE, ExecKind, Guard, Isolation, IsolationLevel, SandboxSpec
from strop.sandbox.ground import (
    NUM_IDS,
    Ground,
    count_user_tasks,
    ground_of,
    map_id,
    own_prefix,
    private_user,
    python_candidates,
)
from strop.sandbox.janitor import end_inside
from strop.sandbox.proxy import serve_caller
from strop.sandbox.seccomp import FILTER
from strop.sandbox.served import MIN_PYTHON, ServedSandbox

_START_LIMIT_S = 60.0
_END_LIMIT_S = 20.0
_PROBE_LIMIT_S = 60.0
_PYTHON_FLAGS = ("-I", "-S", "-B")
# Since Linux 5.14 a user's processes are counted per user namespace.
_KERNEL_WITH_COUNTS = (5, 14)
_PACKAGES = {
    "bubblewrap": ("bwrap", "bubblewrap"),
    "podman": ("podman", "podman"),
    "docker": ("docker", "docker.io"),
}
"""The program of each backend, and the package that contains it."""
_pythons: dict[tuple[str, str | None], tuple[str, ...]] = {}
"""A cache of `find_python` by backend and image."""


class LocalSandbox(ServedSandbox):
    """A sandbox of this machine. Usable from one event loop."""

    client: Client

    def __init__(
        self,
        client: Client,
        isolation: Isolation,
        spec: SandboxSpec,
        *,
        scratch: str,
        supervisor_pid: int,
    ) -> None:
        super().__init__(
            client, isolation, scratch=scratch, env=spec.env, python_argv=(), supervisor_pid=supervisor_pid
        )
        self._mounts = {os.path.realpath(mount.host_path): mount.inside_path for mount in spec.mounts}

    def find_mount(self, host_path: str) -> str:
        """Return the path inside of a mounted path. Raises: LookupError if it was not mounted."""
        return self._mounts[os.path.realpath(host_path)]

    async def connect(self, address: int | str) -> socket.socket:
        """Return a connection to a server inside; see `ServedSandbox.connect`."""
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

        `main_source`: trusted Python that defines `main`, for `run_main`. The agent loads it before the first
        request; it must only import and define. `beside` has no effect: see `RayBackend.create`.

        Raises: SandboxRefused with kind image, architecture, interpreter, user, gpus, mounts, workspace,
        network, no_space, missing (no bwrap, podman or docker), bubblewrap, podman, docker, graph_root,
        subuid, newuidmap, level or host; SandboxError like `write` for one of `spec.files`.
        """
        refuse_network(spec.network, self.name)
        _refuse_unsupported(spec, self.name)
        program = find_program(*_PACKAGES[self.name]) if self.name in _PACKAGES else ""
        if self.name in ENGINES:
            await asyncio.to_thread(require_engine, self.name, program)
            if spec.image is not None:
                has_users = spec.user is not None
                await asyncio.to_thread(require_image, self.name, spec.image, has_users=has_users)
        devices: Mapping[str, str] = {}
        if spec.gpus:
            spec, devices = await asyncio.to_thread(give_gpus, spec, self.name)
        start = partial(_start, self.name, program, main_source)
        key = (self.name, spec.image)
        if key not in _pythons:
            # Once, in a separate sandbox, because the limits of `spec` may be too tight for it.
            plain = SandboxSpec(min_level=IsolationLevel.NONE, image=spec.image)
            async with await start(plain, {}) as sandbox:
                _pythons[key] = await sandbox.find_python()
        async with AsyncExitStack() as stack:
            made = await start(spec, devices)
            made.found_python = _pythons[key]
            await stack.enter_async_context(made)
            for path, data in spec.files.items():
                await made.write(path, data)
            # All files are written: the sandbox is the caller's.
            stack.pop_all()
        return made


@dataclass(kw_only=True)
class _Launched:
    """An agent that was started, and what must be removed after it."""

    connection: socket.socket
    pid: int
    """Its process on this host, or bwrap above it."""
    scratch: str
    group: Cgroup
    uid: int
    """The programs' user on this host; None is known of an image's users."""
    has_own_uid: bool
    errors: int = -1
    """A file with what it wrote to standard error."""
    process: subprocess.Popen[bytes] | None = None
    container: Container | None = None
    folder: Path | None = None
    group_files: tuple[int, ...] = ()
    """Its descriptors of the directories of `group`."""

    async def finish(self) -> bool:
        """Remove everything once the agent is gone; return whether nothing is left."""
        with suppress(OSError):
            watched = os.pidfd_open(self.pid)
            loop, ended = asyncio.get_running_loop(), asyncio.Event()
            loop.add_reader(watched, ended.set)
            try:
                async with asyncio.timeout(_END_LIMIT_S):
                    await ended.wait()
            except TimeoutError:
                signal.pidfd_send_signal(watched, signal.SIGKILL)
            finally:
                loop.remove_reader(watched)
                os.close(watched)
        return await asyncio.to_thread(self._clear)

    def _clear(self) -> bool:
        if self.process is not None:
            self.process.wait()
        if self.container is not None:
            self.container.remove()
        else:
            self.group.remove()
        if self.folder is not None:
            end_inside(self.folder)
            remove_tree(self.folder)
        if self.has_own_uid and self.container is None:
            remove_ipc(self.uid, is_idle=False)
        if self.errors >= 0:
            os.close(self.errors)
            self.errors = -1
        return True


async def _start(
    backend: str, program: str, main_source: str, spec: SandboxSpec, devices: Mapping[str, str]
) -> LocalSandbox:
    """Start an agent, tell it what the sandbox is, and judge what it measures. Raises: SandboxRefused."""
    own_kind = "host" if backend == "process" else backend
    try:
        ground = ground_of()
        if backend in ENGINES:
            launched = await asyncio.to_thread(_launch_container, ground, backend, program, spec, devices)
        else:
            launched = _launch(ground, backend, program, spec, devices)
    except OSError as error:
        raise _refused(backend, spec, own_kind, str(error)) from error
    setup, allowed = _setup(launched, backend, spec), parse_network(spec.network)
    serve = None if allowed is None else partial(serve_caller, allowed=allowed)
    client = Client(launched.connection, backend, launched.finish, serve)
    client.tell({**setup, "main_source": main_source}, _compiled(main_source))
    try:
        async with asyncio.timeout(_START_LIMIT_S):
            header = await client.first_frame()
    except (ConnectionError, TimeoutError) as error:
        said = os.pread(launched.errors, 4096, 0).decode(errors="replace") if launched.errors >= 0 else ""
        header = {"refused": own_kind, "why": said.strip() or str(error) or "no answer in time"}
    except asyncio.CancelledError:
        client.close()
        await asyncio.shield(launched.finish())
        raise
    if "ready" in header:
        isolation = _judge(header["ready"], launched, backend, spec, setup, ground)
        if isolation.level >= spec.min_level:
            return LocalSandbox(
                client, isolation, spec, scratch=launched.scratch, supervisor_pid=launched.pid
            )
        header = {"refused": "level", "why": f"{isolation.level.word} was reached: {isolation}"}
    client.close()
    await launched.finish()
    raise _refused(backend, spec, header["refused"], header["why"])


def _refused(backend: str, spec: SandboxSpec, kind: str, why: str) -> SandboxRefused:
    return SandboxRefused(
        f"no {backend} sandbox of level {spec.min_level.word} or better was created: {why}",
        allowed=f"a host where {backend} reaches that level",
        next_step="look at its message; user namespaces may be off, or a mounted path unreadable",
        kind="no_space" if "No space left" in why else kind,
    )


@lru_cache(maxsize=8)
def _compiled(source: str) -> bytes:
    return marshal.dumps(compile(source, "<main_source>", "exec")) if source else b""


def _launch(
    ground: Ground, backend: str, program: str, spec: SandboxSpec, devices: Mapping[str, str]
) -> _Launched:
    """Start an agent as a child, in namespaces or without. Raises: OSError."""
    number = next(ground.numbers)
    is_process = backend == "process"
    folder = ground.folder / str(number) if is_process else None
    group = make_cgroup(ground.controllers, f"strop-box-{os.getpid()}-{number}", spec.limits)
    files: list[int] = []
    ours, theirs = socket.socketpair()
    errors = os.memfd_create("errors")
    try:
        files += [os.open(path, os.O_RDONLY | os.O_DIRECTORY) for path in dict.fromkeys(group.dirs.values())]
        source = str(ground.inside / "agent.pyc")
        binds = [*_binds(spec), (source, AGENT, True)]
        words = [] if is_process else bubblewrap_argv(program, spec, binds, devices)
        words += [
            python_candidates()[0],
            *_PYTHON_FLAGS,
            source if is_process else AGENT,
            str(theirs.fileno()),
        ]
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            pass_fds=[theirs.fileno(), *files],
            env={"LANG": "C.UTF-8"},
            cwd="/",
            start_new_session=True,
        )
    except OSError:
        ours.close()
        os.close(errors)
        group.remove()
        raise
    finally:
        theirs.close()
        for file in files:
            os.close(file)
    uid, has_own_uid = private_user(process.pid)
    if folder is not None:
        folder.mkdir(mode=0o700)
        os.chown(folder, uid, uid)
    return _Launched(
        connection=ours,
        pid=process.pid,
        scratch=str(folder or "/tmp"),
        group=group,
        uid=uid,
        has_own_uid=has_own_uid,
        errors=errors,
        process=process,
        folder=folder,
        group_files=tuple(files),
    )


def _launch_container(
    ground: Ground, backend: str, program: str, spec: SandboxSpec, devices: Mapping[str, str]
) -> _Launched:
    """Start an agent as process 1 of a container. Blocks. Raises: OSError."""
    container = Container(backend, program, ground, spec)
    connection, pid = container.start(_binds(spec) if spec.image is None else _mounts(spec), devices)
    uid, has_own_uid = (container.first_id, True) if container.first_id else private_user(pid)
    return _Launched(
        connection=connection,
        pid=pid,
        scratch="/tmp",
        group=container.find_groups(pid),
        uid=uid,
        has_own_uid=has_own_uid,
        container=container,
    )


def _setup(launched: _Launched, backend: str, spec: SandboxSpec) -> dict[str, Any]:
    """Return the first frame of an agent."""
    limits, is_root, is_process = spec.limits, os.geteuid() == 0, backend == "process"
    is_bubblewrap, group = backend == "bubblewrap", launched.group
    user: list[int] | None = [launched.uid, launched.uid]
    capabilities, kept = 0, AGENT_CAPABILITIES
    if launched.container is not None:
        user, capabilities, kept = launched.container.rights(launched.uid, spec.user, launched.pid)
    elif not is_root:
        user = None if is_process else [0, 0]
    version = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2])
    has_count = launched.has_own_uid or (is_bubblewrap and version >= _KERNEL_WITH_COUNTS)
    watch = {} if "memory" in group.dirs else {"memory": limits.memory_bytes}
    if not (has_count or "pids" in group.dirs):
        watch["processes"] = limits.max_processes
    if is_process:
        watch |= {"disk": limits.scratch_bytes, "files": limits.max_scratch_files}
    # A shared user also runs other processes: the limit only bounds a fork bomb, which the watch finds.
    others = count_user_tasks(launched.uid) if is_process and not launched.has_own_uid else 0
    # One inode is the directory itself.
    inodes = f"nr_inodes={limits.max_scratch_files + 1}"
    sizes = {"/tmp": limits.scratch_bytes, "/dev/shm": limits.shm_bytes}
    env = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "HOME": launched.scratch,
        "TMPDIR": launched.scratch,
        "PYTHONHASHSEED": "0",
    }
    allowed = parse_network(spec.network)
    if allowed is not None:
        listed = {host for host, _ in allowed.endpoints}
        direct = ",".join(host for host in ("localhost", "127.0.0.1", "::1") if host not in listed)
        proxy = f"http://127.0.0.1:{PROXY_PORT}"
        # Some programs read the lower-case names, some the upper-case ones.
        for name, text in (("http_proxy", proxy), ("https_proxy", proxy), ("no_proxy", direct)):
            env |= {name: text, name.upper(): text}
    workspace = f"/tmp{WORKSPACE}" if spec.image is None else WORKSPACE
    return {
        "limits": asdict(limits),
        "scratch": launched.scratch,
        "user": user,
        "has_users": is_bubblewrap,
        "capabilities": capabilities,
        "kept_capabilities": None if is_process else kept,
        "watch": watch,
        "max_user_processes": others + limits.max_processes if has_count or is_process else None,
        "is_host": is_process,
        "is_own_disk": not is_process,
        "groups": list(launched.group_files),
        "has_engine_groups": launched.container is not None and bool(group.dirs),
        "remounts": {} if is_process else {path: f"size={size},{inodes}" for path, size in sizes.items()},
        "workspace": workspace if spec.has_workspace else "",
        "has_proxy": allowed is not None,
        "env": env,
        "filter": FILTER.hex(),
    }


def _judge(
    facts: Mapping[str, Any],
    launched: _Launched,
    backend: str,
    spec: SandboxSpec,
    setup: Mapping[str, Any],
    ground: Ground,
) -> Isolation:
    """Return the isolation reached, from the measurement of a process inside."""
    own = {name: facts["namespaces"][name] != identity for name, identity in ground.namespaces.items()}
    groups, watch, is_process = launched.group.dirs, setup["watch"], backend == "process"
    host_uid, root_is = facts["uid"], "0"
    if own["user"] and (backend != "bubblewrap" or os.geteuid() == 0):
        host_uid = map_id(facts["uid_map"], host_uid)
        root_is = root_inside(facts["uid_map"])
    elif own["user"]:
        # The agent's namespace is between, and has nobody but this user.
        host_uid, root_is = os.geteuid(), "unmapped"
    allowed = setup["capabilities"] if own["user"] else 0
    is_harmless = facts["no_new_privs"] and facts["permitted"] & ~allowed == 0 and host_uid != 0
    needed = own.keys() - ({"user"} if backend in ENGINES else set())
    is_separate = all(own[name] for name in needed if name != "net" or spec.network != "host")
    level = IsolationLevel.NONE
    if is_harmless and is_process:
        level = IsolationLevel.RLIMIT
    elif is_harmless and is_separate and not facts["nested_userns"]:
        level = IsolationLevel.NAMESPACE
        if backend in ENGINES and facts["seccomp"] and {"memory", "pids"} <= groups.keys():
            level = IsolationLevel.CONTAINER
    is_bounded = launched.container is None or not launched.container.is_writable
    return Isolation(
        level=level,
        backend=backend,
        userns=own["user"],
        pidns=own["pid"],
        mountns=own["mnt"],
        netns=own["net"],
        ipcns=own["ipc"],
        utsns=own["uts"],
        **{name: facts[name] for name in ("seccomp", "no_new_privs", "caps", "nested_userns")},
        host_root_maps_to=root_is,
        host_uid=host_uid,
        memory=Guard.WATCHED if "memory" in watch else Guard.ENFORCED,
        pids=Guard.WATCHED if "processes" in watch else Guard.ENFORCED,
        cpu=Guard.ENFORCED if "cpu" in groups and spec.limits.cpus is not None else Guard.NONE,
        disk=Guard.WATCHED if is_process else Guard.ENFORCED if is_bounded else Guard.NONE,
        files=Guard.ENFORCED,
        network=str(parse_network(spec.network) or spec.network) if own["net"] else "host",
        kernel=platform.release(),
    )


def root_inside(uid_map: str) -> str:
    """Return the id of the host's root in a user namespace, from its uid_map; or 'unmapped'."""
    for inside, outside, length in (map(int, line.split()) for line in uid_map.splitlines()):
        if outside <= 0 < outside + length:
            return str(inside - outside)
    return "unmapped"


@cache
def package_folders() -> tuple[str, ...]:
    """Return the folders of this Python's installed packages, and strop's own."""
    folders = [*site.getsitepackages(), site.getusersitepackages(), str(Path(strop.__file__).parent.parent)]
    return tuple(dict.fromkeys(str(folder) for folder in folders if Path(folder).is_dir()))


def shown_folders() -> tuple[str, ...]:
    """Return the folders of this host that programs of sandboxes without an image may read."""
    return (*system_tree()[1], own_prefix(), *package_folders())


def give_gpus(spec: SandboxSpec, backend: str) -> tuple[SandboxSpec, Mapping[str, str]]:
    """Return a spec with variables for its GPUs, and device files: path here to path inside.

    For containers they are names of CDI instead. Raises: SandboxRefused with kind gpus.
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
    try:
        devices = [device for name in spec.gpus for (device,) in [match_devices(name, report.gpus)]]
        if backend in ENGINES:
            files = {f"nvidia.com/gpu={device.uuid}": "" for device in devices}
        else:
            files = {path: f"/dev/{path.partition('/dev/')[2]}" for path in list_device_files(devices)}
    except (OSError, LookupError, ValueError) as error:
        listed = ", ".join(device.uuid for device in report.devices) or report.complaint or "no GPU"
        raise SandboxRefused(
            f"GPUs {', '.join(spec.gpus)}: their device files are not known here ({error}); found: {listed}",
            allowed="GPUs or MIG slices of this machine, as CUDA_VISIBLE_DEVICES names them",
            next_step="look at nvidia-smi -L and /dev; nvidia-modprobe -u -c=0 as root makes the files",
            kind="gpus",
        ) from error
    # By UUID, since an index depends on the device files that a program has.
    own = {VISIBLE_DEVICES: ",".join(device.uuid for device in devices), DEVICE_ORDER: PCI_BUS_ID}
    # CUDA reserves addresses for the memory of all GPUs.
    limits = replace(spec.limits, has_address_limit=False)
    return replace(spec, env={**spec.env, **own}, limits=limits), files


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
    if spec.user is not None and not (backend in ENGINES and 0 <= spec.user < NUM_IDS):
        raise SandboxRefused(
            f"user {spec.user} in a {backend} sandbox",
            allowed=f"0 to {NUM_IDS - 1} of podman or docker; else programs are a user of their own",
            next_step="leave the user out, or use backend podman",
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


def _mounts(spec: SandboxSpec) -> list[tuple[str, str, bool]]:
    return [(os.path.realpath(mount.host_path), mount.inside_path, mount.read_only) for mount in spec.mounts]


def _binds(spec: SandboxSpec) -> list[tuple[str, str, bool]]:
    """Return host path, path inside and read-only of all mounts, with this Python."""
    prefix = own_prefix()
    is_below_usr = prefix == "/usr" or prefix.startswith("/usr/")
    return ([] if is_below_usr else [(prefix, prefix, True)]) + _mounts(spec)
