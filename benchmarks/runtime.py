"""How quick the sandbox service is, through HTTP, beside podman's own program.

Starts are asked for at once, each on a connection of its own, as a step of rollouts asks. A tool call is what
OpenHands' client does for one: it starts `true` by the bash route and asks for its events until it has ended;
one after the other, of sandboxes drawn in turn while all of them live. Controller, node agent and client are
processes of their own, over loopback.

Where only the controller counts, the node agent is one that makes nothing: many starts at once, each answer's
time counted from the moment before the first was sent, so that waiting in the client counts too.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure, Measured
from benchmarks.sandboxes import measure_podman_itself, used_bytes
from benchmarks.service import IMAGE, Client, Connection, Sandbox, serving
from strop.runtime.keys import KeyRing

_NUM_STARTS = 512
_NUM_SLOTS = 8
_MAX_ANSWER_S = 1.0
_HELD_START_S = 0.7
_MAX_AFTER_READY_S = 0.3
_NUM_HELD = 10
_MAX_P50_MS, _MAX_P99_MS, _MAX_IDLE_MB = 10.0, 50.0, 8.0
_MIN_WARM_PER_S = 50.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Size:
    """How much is measured with one backend."""

    num_live: int = 64
    num_calls: int = 1000
    num_cold: int
    num_crowd: int = 500
    """That live at once."""
    min_cold_per_s: float | None = None
    num_warm: int = 0


_SIZES = {
    "bubblewrap": _Size(num_cold=200, min_cold_per_s=100.0, num_warm=64),
    "podman": _Size(num_cold=32, min_cold_per_s=7.0, num_warm=64),
    "process": _Size(num_cold=200),
}
_QUICK_SIZES = {"bubblewrap": _Size(num_live=4, num_calls=40, num_cold=4, num_crowd=4, num_warm=4)}


def measure_runtime(*, is_quick: bool) -> Measured:
    """Measure all kinds of sandbox, and a controller alone. Needs root, bubblewrap and podman."""
    figures: list[Figure] = []
    for name, size in (_QUICK_SIZES if is_quick else _SIZES).items():
        figures += asyncio.run(_measure_backend(name, size))
    if not is_quick:
        figures += measure_podman_itself(20)
    controller, answers_s = _measure_controller(*((32, 2) if is_quick else (_NUM_STARTS, _NUM_HELD)))
    return Measured(figures=figures + controller, details={"answers_s": answers_s, "num_slots": _NUM_SLOTS})


def _figure(name: str, unit: str, value: float, **goal: float | None) -> Figure:
    return Figure(name=name, unit=unit, value=value, measured=(value,), **goal)


# A real node.


async def _measure_backend(name: str, size: _Size) -> list[Figure]:
    found: list[Figure] = []

    def say(what: str, unit: str, value: float, **goal: float | None) -> None:
        found.append(_figure(f"{name}: {what}", unit, value, **goal))

    with serving(name) as place:
        async with Client(*place) as client:
            # The first one makes what the others share.
            await client.stop_all([await client.start()])
            await _measure_starts(client, size, say)
            await _measure_calls(client, size, say)
            await _measure_crowd(client, size, say)
    if size.num_warm:
        with serving(name, "--warm", f"{IMAGE}={size.num_warm}") as place:
            async with Client(*place) as client:
                await _measure_warm(client, size.num_warm, say)
    return found


async def _measure_starts(client: Client, size: _Size, say: Callable[..., None]) -> None:
    begun = time.perf_counter()
    records = await client.start_many(size.num_cold)
    rate = size.num_cold / (time.perf_counter() - begun)
    say("starts until all are ready", "a second", rate, at_least=size.min_cold_per_s)
    begun = time.perf_counter()
    await client.stop_all(records)
    say("stops until nothing is left", "a second", size.num_cold / (time.perf_counter() - begun))
    after_s = []
    for _ in range(_NUM_HELD):
        async with _one(client) as one:
            await one.connection.run("true")
            told = await client.ask("GET", f"/sessions/{one.record['session_id']}")
            while "first_command" not in told["timeline"]:
                await asyncio.sleep(0.05)
                told = await client.ask("GET", f"/sessions/{one.record['session_id']}")
            after_s.append(told["timeline"]["first_command"] - told["timeline"]["ready"])
    say("ready to its client's first command, slowest", "s", max(after_s), at_most=_MAX_AFTER_READY_S)


@asynccontextmanager
async def _one(client: Client) -> AsyncIterator[Sandbox]:
    """Start one, and stop it at the end."""
    one = await client.connect(await client.start())
    yield one
    one.connection.close()
    await client.stop_all([one.record])


async def _measure_calls(client: Client, size: _Size, say: Callable[..., None]) -> None:
    before = used_bytes()
    live = [await client.connect(one) for one in await client.start_many(size.num_live)]
    idle_mb = (used_bytes() - before) / size.num_live / 1e6
    taken_ms = []
    for index in range(-size.num_live, size.num_calls):
        begun = time.perf_counter()
        await live[index % size.num_live].connection.run("true")
        # The first of each uses a process that was made for it ahead.
        if index >= 0:
            taken_ms.append(1e3 * (time.perf_counter() - begun))
    cuts = statistics.quantiles(taken_ms, n=100)
    begun = time.perf_counter()
    await asyncio.gather(*(_call_often(one, size.num_calls // size.num_live) for one in live))
    rate = size.num_calls // size.num_live * size.num_live / (time.perf_counter() - begun)
    await _stop_all(client, live)
    say(f"tool call beside {size.num_live}, p50", "ms", cuts[49], at_most=_MAX_P50_MS)
    say(f"tool call beside {size.num_live}, p99", "ms", cuts[98], at_most=_MAX_P99_MS)
    say(f"tool calls of {size.num_live} at once", "a second", rate)
    say("memory of an idle one, the service's too", "MB", idle_mb, at_most=_MAX_IDLE_MB)


async def _call_often(one: Sandbox, number: int) -> None:
    for _ in range(number):
        await one.connection.run("true")


async def _stop_all(client: Client, sandboxes: Sequence[Sandbox]) -> None:
    for one in sandboxes:
        one.connection.close()
    await client.stop_all([one.record for one in sandboxes])


async def _measure_crowd(client: Client, size: _Size, say: Callable[..., None]) -> None:
    """Have many live at once, and a command in each."""
    before, available = used_bytes(), _available_bytes()
    begun = time.perf_counter()
    live = [await client.connect(one) for one in await client.start_many(size.num_crowd)]
    started_s = time.perf_counter() - begun
    used_mb, gone_mb = (used_bytes() - before) / 1e6, (available - _available_bytes()) / 1e6
    for one in live:
        await one.connection.run("true")
    await _stop_all(client, live)
    num = size.num_crowd
    say("live at once, with a command in each", "", float(len(live)), at_least=float(num))
    say(f"{num} live: started in", "s", started_s)
    say(f"{num} live: memory of their processes and the service's", "MB", used_mb)
    say(f"{num} live: memory that the machine has less", "MB", gone_mb)


def _available_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


async def _measure_warm(client: Client, number: int, say: Callable[..., None]) -> None:
    """Take a whole pool at once."""
    # From the first start on there is a pool.
    first = await client.start()

    async def is_full() -> bool:
        return await client.metric("node_warm_sandboxes") >= number

    await client.wait_for(is_full)
    begun = time.perf_counter()
    records = await client.start_many(number)
    rate = number / (time.perf_counter() - begun)
    say(f"{number} starts from a warm pool", "a second", rate, at_least=_MIN_WARM_PER_S)
    await client.stop_all([first, *records])


# The controller.


@dataclass(frozen=True, kw_only=True, slots=True)
class _Service:
    url: str
    key: str


def _measure_controller(num_starts: int, num_held: int) -> tuple[list[Figure], list[float]]:
    """Measure a controller with nodes that make nothing; return the times of all answers too."""
    with _scripted(start_s=0.0) as it:
        answers_s, records = asyncio.run(_start_all(it, num_starts))
        lost = num_starts - len({one["runtime_id"] for one in records})
        syncs = asyncio.run(_count_syncs(it))
    with _scripted(start_s=_HELD_START_S) as it:
        after_s = asyncio.run(_wait_each(it, num_held))
    several = f"{num_starts} starts at once"
    figures = [
        _figure(f"{several}: the slowest answer", "s", max(answers_s), at_most=_MAX_ANSWER_S),
        _figure(f"{several}: lost", "", float(lost), at_most=0.0),
        _figure(f"{several}: syncs of the journal", "", syncs),
        Figure(
            name="ready to told, p50",
            unit="s",
            value=statistics.median(after_s),
            measured=tuple(after_s),
            at_most=_MAX_AFTER_READY_S,
        ),
    ]
    return figures, sorted(answers_s)


@contextmanager
def _scripted(*, start_s: float) -> Iterator[_Service]:
    """A controller and a scripted node, each a process."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        words = ["strop.runtime.controller", "--state-dir", folder]
        output = stack.enter_context(_process([*words, "--policy", json.dumps({"cpu_factor": 1.0})])).stdout
        assert output is not None
        told = json.loads(output.readline())
        words = ["strop.testing.scripted_node", "--controller", told["url"], "--slots", str(_NUM_SLOTS)]
        words += ["--key-file", told["node_keys_file"], "--start-s", str(start_s)]
        stack.enter_context(_process(words))
        it = _Service(url=told["url"], key=KeyRing(Path(told["keys_file"])).newest)
        while not json.loads(asyncio.run(_ask(it, "GET", "/nodes")))["nodes"]:
            time.sleep(0.05)
        yield it


@contextmanager
def _process(words: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()


async def _start_all(it: _Service, number: int) -> tuple[list[float], list[dict[str, Any]]]:
    """Return how long each of so many starts took, asked for at once, and their records."""
    begun = time.perf_counter()

    async def start(index: int) -> tuple[float, dict[str, Any]]:
        answer = await _ask(it, "POST", "/start", _start_body(f"s{index}"))
        return time.perf_counter() - begun, json.loads(answer)

    found = await asyncio.gather(*(start(index) for index in range(number)))
    return [one[0] for one in found], [one[1] for one in found]


async def _count_syncs(it: _Service) -> float:
    async with Client(it.url, it.key) as client:
        return await client.metric("strop_runtime_journal_syncs_total")


async def _wait_each(it: _Service, number: int) -> list[float]:
    """Return how long after each sandbox was ready its client knew it, which had asked before."""
    after_s = []
    for index in range(number):
        record = json.loads(await _ask(it, "POST", "/start", _start_body(f"h{index}")))
        told = json.loads(await _ask(it, "GET", f"/sessions/h{index}"))
        after_s.append(time.time() - told["timeline"]["ready"])
        assert told["pod_status"] == "ready", told
        await _ask(it, "POST", "/stop", {"runtime_id": record["runtime_id"]})
    return after_s


def _start_body(session_id: str) -> dict[str, Any]:
    return {"image": "img:1", "command": "server --port 60000", "session_id": session_id, "working_dir": "/"}


async def _ask(it: _Service, method: str, path: str, body: object = None) -> bytes:
    """Ask on a connection of its own; return the answer's body."""
    connection = await Connection.open(it.url, X_API_Key=it.key)
    try:
        return await connection.ask(method, path, body)
    finally:
        connection.close()
