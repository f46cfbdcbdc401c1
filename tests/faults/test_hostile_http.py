"""A service's clients and strangers hold its slots and ports, break its answers, or hear that all is well."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from strop.errors import SandboxRefused
from strop.runtime.contract import State
from strop.sandbox import IsolationLevel, SandboxSpec, make_backend
from tests.fixtures.hosts import host_of, workspace_at
from tests.fixtures.runtime_service import service, start_body
from tests.fixtures.sandboxes import needs_podman

HALF = "\ud800"
SILENT = b""
HALF_A_HEAD = b"GET /health HTTP/1.1\r\nhost: x\r\n"
WITHOUT_KEY = b"POST /run HTTP/1.1\r\nhost: x\r\n\r\n"
OPEN_PATH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"

UNSPEAKABLE: dict[str, dict[str, object]] = {
    "image": {"image": f"img{HALF}"},
    "working_dir": {"working_dir": f"/work{HALF}"},
    "environment": {"environment": {"NAME": HALF}},
    "environment-name": {"environment": {HALF: "value"}},
    "command": {"command": ["openhands-agent-server", HALF]},
    "session_id": {"session_id": f"S{HALF}"},
    "image-as-option": {"image": "--help"},
}


async def test_a_start_that_nobody_can_pass_on_is_refused_and_holds_no_slot(tmp_path: Path) -> None:
    async with service(tmp_path) as it:
        await it.add_host(1)
        statuses = {}
        for name, changes in UNSPEAKABLE.items():
            body = json.dumps(start_body(session_id=f"S-{name}") | changes)
            answer = await it.client.post("/start", content=body)
            statuses[name] = answer.status_code
        assert {name: 400 <= status < 500 for name, status in statuses.items()} == dict.fromkeys(
            UNSPEAKABLE, True
        ), statuses
        for path in ("/stop", "/pause", "/resume"):
            answer = await it.client.post(path, content=json.dumps({"runtime_id": HALF}))
            assert 400 <= answer.status_code < 500
        assert (await it.client.get("/list")).json()["runtimes"] == []
        await it.start("S1")
        await it.until_session("S1", pod_status="ready")


@pytest.mark.parametrize("backend", ["process", pytest.param("podman", marks=needs_podman)])
def test_an_image_is_no_option_of_an_engine(backend: str) -> None:
    with pytest.raises(SandboxRefused) as caught:
        asyncio.run(make_backend(backend).create(SandboxSpec(image="--help", min_level=IsolationLevel.NONE)))
    assert caught.value.kind == "image"
    assert "Usage" not in str(caught.value)


async def connect(url: str, words: bytes, number: int) -> list[asyncio.StreamWriter]:
    where = urlsplit(url)
    writers = []
    for _ in range(number):
        _, writer = await asyncio.open_connection(where.hostname, where.port)
        writer.write(words)
        writers.append(writer)
    return writers


async def cut(writers: list[asyncio.StreamWriter]) -> None:
    for writer in writers:
        writer.transport.abort()
    await asyncio.sleep(0)


@pytest.mark.parametrize(
    "words", [SILENT, HALF_A_HEAD, WITHOUT_KEY, OPEN_PATH], ids=["silent", "half", "no-key", "open-path"]
)
async def test_strangers_at_a_sandboxs_port_take_no_place_of_its_owner(words: bytes) -> None:
    async with host_of("process") as orders:
        url = await orders.start("r1")
        await orders.wait_for("r1", State.READY)
        writers = await connect(url, words, 270)
        try:
            async with workspace_at(url) as workspace:
                assert await workspace.run("echo served") == (0, "served\n")
        finally:
            await cut(writers)


@pytest.mark.slow
async def test_who_says_nothing_is_cut_off() -> None:
    async with host_of("process") as orders:
        url = await orders.start("r1")
        await orders.wait_for("r1", State.READY)
        where = urlsplit(url)
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        async with asyncio.timeout(25.0):
            with suppress(ConnectionResetError):
                await reader.read()
        writer.transport.abort()
