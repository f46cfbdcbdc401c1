"""The connection of a sandbox's owner: who may have it, what may come over it, and what its end means."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from strop.errors import SandboxLost, SandboxRefused
from strop.io.endpoints import Endpoint
from strop.runtime import owner_plane
from strop.runtime.contract import FailureKind, State
from strop.runtime.host import HostSettings, SandboxHost
from strop.runtime.making import Maker, MakeSettings
from strop.runtime.owner_plane import find_fault
from strop.sandbox import IsolationLevel, Limits, SandboxSpec
from strop.sandbox.frames import LENGTHS, pack, unpack
from strop.sandbox.remote import RemoteBackend
from strop.sandbox.wire import (
    CONNECT_PATH,
    FRAMES_PATH,
    MAX_BODY_BYTES,
    PROTOCOL,
    SANDBOX_KEY_HEADER,
)
from tests.fixtures.hosts import SESSION_KEY, Orders, host_of, order_of
from tests.fixtures.runtime_service import POLICY, Service, service
from tests.fixtures.sandboxes import needs_bubblewrap
from tests.fixtures.scripted_host import slots

TERMS = {"limits": {"memory_bytes": 256 << 20}, "min_level": int(IsolationLevel.RLIMIT)}
SPEC = SandboxSpec(limits=Limits(memory_bytes=256 << 20), min_level=IsolationLevel.RLIMIT)
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def owner_of(url: str) -> AsyncIterator[Stream]:
    """Become the owner of a sandbox until the end of the block."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    headers = f"connection: upgrade\r\nupgrade: {PROTOCOL}\r\n{SANDBOX_KEY_HEADER}: {SESSION_KEY}\r\n"
    writer.write(f"GET {FRAMES_PATH} HTTP/1.1\r\nhost: x\r\n{headers}\r\n".encode())
    try:
        assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
        yield reader, writer
    finally:
        writer.close()


async def hear(stream: Stream) -> dict[str, Any]:
    """Return the header of the next frame."""
    buffer = bytearray()
    while True:
        data = await stream[0].read(1 << 16)
        assert data, "the connection has ended"
        buffer += data
        for header, _ in unpack(buffer):
            return header


@asynccontextmanager
async def owned() -> AsyncIterator[tuple[Orders, str]]:
    async with host_of("process") as orders:
        url = await orders.start("r1", sandbox=TERMS)
        await orders.wait_for("r1", State.READY)
        yield orders, url


async def test_only_who_has_the_key_is_the_owner_and_only_one() -> None:
    async with owned() as (orders, url):
        asking = {"connection": "upgrade", "upgrade": PROTOCOL}
        async with httpx.AsyncClient(base_url=url, trust_env=False) as client:

            async def status(method: str, path: str, **headers: str) -> int:
                return (await client.request(method, path, headers={**asking, **headers})).status_code

            key = {SANDBOX_KEY_HEADER: SESSION_KEY}
            for path in (FRAMES_PATH, f"{CONNECT_PATH}?port=1", "/strop/else"):
                assert await status("GET", path) == 401
                assert await status("GET", path, **{SANDBOX_KEY_HEADER: "wrong"}) == 401
            assert await status("POST", FRAMES_PATH, **key) == 404
            assert await status("GET", "/strop/else", **key) == 404
            assert await status("GET", "/api/bash/bash_events/search", **key) == 404
            assert (await client.get(FRAMES_PATH, headers=key)).status_code == 426
            refused = await client.get(f"{CONNECT_PATH}?port=1", headers={**asking, **key})
            assert (refused.status_code, refused.json()["kind"]) == (409, "refused")
            async with owner_of(url):
                assert await status("GET", FRAMES_PATH, **key) == 409
        ended = await orders.wait_for("r1", State.FAILED)
        assert ended.failure_kind is FailureKind.INFRA_LOST
        assert ended.cause == "the connection of its owner has ended"


async def test_what_is_no_request_is_refused_or_ends_the_connection() -> None:
    async with owned() as (orders, url):
        async with owner_of(url) as owner:
            wrong = {"id": 1, "op": "start", "builtin": "read", "details": {}, "wall_limit_s": 1}
            owner[1].write(pack(wrong))
            assert (await hear(owner))["failed"] == "request"
            owner[1].write(pack({"id": 1, "op": "stats"}))
            assert (await hear(owner))["commands"] == 0
            # A job that there is not.
            owner[1].write(pack({"id": 2, "op": "input", "job": 77}, b"x"))
            assert await hear(owner) == {"id": 2, "is_open": False, "has_ended": True}
            owner[1].write(pack({"op": "signal", "job": 1, "number": 65}))
            assert await owner[0].read() == b""
        await orders.wait_for("r1", State.FAILED)


async def test_what_is_no_frame_ends_the_connection() -> None:
    start = {"id": 3, "op": "start", "argv": ["/bin/sleep", "9"], "cwd": None, "env": {}, "wall_limit_s": 9}
    frames = {
        "no frame": b"\xff" * 64,
        "too large a body": LENGTHS.pack(2, MAX_BODY_BYTES + 1) + b"{}",
        "too deep a header": LENGTHS.pack(1 << 20, 0) + b"[" * (1 << 20),
        "a number twice": pack(start) + pack({"id": 3, "op": "stats"}),
    }

    async with host_of("process") as orders:
        for name, data in frames.items():
            url = await orders.start(name, sandbox=TERMS)
            await orders.wait_for(name, State.READY)
            async with owner_of(url) as owner:
                owner[1].write(data)
                await owner[0].read()
            ended = await orders.wait_for(name, State.FAILED)
            assert ended.cause == "the connection of its owner has ended", name


def test_each_field_of_a_request_is_looked_at() -> None:
    start = {"id": 1, "op": "start", "argv": ["a"], "cwd": None, "env": {}, "wall_limit_s": math.inf}
    read = {"path": "a", "offset": 0, "max_bytes": 5}
    inside = {"id": 1, "op": "start", "builtin": "read", "details": read, "wall_limit_s": 5}
    for good in (
        start,
        {**start, "has_stdin": True, "env": {"A": "b"}, "cwd": "/"},
        inside,
        {"id": 1, "op": "stats"},
        {"op": "signal", "job": 1, "number": 2},
        {"id": 1, "op": "output", "job": 1, "positions": [0, 5]},
    ):
        assert find_fault(good) == ""
    for wrong in (
        {},
        {"op": "builtin", **{name: inside[name] for name in ("id", "builtin", "details", "wall_limit_s")}},
        {"op": ["start"]},
        {"id": 1, "op": "connect", "address": 1},
        {"id": 1, "op": "stats", "key": "a"},
        {"id": 1, "op": "snapshot"},
        {**start, "id": True},
        {**start, "argv": "a"},
        {**start, "argv": [b"a".hex(), 1]},
        {**start, "env": {"A": 1}},
        {**start, "wall_limit_s": math.nan},
        {**start, "wall_limit_s": -1},
        {**start, "is_main": True},
        {name: value for name, value in start.items() if name != "env"},
        {**inside, "details": {**read, "max_bytes": "5"}},
        {**inside, "builtin": "remove"},
        {"id": 1, "op": "cancel", "job": 1},
        {"op": "stats"},
    ):
        assert find_fault(wrong), wrong


@needs_bubblewrap
def test_a_network_is_given_where_the_nodes_own_has_it() -> None:
    listed = "allow:a.example:443,b.example:80"
    maker = Maker(MakeSettings(network=listed), ("bubblewrap",))
    for network in ("none", listed, "allow:B.example.:80"):
        order = order_of("r", sandbox={**TERMS, "network": network})
        assert asyncio.run(maker.kind_of(order)).network == network
    for network in ("host", "allow:a.example:80", f"{listed},c.example:80"):
        order = order_of("r", sandbox={**TERMS, "network": network})
        with pytest.raises(SandboxRefused) as caught:
            asyncio.run(maker.kind_of(order))
        assert caught.value.kind == "network"
    with pytest.raises(ValidationError, match="no such network"):
        order_of("r", sandbox={**TERMS, "network": "bridge"})


ASK = """
import contextlib, urllib.request
with contextlib.suppress(OSError):
    urllib.request.urlopen("http://c.example/")
"""


@needs_bubblewrap
async def test_what_a_network_refuses_is_told_to_the_owner() -> None:
    listed = "allow:a.example:80"

    async with host_of("bubblewrap", network=listed) as orders:
        url = await orders.start("r1", sandbox={**TERMS, "network": listed})
        await orders.wait_for("r1", State.READY)
        async with owner_of(url) as owner:
            owner[1].write(pack({"id": 1, "op": "describe"}))
            facts = await hear(owner)
            assert facts["isolation"]["network"] == listed
            start = {"id": 2, "op": "start", "argv": [*facts["python_argv"], "-c", ASK], "wall_limit_s": 60}
            owner[1].write(pack({**start, "cwd": None, "env": {}}))
            assert (await hear(owner))["refused_call"]["target"] == "c.example:80"


async def test_an_owner_that_does_not_come_has_no_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner_plane, "_OWNER_LIMIT_S", 0.05)

    async with host_of("process") as orders:
        await orders.start("r1", sandbox=TERMS)
        ended = await orders.wait_for("r1", State.FAILED)
        assert ended.cause.startswith("its owner did not come")


async def test_a_full_service_refuses_and_an_idle_sandbox_ends_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner_plane, "_BUSY_EVERY_S", 0.05)
    monkeypatch.setattr("strop.runtime.service.FACTS_EVERY_S", 0.05)

    async def work(it: Service) -> None:
        backend = RemoteBackend(Endpoint(url=it.url, key=it.client.headers["X-API-Key"]))
        async with await backend.create(SPEC) as sandbox:
            job = await sandbox.start(["/bin/sleep", "600"])
            with pytest.raises(SandboxRefused, match="no slot was free for it within") as caught:
                await backend.create(SPEC)
            assert caught.value.kind == "capacity"
            # That took longer than it may be idle, but something ran in it.
            await job.stop()
            assert await sandbox.wait_lost() == "infra"
            with pytest.raises(SandboxLost, match=r"it was idle for 2 s") as lost:
                await sandbox.exec(["/bin/true"], wall_limit_s=60)
            assert lost.value.kind == "infra"

    policy = replace(POLICY, queue_limit_s=0.4, idle_limit_s=2.0, hold_s=0.5)
    async with service(tmp_path, policy=policy) as it:
        make = MakeSettings(backends=("process",))
        host = SandboxHost(HostSettings(make=make, address="127.0.0.1", capacity=slots(1)))
        it.inner.add_host("here", host, await host.open(), is_here=True)
        await work(it)


async def test_a_service_that_has_as_many_as_it_may_refuses(tmp_path: Path) -> None:
    async with service(tmp_path, policy=replace(POLICY, max_alive=0)) as it:
        backend = RemoteBackend(Endpoint(url=it.url, key=it.client.headers["X-API-Key"]))
        begun = time.monotonic()
        with pytest.raises(SandboxRefused, match="as many as may") as caught:
            await backend.create(SPEC)
        assert caught.value.kind == "capacity"
        assert time.monotonic() - begun < 60
