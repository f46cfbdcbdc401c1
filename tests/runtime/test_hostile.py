"""Who asks without a key, for what is another's, too much, too slowly, or not at all."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from strop.runtime.contract import SERVICE_KEY_HEADER
from tests.fixtures.runtime_service import POLICY, Service, service, start_body, until

ADA, BOB = "a" * 24, "b" * 24
PATHS = ("/list", "/sessions/S1", "/metrics", "/nodes", "/nothing")


Send = Callable[[asyncio.StreamWriter], Awaitable[None]]


async def send_raw(it: Service, head: bytes, parts: Send) -> bytes:
    """Send a request's head, then parts of its body; return what was answered until the connection ended."""
    where = urlsplit(it.url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    writer.write(head + b"\r\nhost: x\r\nx-api-key: " + it.key.encode() + b"\r\n\r\n")
    sending = asyncio.ensure_future(parts(writer))
    try:
        answered = b""
        # The answer comes first; what is still sent to a closed connection may reset it.
        async with asyncio.timeout(10):
            with suppress(ConnectionResetError):
                while data := await reader.read(1 << 16):
                    answered += data
        return answered
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        writer.transport.abort()
        await asyncio.sleep(0)


async def test_without_a_key_or_with_a_wrong_one_everything_but_health_is_401(tmp_path: Path) -> None:
    async with service(tmp_path) as it:
        await it.start("S1")
        for headers in ({}, {SERVICE_KEY_HEADER: "wrong"}, {"Authorization": "Bearer wrong"}):
            async with httpx.AsyncClient(
                base_url=it.url, headers=headers, trust_env=False, verify=False
            ) as other:
                answers = [await other.get(path) for path in PATHS]
                answers.append(await other.post("/start", json=start_body()))
                assert {one.status_code for one in answers} == {401}
                assert {one.text for one in answers} == {'{"detail":"Unauthorized"}'}
                assert (await other.get("/health")).status_code == 200
        bearer = {"Authorization": f"Bearer {it.client.headers[SERVICE_KEY_HEADER]}"}
        async with httpx.AsyncClient(trust_env=False, verify=False) as prometheus:
            assert (await prometheus.get(it.url + "/metrics", headers=bearer)).status_code == 200


async def test_a_key_is_changed_without_a_restart(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"ada {ADA}\n")
    keys.chmod(0o600)
    async with service(tmp_path) as it:
        # What cannot be read leaves the old ones.
        keys.chmod(0o644)
        await asyncio.sleep(1.2)
        assert await status_of(it, ADA) == 200
        keys.chmod(0o600)
        keys.write_text(f"ada {BOB}\n")

        async def is_new() -> bool:
            return await status_of(it, BOB) == 200

        await until(is_new)
        assert [await status_of(it, key) for key in (ADA, f"{BOB}\u00e9", "")] == [401] * 3


async def status_of(it: Service, key: str) -> int:
    """Return the status of a request with a key."""
    return (await it.client.get("/list", headers={SERVICE_KEY_HEADER.encode(): key.encode()})).status_code


async def test_another_owners_sandbox_does_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strop.runtime.service.HOLD_S", 0.0)
    keys = tmp_path / "keys"
    keys.write_text(f"bob {BOB}\nada {ADA}\n")
    keys.chmod(0o600)
    async with service(tmp_path, policy=POLICY) as it:
        mine = await it.start("S1")
        async with it.client_with(BOB) as bob:
            assert (await bob.get("/list")).json() == {"runtimes": []}
            assert (await bob.get("/sessions/S1")).status_code == 404
            for path in ("/stop", "/pause", "/resume"):
                answer = await bob.post(path, json={"runtime_id": mine["runtime_id"]})
                assert answer.status_code == 404
            lease = {"lease_s": 1, "runtime_ids": [mine["runtime_id"]]}
            assert (await bob.post("/leases", json=lease)).json() == {
                "renewed": [],
                "unknown": [mine["runtime_id"]],
            }
            # The same name is another sandbox, with another image even.
            his = await bob.post("/start", json=start_body(session_id="S1", image="img:2"))
            assert his.json()["runtime_id"] != mine["runtime_id"]
        assert (await it.client.get("/sessions/S1")).json()["runtime_id"] == mine["runtime_id"]


async def test_a_body_of_a_gigabyte_is_refused_before_it_is_read(tmp_path: Path) -> None:
    async with service(tmp_path) as it:

        async def send(writer: asyncio.StreamWriter) -> None:
            for _ in range(1024):
                writer.write(bytes(1 << 20))
                await writer.drain()

        async def send_chunks(writer: asyncio.StreamWriter) -> None:
            for _ in range(1024):
                writer.write(b"100000\r\n" + bytes(1 << 20) + b"\r\n")
                await writer.drain()

        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        ways = {b"content-length: 1073741824": send, b"transfer-encoding: chunked": send_chunks}
        for header, parts in ways.items():
            # Where it still sent when the connection was closed, the answer may be lost with it.
            with suppress(ConnectionResetError):
                reply = await send_raw(it, b"POST /start HTTP/1.1\r\n" + header, parts)
                assert reply.startswith((b"HTTP/1.1 413 ", b"HTTP/1.1 411 "))
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert after - before < 64 << 10
        assert (await it.client.get("/health")).status_code == 200


async def test_of_too_many_connections_the_silent_ones_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strop.runtime.serve.MAX_CLIENTS", 20)
    async with service(tmp_path) as it:
        where = urlsplit(it.url)
        silent = [await asyncio.open_connection(where.hostname, where.port) for _ in range(60)]
        for _, writer in silent[::2]:
            writer.write(b"GET /list HTTP/1.1\r\n")
        for index in range(5):
            assert (await it.start(f"S{index}"))["status"] == "starting"
        for _, writer in silent:
            writer.close()


async def test_what_is_no_http_is_answered_and_the_next_is_served(tmp_path: Path) -> None:
    async with service(tmp_path) as it:

        async def send(_writer: asyncio.StreamWriter) -> None: ...

        for head in (b"\0\0\0", b"nonsense"):
            assert (await send_raw(it, head, send)).startswith(b"HTTP/1.1 400 ")
        assert (await it.client.get("/health")).status_code == 200


async def test_changes_are_logged_and_keys_are_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "strop.runtime")
    async with service(tmp_path) as it:
        await it.add_host()
        record = await it.start("S1")
        await it.session("S1")
        await it.post("/stop", record["runtime_id"])
        secrets = [record["session_api_key"], it.key]
    lines = [line for line in caplog.messages if record["runtime_id"] in line]
    assert [line.split(": ")[1].split(" ")[0] for line in lines] == [
        *("image", "starting", "ready", "stopped")
    ]
    assert not any(secret in caplog.text for secret in secrets)
