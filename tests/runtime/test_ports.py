from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from strop.runtime.http_client import HttpClient, RequestFailed
from strop.runtime.http_server import Answer, Request, serve_connection
from strop.runtime.ports import CHUNK_BYTES, PortRelay, Serve, Stream, hold_listener

HEAD = b"GET /one HTTP/1.1\r\n\r\n"


@asynccontextmanager
async def echo_server() -> AsyncIterator[tuple[str, int]]:
    """Send back what comes, and the end of it."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.write(b"the end")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[:2]


@asynccontextmanager
async def relay_to_echo(*, max_connections: int = 256) -> AsyncIterator[PortRelay]:
    async with echo_server() as (host, port):

        async def dial() -> Stream:
            return await asyncio.open_connection(host, port)

        relay = await PortRelay.listen(dial, max_connections=max_connections)
        try:
            yield relay
        finally:
            await relay.close()


def test_small_writes_do_not_wait_for_each_other() -> None:
    listener = hold_listener("127.0.0.1", 0, backlog=1)
    with listener, socket.create_connection(listener.getsockname()):
        listener.setblocking(True)
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def refuse_to_dial() -> Stream:
    raise ConnectionError("it is paused")


async def ask(relay: PortRelay, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(relay.host, relay.port)
    writer.write(request)
    writer.write_eof()
    answer = await reader.read()
    writer.close()
    return answer


async def test_a_relay_passes_bytes_on_and_keeps_half_a_connection_open() -> None:
    async with relay_to_echo() as relay:
        before = relay.last_used_at
        sent = bytes(range(256)) * 40_000
        reader, writer = await asyncio.open_connection(relay.host, relay.port)

        async def send() -> None:
            writer.write(sent)
            await writer.drain()
            writer.write_eof()

        sending = asyncio.create_task(send())
        answer = await reader.read(-1)
        await sending
        writer.close()
        # The client had ended its side long before the last byte came back.
        assert answer == sent + b"the end"
        assert relay.last_used_at > before
        assert relay.url == f"http://127.0.0.1:{relay.port}"


async def test_what_cannot_be_dialed_is_answered_with_503_and_the_reason() -> None:
    relay = await PortRelay.listen(refuse_to_dial)
    answer = await ask(relay, b"POST / HTTP/1.1\r\ncontent-length: 300000\r\n\r\n" + b"x" * 300_000)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ")
    assert json.loads(body) == {"detail": "it is paused"}
    await relay.close()


async def test_disconnecting_ends_connections_and_keeps_the_port() -> None:
    async with relay_to_echo() as relay:
        reader, writer = await asyncio.open_connection(relay.host, relay.port)
        writer.write(HEAD)
        assert await reader.readexactly(len(HEAD)) == HEAD
        relay.disconnect()
        assert await reader.read() == b""
        writer.close()
        assert await ask(relay, b"two") == b"twothe end"


async def test_a_closed_relay_gives_its_port_back_and_it_can_be_held_again() -> None:
    async with relay_to_echo() as relay:
        reader, writer = await asyncio.open_connection(relay.host, relay.port)
        writer.write(HEAD)
        assert await reader.readexactly(len(HEAD)) == HEAD
        await relay.close()
        await relay.close()
        assert await reader.read() == b""
        writer.close()
        # Its connections are in TIME_WAIT; the next holder does not wait for them.
        again = await PortRelay.listen(refuse_to_dial, port=relay.port)
        assert again.port == relay.port
        await again.close()


async def test_connections_beyond_the_limit_are_refused_and_others_served() -> None:
    async with relay_to_echo(max_connections=1) as relay:
        reader, writer = await asyncio.open_connection(relay.host, relay.port)
        writer.write(HEAD)
        assert await reader.readexactly(len(HEAD)) == HEAD
        assert (await ask(relay, b"GET / HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 503 ")
        writer.write(b"two")
        assert await reader.read(3) == b"two"
        writer.close()


async def test_who_does_not_read_lets_the_sender_wait() -> None:
    async with relay_to_echo() as relay:
        _, writer = await asyncio.open_connection(relay.host, relay.port)
        writer.transport.set_write_buffer_limits(high=CHUNK_BYTES)

        async def send() -> None:
            for _ in range(1024):
                writer.write(bytes(CHUNK_BYTES))
                await writer.drain()

        sending = asyncio.create_task(send())
        # 64 MiB do not fit into the kernel's buffers of four sockets and two chunks here.
        _, waiting = await asyncio.wait([sending], timeout=0.5)
        assert waiting == {sending}
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        writer.transport.abort()


@asynccontextmanager
async def server_of(serve: Serve) -> AsyncIterator[tuple[str, list[asyncio.StreamWriter]]]:
    """Yield the address of a server, and its connections so far."""
    writers: list[asyncio.StreamWriter] = []

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        await serve(reader, writer)
        writer.close()

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", writers
    finally:
        server.close()


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    async def answer(request: Request) -> Answer:
        return Answer(status=200 + len(request.query), body=request.body or request.path.encode())

    await serve_connection(reader, writer, answer, max_body_bytes=1 << 20)


@asynccontextmanager
async def client_of(serve: Serve) -> AsyncIterator[tuple[HttpClient, str, list[asyncio.StreamWriter]]]:
    """Yield a client, the address of a server, and the server's connections so far."""
    client = HttpClient(max_connections=8)
    async with server_of(serve) as (url, writers):
        yield client, url, writers
        await client.aclose()
        # The server's side ends with them.
        await asyncio.gather(*(writer.wait_closed() for writer in writers), return_exceptions=True)


async def test_requests_at_once_take_turns_and_connections_are_kept() -> None:
    async with client_of(echo) as (client, url, writers):
        reply = await client.ask("POST", f"{url}/?x=1", headers={}, content=b"one two", limit_s=60.0)
        assert (reply.status, reply.body, reply.is_success) == (201, b"one two", True)
        asked = (client.ask("GET", f"{url}/{n}", headers={}, limit_s=60.0) for n in range(100))
        assert [reply.body for reply in await asyncio.gather(*asked)] == [b"/%d" % n for n in range(100)]
        assert len(writers) <= 8


async def test_a_kept_connection_that_was_closed_meanwhile_costs_no_request() -> None:
    async with client_of(echo) as (client, url, writers):
        await client.ask("GET", f"{url}/a", headers={}, limit_s=60.0)
        writers[0].close()
        assert (
            await client.ask("POST", f"{url}/b", headers={}, content=b"body", limit_s=60.0)
        ).body == b"body"
        assert len(writers) == 2


async def test_a_connection_that_is_to_close_is_not_kept() -> None:
    async with client_of(echo) as (client, url, writers):
        for _ in range(2):
            await client.ask("GET", f"{url}/a", headers={"connection": "close"}, limit_s=60.0)
        assert len(writers) == 2


@pytest.mark.parametrize(
    "data", [b"", b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf"]
)
async def test_what_is_no_whole_answer_is_an_error(data: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(data)

    async with client_of(serve) as (client, url, _):
        with pytest.raises(RequestFailed):
            await client.ask("GET", f"{url}/", headers={}, limit_s=60.0)


async def test_who_is_not_there_or_silent_is_an_error() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with client_of(serve) as (client, url, _):
        for place, limit_s in ((url, 0.05), ("http://127.0.0.1:1", 10.0), ("https://127.0.0.1:1", 10.0)):
            with pytest.raises(RequestFailed):
                await client.ask("GET", place, headers={}, limit_s=limit_s)


async def test_an_answer_without_end_is_cut_at_a_limit_and_not_held_in_memory() -> None:
    """A server in a sandbox is asked by node agent and controller; its answer must not fill their memory."""
    sent = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        with suppress(ConnectionError):
            while sent < 1 << 26:
                writer.write(b"10000\r\n" + bytes(1 << 16) + b"\r\n")
                sent += 1 << 16
                await writer.drain()

    async with client_of(serve) as (client, url, _):
        with pytest.raises(RequestFailed, match="more than 100000 bytes"):
            await client.ask("GET", f"{url}/", headers={}, limit_s=60.0, max_bytes=100_000)
        assert sent < 1 << 25
