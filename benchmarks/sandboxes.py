"""How quick sandboxes are: commands beside many that live, and starts.

Commands are `true`, given one after the other to sandboxes drawn in turn while all of them live, so that each
is what a tool call costs. Starts are asked for at once, as a step of rollouts asks.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time

from benchmarks.figures import Figure, Measured
from benchmarks.process_memory import tree_bytes
from strop.sandbox import SandboxSpec, make_backend

_STARTS = {"bubblewrap": (200, 100.0), "podman": (32, 7.0)}
"""How many, and how many a second are wanted."""
_WALL_LIMIT_S = 60.0


def measure_sandboxes(*, is_quick: bool) -> Measured:
    """Measure both kinds that isolate. Needs root, bubblewrap and podman."""
    num_live, num_commands = (4, 40) if is_quick else (64, 1000)
    figures: list[Figure] = []
    for name, (num_starts, _) in _STARTS.items():
        num_starts = 4 if is_quick else num_starts
        figures += asyncio.run(_measure_backend(name, num_live, num_commands, num_starts))
    return Measured(figures=figures, details={"num_live": num_live, "num_commands": num_commands})


async def _measure_backend(name: str, num_live: int, num_commands: int, num_starts: int) -> list[Figure]:
    backend, spec = make_backend(name), SandboxSpec()
    # The first one starts what the others share.
    async with await backend.create(spec):
        pass
    before = tree_bytes(os.getpid())
    live = [await backend.create(spec) for _ in range(num_live)]
    idle_mb = (tree_bytes(os.getpid()) - before) / num_live / 1e6
    taken_ms = []
    for index in range(num_commands):
        begun = time.perf_counter()
        await live[index % num_live].exec(["/bin/true"], wall_limit_s=_WALL_LIMIT_S)
        taken_ms.append(1e3 * (time.perf_counter() - begun))
    await asyncio.gather(*(sandbox.stop() for sandbox in live))
    begun = time.perf_counter()
    started = await asyncio.gather(*(backend.create(spec) for _ in range(num_starts)))
    start_s = time.perf_counter() - begun
    await asyncio.gather(*(sandbox.stop() for sandbox in started))
    cuts = statistics.quantiles(taken_ms, n=100)
    starts = num_starts / start_s
    return [
        Figure.once(f"{name}: command, p50", "ms", cuts[49], at_most=10.0),
        Figure.once(f"{name}: command, p99", "ms", cuts[98], at_most=50.0),
        Figure.once(f"{name}: memory of an idle one", "MB", idle_mb, at_most=8.0),
        Figure.once(f"{name}: starts", "a second", starts, at_least=_STARTS[name][1]),
    ]
