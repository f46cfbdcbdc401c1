"""A host: makes the sandboxes of one machine.

The service has one of its own, or by Ray one on each node (`cluster`). Sandboxes end with the process of
their host, however it ends (`sandbox.agent`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import socket
import time
from dataclasses import dataclass, replace
from typing import Protocol

from strop.errors import SandboxRefused, given_of
from strop.hardware.machine import free_memory_bytes, read_cpu_quota
from strop.runtime.agent_server import OPENHANDS, injected_argv, injected_mounts, is_agent_server
from strop.runtime.contract import INSIDE_PORT, Options, Slot, StartRequest
from strop.runtime.images import Images
from strop.sandbox import IsolationLevel, Limits, SandboxSpec
from strop.sandbox.allowlist import refuse_network
from strop.sandbox.choose import BACKENDS, choose_among
from strop.sandbox.container import ENGINES
from strop.sandbox.contract import MIB
from strop.sandbox.ground import NUM_IDS
from strop.sandbox.janitor import clear_abandoned
from strop.sandbox.local import LocalBackend, LocalSandbox
from strop.sandbox.served import ServedSandbox

HOST_IMAGE = "host"
"""The name for no image: the programs see the node's /usr."""
_LEVEL = IsolationLevel.RLIMIT
_OUTPUT_BYTES = 4 * MIB
_FLOOD_BYTES = 1 << 30
_MAX_FILES = 200_000
_MAX_OPEN_FILES = 4096
_STARTS_PER_CPU = 4
"""Concurrent starts: making namespaces is mostly waiting for the kernel."""
_LOOK_LIMIT_S = 30.0
RESERVED_BYTES = 512 << 20
"""For the service and the agents of its sandboxes."""
RESERVED_FRAC = 0.1
_log = logging.getLogger("strop.runtime.host")


@dataclass(frozen=True, kw_only=True, slots=True)
class HostFacts:
    """A host when it was opened."""

    name: str
    """Of its machine."""
    pid: int
    cpus: float
    memory_bytes: int
    """For the memory and the files of its sandboxes."""
    ends_in_s: float | None
    """Seconds until its allocation ends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """How the server in a sandbox is started there."""

    argv: list[str]
    env: dict[str, str]
    """Beside the client's variables and the service's own."""
    cwd: str
    port: int


class Host(Protocol):
    """What the service asks of a host, here or on another node."""

    async def make(self, request: StartRequest, slot: Slot) -> tuple[ServedSandbox, Server]:
        """Fetch a request's image, if it is not there; return a fresh sandbox, for the caller to stop.

        Raises: SandboxRefused as `Images.fetch`, with kind image also where no backend has images, or nothing
            in it can be started; SandboxLost.
        """
        ...


class LocalHost:
    """A host of this process. `open` it first."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._images: Images | None = None
        self._turn = asyncio.Semaphore(_STARTS_PER_CPU * len(os.sched_getaffinity(0)))

    async def open(self) -> HostFacts:
        """Choose the backends and clear what a killed host left; return the facts.

        Raises: SandboxRefused if a wanted backend does not work here, or none does, or for a network that
            cannot be; ConfigError for an unknown name.
        """
        for line in await asyncio.to_thread(clear_abandoned):
            _log.warning("a host that was killed had left: %s", line)
        wanted = self._options.backends
        for name in wanted:
            await choose_among((name,), _LEVEL)
        # Programs of `process` are this user, who may read the service's keys, unless it is root.
        shielding = BACKENDS if os.geteuid() == 0 else tuple(name for name in BACKENDS if name != "process")
        self._backend = (await choose_among(wanted or shielding, _LEVEL)).name
        refuse_network(self._options.network, self._backend)
        engines = [name for name in wanted or ENGINES if name in ENGINES]
        try:
            self._images = Images((await choose_among(engines, _LEVEL)).name, self._options.registries)
        except SandboxRefused as refusal:
            self._why_no_images = given_of(refusal)
            _log.warning("no images: %s", self._why_no_images)
        cpus, memory_bytes = measure_capacity()
        end_at = _read_variable("SLURM_JOB_END_TIME")
        return HostFacts(
            name=platform.node(),
            pid=os.getpid(),
            cpus=cpus,
            memory_bytes=memory_bytes,
            ends_in_s=None if end_at is None else end_at - time.time(),
        )

    async def make(self, request: StartRequest, slot: Slot) -> tuple[LocalSandbox, Server]:
        """Return a fresh sandbox; see `Host.make`."""
        name, image = self._backend, None
        if request.image != HOST_IMAGE:
            if self._images is None:
                raise SandboxRefused(
                    f"image {request.image!r} on a node that has {HOST_IMAGE!r} alone: {self._why_no_images}",
                    kind="image",
                )
            # The id, because a name may be moved.
            image = await self._images.fetch(request.image, request.image_pull_policy)
            name = self._images.engine
        user = request.run_as_user
        has_user = name in ENGINES and os.geteuid() == 0 and user is not None and user < NUM_IDS
        spec = SandboxSpec(
            limits=Limits(
                memory_bytes=slot.memory_bytes,
                has_address_limit=False,
                max_processes=slot.processes,
                file_bytes=slot.disk_bytes,
                scratch_bytes=slot.disk_bytes,
                max_scratch_files=_MAX_FILES,
                max_open_files=_MAX_OPEN_FILES,
                cpus=slot.cpus,
                output_head_bytes=_OUTPUT_BYTES,
                output_tail_bytes=_OUTPUT_BYTES,
                flood_bytes=_FLOOD_BYTES,
            ),
            image=image,
            user=user if has_user else None,
            has_workspace=name != "process",
            network=self._options.network,
            min_level=_LEVEL,
        )
        if is_agent_server(request) and OPENHANDS.is_ready():
            spec = replace(spec, mounts=await asyncio.to_thread(injected_mounts, name, image))
        async with self._turn:
            try:
                sandbox = await LocalBackend(name).create(spec)
            except SandboxRefused as refusal:
                # Only a start tells whether the file system and kernel can map the image's users.
                if spec.user is None or refusal.kind != name:
                    raise
                sandbox = await LocalBackend(name).create(replace(spec, user=None))
        try:
            return sandbox, await _find_server(sandbox, request)
        except BaseException:
            await sandbox.stop()
            raise


async def _find_server(sandbox: LocalSandbox, request: StartRequest) -> Server:
    """Return the client's command, or the injected agent server where the image lacks the one it names."""
    argv, port, cwd = list(request.command), INSIDE_PORT, request.working_dir
    env: dict[str, str] = {}
    look_for = ["test", "-e", argv[0]]
    has_path = is_agent_server(request) and argv[0].startswith("/")
    if has_path and (await sandbox.exec(look_for, wall_limit_s=_LOOK_LIMIT_S)).exit_code != 0:
        if not OPENHANDS.is_ready():
            raise SandboxRefused(
                f"the image has no {argv[0]}, and no agent server can be injected: run `make openhands-deps`"
                " on the node",
                kind="image",
            )
        argv, env = injected_argv(request, sandbox.find_mount)
    if sandbox.isolation.network == "host":
        # All such sandboxes share the node's ports.
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = int(probe.getsockname()[1])
        argv = [str(port) if word == str(INSIDE_PORT) else word for word in argv]
    make_folder = ["mkdir", "-p", cwd]
    if cwd != "/" and (await sandbox.exec(make_folder, wall_limit_s=_LOOK_LIMIT_S)).exit_code != 0:
        cwd = "/"
    return Server(argv=argv, env=env, cwd=cwd, port=port)


def measure_capacity() -> tuple[float, int]:
    """Return the processors and the bytes of memory that all sandboxes on this machine may use together.

    The tightest limit counts: what is free on the machine or in this process's control groups, or Slurm's.
    """
    job_cpus = _read_variable("SLURM_CPUS_ON_NODE")
    # Slurm counts in MiB, per node or per CPU; 0 means all memory of the node.
    job_mib = _read_variable("SLURM_MEM_PER_NODE")
    if not job_mib:
        job_mib = (_read_variable("SLURM_MEM_PER_CPU") or 0.0) * (job_cpus or 0.0)
    sizes = (free_memory_bytes(), job_mib * (1 << 20) or None)
    memory_bytes = min((size for size in sizes if size is not None), default=0)
    numbers = (float(len(os.sched_getaffinity(0))), read_cpu_quota(), job_cpus)
    cpus = min(number for number in numbers if number is not None)
    return cpus, max(1, int((1.0 - RESERVED_FRAC) * memory_bytes) - RESERVED_BYTES)


def _read_variable(name: str) -> float | None:
    try:
        return float(os.environ.get(name, ""))
    except ValueError:
        return None
