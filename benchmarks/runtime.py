"""How quick the sandbox service is: many starts at once, and how long answers are kept waiting.

The controller, a node agent that is scripted, and the client are processes of their own, over loopback. Each
start is asked for on a connection of its own, all at the same moment; each answer's time is counted from the
moment before the first was sent, so that waiting in the client counts too.
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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.figures import Figure, Measured
from strop.runtime.keys import KeyRing

_NUM_STARTS = 512
_NUM_SLOTS = 8
_MAX_ANSWER_S = 1.0
_HELD_START_S = 0.7
_MAX_AFTER_READY_S = 0.3
_NUM_HELD = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class _Service:
    url: str
    key: str


def measure_runtime(*, is_quick: bool) -> Measured:
    """Measure a controller with nodes that make nothing."""
    num_starts, num_held = (32, 2) if is_quick else (_NUM_STARTS, _NUM_HELD)
    with _service(slots=_NUM_SLOTS, start_s=0.0) as it:
        answers_s, records = asyncio.run(_start_all(it, num_starts))
        lost = num_starts - len({one["runtime_id"] for one in records})
        syncs = _read_metric(it, "journal_syncs_total")
    with _service(slots=_NUM_SLOTS, start_s=_HELD_START_S) as it:
        after_s = asyncio.run(_wait_each(it, num_held))
    figures = [
        _figure(
            f"{num_starts} starts at once: the slowest answer", "s", max(answers_s), at_most=_MAX_ANSWER_S
        ),
        _figure(f"{num_starts} starts at once: lost", "", float(lost), at_most=0.0),
        _figure(f"{num_starts} starts at once: syncs of the journal", "", syncs),
        Figure(
            name="ready to told, p50",
            unit="s",
            value=statistics.median(after_s),
            measured=tuple(after_s),
            at_most=_MAX_AFTER_READY_S,
        ),
    ]
    return Measured(figures=figures, details={"answers_s": sorted(answers_s), "num_slots": _NUM_SLOTS})


def _figure(name: str, unit: str, value: float, **goal: float) -> Figure:
    return Figure(name=name, unit=unit, value=value, measured=(value,), **goal)


@contextmanager
def _service(*, slots: int, start_s: float) -> Iterator[_Service]:
    """A controller and a scripted node, each a process."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        words = [
            "strop.runtime.controller",
            "--state-dir",
            folder,
            "--policy",
            json.dumps({"cpu_factor": 1.0}),
        ]
        output = stack.enter_context(_process(words)).stdout
        assert output is not None
        serving = json.loads(output.readline())
        words = ["strop.testing.scripted_node", "--controller", serving["url"], "--slots", str(slots)]
        words += ["--key-file", serving["node_keys_file"], "--start-s", str(start_s)]
        stack.enter_context(_process(words))
        it = _Service(url=serving["url"], key=KeyRing(Path(serving["keys_file"])).newest)
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


async def _ask(it: _Service, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
    """Ask on a connection of its own; return the answer's body. A client's library would add its own time."""
    where = urlsplit(it.url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    content = json.dumps(body).encode() if body is not None else b""
    head = f"{method} {path} HTTP/1.1\r\nhost: {where.netloc}\r\nX-API-Key: {it.key}\r\nconnection: close\r\n"
    writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
    answer = await reader.read()
    writer.close()
    status, _, rest = answer.partition(b"\r\n")
    if b" 200 " not in status:
        raise RuntimeError(f"{method} {path}: {answer.decode(errors='replace')}")
    return rest.partition(b"\r\n\r\n")[2]


def _read_metric(it: _Service, name: str) -> float:
    lines = asyncio.run(_ask(it, "GET", "/metrics")).decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"strop_runtime_{name} "))
