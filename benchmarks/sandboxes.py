"""How quick sandboxes are: commands beside many that live, starts and stops; beside podman's own program.

Commands are `true`, given one after the other to sandboxes drawn in turn while all of them live, so that each
is what a tool call costs; beside them, in one of these sandboxes, connections to a server and commands of a
shell that stays open. Starts and stops are asked for at once, as a step of rollouts asks. podman's own
program starts and enters containers of the same kind, in the same run, one at a time.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from benchmarks.figures import Figure, Measured
from strop.sandbox import Sandbox, SandboxSpec, make_backend
from strop.sandbox.family import find_descendants
from strop.sandbox.linux import read_file
from strop.sandbox.served import ServedSandbox

_NUM_LIVE = 64
_NUM_COMMANDS = 1000
_NUM_STARTS = {"bubblewrap": 200, "podman": 32}
_MIN_STARTS_PER_S = {"bubblewrap": 100.0, "podman": 7.0}
_MAX_P50_MS, _MAX_P99_MS, _MAX_IDLE_MB = 10.0, 50.0, 8.0
_WALL_LIMIT_S = 60.0


def measure_sandboxes(*, is_quick: bool) -> Measured:
    """Measure both kinds that isolate. Needs root, bubblewrap and podman."""
    num_live, num_commands = (4, 40) if is_quick else (_NUM_LIVE, _NUM_COMMANDS)
    figures: list[Figure] = []
    for name, num_starts in _NUM_STARTS.items():
        wanted = 4 if is_quick else num_starts
        figures += asyncio.run(_measure_backend(name, num_live, num_commands, wanted))
    figures += measure_podman_itself(2 if is_quick else 20)
    return Measured(figures=figures, details={"num_live": num_live, "num_commands": num_commands})


async def _measure_backend(name: str, num_live: int, num_commands: int, num_starts: int) -> list[Figure]:
    backend, spec = make_backend(name), SandboxSpec()
    # The first one starts what the others share.
    async with await backend.create(spec):
        pass
    before = used_bytes()
    live = [await backend.create(spec) for _ in range(num_live)]
    idle_mb = (used_bytes() - before) / num_live / 1e6
    taken_ms = []
    for index in range(num_commands):
        begun = time.perf_counter()
        await live[index % num_live].exec(["/bin/true"], wall_limit_s=_WALL_LIMIT_S)
        taken_ms.append(1e3 * (time.perf_counter() - begun))
    followed = await measure_followed(live[0], num_commands // 5)
    await _stop_all(live)
    begun = time.perf_counter()
    started = await asyncio.gather(*(backend.create(spec) for _ in range(num_starts)))
    start_s = time.perf_counter() - begun
    begun = time.perf_counter()
    await _stop_all(started)
    stop_s = time.perf_counter() - begun
    cuts = statistics.quantiles(taken_ms, n=100)
    starts, stops = num_starts / start_s, num_starts / stop_s

    def figure(what: str, unit: str, value: float, **goal: float) -> Figure:
        return Figure(name=f"{name}: {what}", unit=unit, value=value, measured=(value,), **goal)

    return [
        figure("command, p50", "ms", cuts[49], at_most=_MAX_P50_MS),
        figure("command, p99", "ms", cuts[98], at_most=_MAX_P99_MS),
        *(figure(f"{what}, p50", "ms", statistics.median(values)) for what, values in followed.items()),
        figure("memory of an idle one", "MB", idle_mb, at_most=_MAX_IDLE_MB),
        figure("starts", "a second", starts, at_least=_MIN_STARTS_PER_S[name]),
        figure("stops", "a second", stops),
    ]


_SERVER = """
import socket
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
while True:
    listener.accept()[0].close()
"""


async def measure_followed(sandbox: ServedSandbox, num: int) -> dict[str, list[float]]:
    """Return the times in ms of connections to a server inside, and of commands of an open shell."""
    server = await sandbox.start([*sandbox.python_argv, "-c", _SERVER])
    output = await server.read()
    assert output is not None
    port = int(output.stdout)
    taken_ms: dict[str, list[float]] = {"connection": [], "command of an open shell": []}
    async with await sandbox.open_shell() as shell:
        for _ in range(num):
            begun = time.perf_counter()
            (await sandbox.connect(port)).close()
            connected = time.perf_counter()
            await shell.run(":", wall_limit_s=_WALL_LIMIT_S)
            taken_ms["connection"].append(1e3 * (connected - begun))
            taken_ms["command of an open shell"].append(1e3 * (time.perf_counter() - connected))
    await server.stop()
    return taken_ms


async def _stop_all(sandboxes: Sequence[Sandbox]) -> None:
    await asyncio.gather(*(sandbox.stop() for sandbox in sandboxes))


def used_bytes() -> int:
    """Return the memory of all below this process, shared pages once, and of containers' monitors."""
    pids = find_descendants(os.getpid())
    sizes = [line for pid in pids for line in _smaps(pid) if line.startswith("Pss:")]
    return sum(int(line.split()[1]) << 10 for line in sizes)


def _smaps(pid: int) -> list[str]:
    try:
        return read_file(f"/proc/{pid}/smaps_rollup").splitlines()
    except OSError:
        return []


def measure_podman_itself(num: int) -> list[Figure]:
    """Return what podman's own program takes for the same: a start with its end, and a command."""
    name = f"strop-bench-{uuid.uuid4().hex[:8]}"
    limits = ["--network", "none", "--ulimit", "nofile=1024:1024", "--ulimit", "nproc=4096:4096"]
    run = ["podman", "run", "--rm", *limits]
    # No image is at hand: this host's own tree, under podman's throw-away layer.
    root = ["--rootfs", "/:O"]
    runs_ms = _time_each([*run, *root, "true"], num)
    subprocess.run([*run, "--detach", "--name", name, *root, "sleep", "600"], check=True, capture_output=True)
    try:
        execs_ms = _time_each(["podman", "exec", name, "true"], num)
    finally:
        subprocess.run(["podman", "rm", "--force", "--time", "0", name], check=True, capture_output=True)
    return [
        Figure(name="podman run", unit="ms", value=statistics.median(runs_ms), measured=tuple(runs_ms)),
        Figure(name="podman exec", unit="ms", value=statistics.median(execs_ms), measured=tuple(execs_ms)),
    ]


def _time_each(words: Sequence[str], num: int) -> list[float]:
    taken_ms = []
    for _ in range(num):
        begun = time.perf_counter()
        subprocess.run(words, check=True, capture_output=True, cwd=Path("/"))
        taken_ms.append(1e3 * (time.perf_counter() - begun))
    return taken_ms
