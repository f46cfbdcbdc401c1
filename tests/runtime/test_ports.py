from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from strop.runtime.ports import Gate, hold_listener, splice, splice_to

CHUNK_BYTES = 64 << 10
HEAD = b"GET /one HTTP/1.1\r\n\r\n"


@asynccontextmanager
async def echo_server() -> AsyncIterator[tuple[str, int]]:
    """Send back what comes, and the end of it."""
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.write(b"the end")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[:2]
        for writer in writers:
            writer.transport.abort()
        await asyncio.sleep(0)


@asynccontextmanager
async def relay_to_echo(*, max_connections: int = 256) -> AsyncIterator[Gate]:
    async with echo_server() as (host, port):

        async def connect() -> asyncio.Protocol:
            return await splice_to(gate.note_use, host, port)

        gate = await Gate.listen(connect)
        gate.max_connections = max_connections
        try:
            yield gate
        finally:
            await gate.close()


def test_small_writes_do_not_wait_for_each_other() -> None:
    listener = hold_listener("127.0.0.1", 0)
    with listener, socket.create_connection(listener.getsockname()):
        listener.setblocking(True)
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def refuse() -> asyncio.Protocol:
    raise ConnectionError("it is paused")


async def ask(relay: Gate, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(relay.host, relay.port)
    writer.write(request)
    writer.write_eof()
    answer = await reader.read()
    writer.close()
    return answer


async def test_a_relay_passes_bytes_on_and_keeps_half_a_connection_open() -> None:
    async with relay_to_echo() as relay:
        before = relay.last_used_at
        sent = HEAD + bytes(range(256)) * 40_000
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


async def test_a_port_where_nothing_listens_is_not_its_own_answer() -> None:
    with socket.socket() as connection:
        connection.bind(("127.0.0.1", 0))
        connection.connect(connection.getsockname())
        with pytest.raises(ConnectionRefusedError):
            await splice(lambda: None, connection)


async def test_what_cannot_be_dialed_is_answered_with_503_and_the_reason() -> None:
    relay = await Gate.listen(refuse)
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
        assert await ask(relay, HEAD) == HEAD + b"the end"


async def test_a_closed_gate_gives_its_port_back_and_it_can_be_held_again() -> None:
    async with relay_to_echo() as relay:
        reader, writer = await asyncio.open_connection(relay.host, relay.port)
        writer.write(HEAD)
        assert await reader.readexactly(len(HEAD)) == HEAD
        await relay.close()
        await relay.close()
        assert await reader.read() == b""
        writer.close()
        # Its connections are in TIME_WAIT; the next holder does not wait for them.
        again = await Gate.listen(refuse, port=relay.port)
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
            writer.write(HEAD)
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
