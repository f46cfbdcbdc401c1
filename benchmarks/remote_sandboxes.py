"""How quick sandboxes of a service are, beside the same ones of this machine.

The service is a controller and a node with bubblewrap, processes of their own, over loopback. Commands are
`true`, given one after the other to sandboxes drawn in turn while all of them live: in turn one of the
service and one of this machine, so that what the service adds is the difference. Beside them, commands of a
shell that stays open, connections to a server inside, files of 16 MiB, and whole lives: a start, one command,
a stop.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.figures import Figure, Measured
from benchmarks.sandboxes import measure_followed
from strop.io.endpoints import Endpoint
from strop.runtime.service_dir import START_LIMIT_S, ServiceDir, serve_argv
from strop.sandbox import Limits, SandboxSpec
from strop.sandbox.contract import MIB
from strop.sandbox.local import LocalBackend
from strop.sandbox.remote import RemoteBackend
from strop.sandbox.served import ServedSandbox

_NUM_LIVE = 64
_NUM_COMMANDS = 1000
_NUM_LIVES = 64
_NUM_FILES = 20
_MAX_P50_MS, _MAX_P99_MS = 10.0, 50.0
_WALL_LIMIT_S = 60.0
_SPEC = SandboxSpec(limits=Limits(memory_bytes=128 * MIB))
_POLICY = {"cpu_factor": 1000.0, "settle_s": 0.0}
"""So many live at once on few processors."""


def measure_remote_sandboxes(*, is_quick: bool) -> Measured:
    """Measure both. Needs bubblewrap."""
    num_live, num_commands = (4, 40) if is_quick else (_NUM_LIVE, _NUM_COMMANDS)
    num_lives, num_files = (4, 2) if is_quick else (_NUM_LIVES, _NUM_FILES)
    with _service() as endpoint:
        figures = asyncio.run(
            _measure(
                RemoteBackend(endpoint), num_live, num_commands, num_lives=num_lives, num_files=num_files
            )
        )
    return Measured(figures=figures, details={"num_live": num_live, "num_commands": num_commands})


@contextmanager
def _service() -> Iterator[Endpoint]:
    with tempfile.TemporaryDirectory() as folder:
        words = ("--backend", "bubblewrap", "--policy", json.dumps(_POLICY))
        with open(Path(folder, "log"), "wb") as log:
            command = serve_argv(sys.executable, folder, *words)
            service = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            place = ServiceDir(Path(folder))
            yield asyncio.run(place.wait_for(place.find, limit_s=START_LIMIT_S))
        finally:
            service.terminate()
            service.wait()


async def _measure(
    remote: RemoteBackend, num_live: int, num_commands: int, *, num_lives: int, num_files: int
) -> list[Figure]:
    local = LocalBackend("bubblewrap")
    # The first ones start what the others share.
    await _time_life(remote)
    await _time_life(local)
    there = [await remote.create(_SPEC) for _ in range(num_live)]
    here = [await local.create(_SPEC) for _ in range(num_live)]
    commands_ms: tuple[list[float], list[float]] = ([], [])
    for index in range(num_commands):
        for sandbox, taken_ms in zip(
            (there[index % num_live], here[index % num_live]), commands_ms, strict=True
        ):
            taken_ms.append(await _time_command(sandbox))
    figures = _describe_commands(*commands_ms)
    figures += await _measure_beside(there[0], num_commands // 5, num_files)
    await asyncio.gather(*(one.stop() for one in (*there, *here)))
    for backend, where in ((remote, "of the service"), (local, "of this machine")):
        lives_ms = [await _time_life(backend) for _ in range(num_lives)]
        figures.append(_figure(f"start, command and stop, {where}, p50", "ms", lives_ms))
    begun = time.perf_counter()
    started = await asyncio.gather(*(remote.create(_SPEC) for _ in range(num_lives)))
    per_s = num_lives / (time.perf_counter() - begun)
    await asyncio.gather(*(one.stop() for one in started))
    figures.append(Figure(name="starts of the service", unit="a second", value=per_s, measured=(per_s,)))
    return figures


async def _time_command(sandbox: ServedSandbox) -> float:
    begun = time.perf_counter()
    await sandbox.exec(["/bin/true"], wall_limit_s=_WALL_LIMIT_S)
    return 1e3 * (time.perf_counter() - begun)


async def _time_life(backend: RemoteBackend | LocalBackend) -> float:
    begun = time.perf_counter()
    async with await backend.create(_SPEC) as sandbox:
        await sandbox.exec(["/bin/true"], wall_limit_s=_WALL_LIMIT_S)
    return 1e3 * (time.perf_counter() - begun)


def _describe_commands(there_ms: list[float], here_ms: list[float]) -> list[Figure]:
    figures = []
    for taken_ms, where in ((there_ms, "of the service"), (here_ms, "of this machine")):
        cuts = statistics.quantiles(taken_ms, n=100)
        for rank, value, most in (("p50", cuts[49], _MAX_P50_MS), ("p99", cuts[98], _MAX_P99_MS)):
            name = f"command, {where}, {rank}"
            figures.append(Figure(name=name, unit="ms", value=value, measured=(value,), at_most=most))
    added = [there - here for there, here in zip(there_ms, here_ms, strict=True)]
    figures.append(_figure("what the service adds to a command, p50", "ms", added))
    return figures


async def _measure_beside(sandbox: ServedSandbox, num: int, num_files: int) -> list[Figure]:
    """Measure in one sandbox what is no command of its own."""
    taken_ms = await measure_followed(sandbox, num)
    data = bytes(range(256)) * (16 * MIB // 256 - 1)
    for name in ("write of 16 MiB", "read of 16 MiB"):
        taken_ms[name] = []
    for _ in range(num_files):
        begun = time.perf_counter()
        await sandbox.write("file", data)
        written = time.perf_counter()
        assert await sandbox.read("file") == data
        taken_ms["write of 16 MiB"].append(1e3 * (written - begun))
        taken_ms["read of 16 MiB"].append(1e3 * (time.perf_counter() - written))
    return [_figure(f"{name}, of the service, p50", "ms", values) for name, values in taken_ms.items()]


def _figure(name: str, unit: str, values: Sequence[float]) -> Figure:
    return Figure(name=name, unit=unit, value=statistics.median(values), measured=tuple(values))
