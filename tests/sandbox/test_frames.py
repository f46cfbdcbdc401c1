"""What is no frame is refused, whichever side it comes from; who is cancelled leaves nothing open."""

from __future__ import annotations

import asyncio
import socket

import pytest

from strop.errors import CorruptRecord
from strop.sandbox.channel import Channel
from strop.sandbox.client import Client
from strop.sandbox.frames import LENGTHS, MAX_HEADER_BYTES, pack, unpack


def test_a_header_that_is_too_large_is_neither_sent_nor_awaited() -> None:
    # {"text":"..."} has eleven bytes beside its text.
    longest = MAX_HEADER_BYTES - len('{"text":""}')
    assert len(pack({"text": "a" * longest})) == LENGTHS.size + MAX_HEADER_BYTES
    with pytest.raises(
        CorruptRecord,
        match=rf"a header of {MAX_HEADER_BYTES + 1} bytes, .* of {MAX_HEADER_BYTES} bytes at most",
    ):
        pack({"text": "a" * (longest + 1)})
    with pytest.raises(CorruptRecord, match="two processes exchanged a header of"):
        list(unpack(bytearray(b"Traceback (most recent call last):")))


def test_a_header_that_is_no_json_object_is_refused() -> None:
    with pytest.raises(CorruptRecord, match="a header that is a list"):
        list(unpack(bytearray(LENGTHS.pack(2, 0) + b"[]")))
    with pytest.raises(CorruptRecord, match=r"a header that is not JSON \(Expecting value"):
        list(unpack(bytearray(LENGTHS.pack(3, 0) + b"abc")))


async def test_who_is_cancelled_leaves_no_connection_open() -> None:
    """A supervisor that ends slowly, and an answer that comes in the moment of the cancellation."""
    here, there = socket.socketpair()
    client, supervisor = Client(here, "process"), Channel(there)
    asked = asyncio.ensure_future(client.ask({"op": "connect", "address": 1}))
    await asyncio.sleep(0)
    handed, kept = socket.socketpair()
    kept.settimeout(60)
    supervisor.send({"id": 0, "has_descriptor": True}, descriptor=handed.detach())
    client._on_readable()
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert kept.recv(1) == b"", "the handed connection is closed"
    kept.close()
    ending = asyncio.ensure_future(client.end(60.0))
    await asyncio.sleep(0)
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending
    assert here.fileno() == -1
    supervisor.close()
