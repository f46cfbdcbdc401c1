from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from strop.runtime import gate as of_gates
from strop.runtime.gate import Connect, Gate, dial, hold_listener

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
async def gate_of(connect: Connect) -> AsyncIterator[Gate]:
    gate = Gate("127.0.0.1")
    await gate.open(connect)
    try:
        yield gate
    finally:
        await gate.close()


@asynccontextmanager
async def gate_to_echo() -> AsyncIterator[Gate]:
    async with echo_server() as (host, port), gate_of(lambda: dial(f"http://{host}:{port}")) as gate:
        yield gate


def test_small_writes_do_not_wait_for_each_other() -> None:
    listener = hold_listener("127.0.0.1", 0)
    with listener, socket.create_connection(listener.getsockname()):
        listener.setblocking(True)
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def refuse() -> socket.socket:
    raise ConnectionError("it is paused")


async def ask(relay: Gate, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(relay.host, relay.port)
    writer.write(request)
    writer.write_eof()
    answer = await reader.read()
    writer.close()
    return answer


async def test_a_relay_passes_bytes_on_and_keeps_half_a_connection_open() -> None:
    async with gate_to_echo() as relay:
        before = relay.connections.last_used_at
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
        assert relay.connections.last_used_at > before
        assert relay.url == f"http://127.0.0.1:{relay.port}"


async def test_what_cannot_be_dialed_is_answered_with_503_and_the_reason() -> None:
    async with gate_of(refuse) as relay:
        answer = await ask(relay, b"POST / HTTP/1.1\r\ncontent-length: 300000\r\n\r\n" + b"x" * 300_000)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ")
    assert json.loads(body) == {"detail": "it is paused"}


async def test_disconnecting_ends_connections_and_keeps_the_port() -> None:
    async with gate_to_echo() as relay:
        reader, writer = await asyncio.open_connection(relay.host, relay.port)
        writer.write(HEAD)
        assert await reader.readexactly(len(HEAD)) == HEAD
        relay.connections.cut_all()
        assert await reader.read() == b""
        writer.close()
        assert await ask(relay, HEAD) == HEAD + b"the end"


async def test_a_closed_gate_gives_its_port_back_and_it_can_be_held_again() -> None:
    async with gate_to_echo() as relay:
        reader, writer = await asyncio.open_connection(relay.host, relay.port)
        writer.write(HEAD)
        assert await reader.readexactly(len(HEAD)) == HEAD
        await relay.close()
        await relay.close()
        assert await reader.read() == b""
        writer.close()
        # Its connections are in TIME_WAIT; the next holder does not wait for them.
        hold_listener("127.0.0.1", relay.port).close()


async def test_beyond_the_limit_the_idlest_connection_of_the_peer_with_most_is_cut() -> None:
    async with gate_to_echo() as relay, asyncio.timeout(10.0):
        relay.connections = of_gates.Connections(3)
        streams = []
        # A peer of its own address, which has one connection, keeps it though it is the idlest.
        for host in ("127.0.0.2", "127.0.0.1", "127.0.0.1"):
            reader, writer = await asyncio.open_connection(relay.host, relay.port, local_addr=(host, 0))
            writer.write(HEAD)
            assert await reader.readexactly(len(HEAD)) == HEAD
            streams.append((reader, writer))
        # The second is used, so that the third is idler.
        streams[1][1].write(b"two")
        assert await streams[1][0].read(3) == b"two"
        assert await ask(relay, HEAD) == HEAD + b"the end"
        assert await streams[2][0].read() == b""
        for reader, writer in streams[:2]:
            writer.write(b"kept")
            assert await reader.read(4) == b"kept"
            writer.close()
        streams[2][1].close()


async def test_a_client_that_goes_away_ends_the_connection_inside() -> None:
    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # It never answers.
        await reader.read()
        ended.set()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, gate_of(lambda: dial(url)) as gate:
        _, writer = await asyncio.open_connection(gate.host, gate.port)
        writer.write(HEAD)
        await asyncio.sleep(0.1)
        writer.transport.abort()
        async with asyncio.timeout(5.0):
            await ended.wait()


async def test_who_does_not_read_lets_the_sender_wait() -> None:
    async with gate_to_echo() as relay:
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
