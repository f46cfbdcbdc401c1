"""The client of node agents: kept connections, bodies as they come, bad answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from strop.runtime.http_client import HttpClient, RequestFailed
from strop.runtime.http_server import Answer, Request, serve_connection
from strop.runtime.ports import Serve


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
