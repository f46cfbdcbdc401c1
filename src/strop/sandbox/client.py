"""The client's end of a sandbox's connection: numbered requests, and the futures of their answers.

The other end is a supervisor of this machine, or a node that forwards frames to one of its supervisors.

Time limits and pipes are the supervisor's, so a busy event loop makes a result late but never wrong.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
from collections import deque
from collections.abc import Callable
from typing import Any

from strop.errors import CorruptRecord, SandboxError, SandboxLost
from strop.sandbox.channel import Channel

_NEXT_STEPS = {
    "busy": "try again; a process may wait for a disk",
    "refused": "wait until something listens there",
    "missing": "wait until something listens there",
}
_MAX_REFUSED_CALLS = 1000
_log = logging.getLogger("strop.sandbox.client")
Answer = tuple[dict[str, Any], bytes]
Deliver = Callable[[dict[str, Any], bytes], None]
"""Called with the header and the body of an answer."""


class Client:
    """One connection to a supervisor. Usable from one event loop."""

    def __init__(self, connection: socket.socket, backend: str, *, max_body_bytes: int | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._channel = Channel(connection)
        self._backend = backend
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self.refused_calls: deque[str] = deque(maxlen=_MAX_REFUSED_CALLS)
        """The newest connections that the proxy refused: host, port and reason."""
        self.on_refused_call: Callable[[dict[str, Any]], None] = lambda header: None
        """Called with the frame of each refusal."""
        self._relayed: dict[int, Deliver] = {}
        self._max_body_bytes = max_body_bytes
        self.lost_kind = ""
        """Why the connection was lost; empty while it works."""
        self.lost_why = ""
        """Its cause, if the supervisor knows more."""
        self._first: asyncio.Future[Answer] = self._loop.create_future()
        # Never awaited where the other end is a node.
        self._first.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(connection, self._on_readable)

    async def first_frame(self) -> dict[str, Any]:
        """Return the supervisor's first frame: it is ready, or refuses. Raises: ConnectionError."""
        return (await asyncio.shield(self._first))[0]

    def begin(self, header: dict[str, Any], body: bytes = b"") -> tuple[int, asyncio.Future[Answer]]:
        """Send a request; return its number and a future of its answer.

        A caller that no longer waits must call `forget`.
        Raises: SandboxLost; SandboxError with kind too_large.
        """
        self._require_answering()
        if self._max_body_bytes is not None and len(body) > self._max_body_bytes:
            raise SandboxError(
                f"{len(body)} bytes at once for a {self._backend} sandbox",
                allowed=f"at most {self._max_body_bytes}",
                next_step="give it in parts",
                kind="too_large",
            )
        number = next(self._numbers)
        answer: asyncio.Future[Answer] = self._loop.create_future()
        self._waiting[number] = answer
        self.tell({"id": number, **header}, body)
        return number, answer

    def relay(self, header: dict[str, Any], body: bytes, deliver: Deliver) -> int:
        """Forward another client's request and deliver its answer; return its number. Raises: SandboxLost."""
        self._require_answering()
        number = next(self._numbers)
        self._relayed[number] = deliver
        self.tell({"id": number, **header}, body)
        return number

    def _require_answering(self) -> None:
        if self.lost_kind:
            raise self.lost(self.lost_kind, self.lost_why)

    async def ask(self, header: dict[str, Any], body: bytes = b"") -> Answer:
        """Send a request and return its answer. Raises: SandboxLost."""
        number, answer = self.begin(header, body)
        try:
            return await answer
        except asyncio.CancelledError:
            # The answer may have arrived at the moment of the cancellation.
            if answer.done() and not answer.cancelled() and not answer.exception():
                _close_descriptor(answer.result()[0])
            raise
        finally:
            self.forget(number)

    def tell(self, header: dict[str, Any], body: bytes = b"") -> None:
        """Send a message that has no answer. The reading side notices a lost connection."""
        try:
            self._channel.send(header, body)
        except ConnectionError:
            return
        if self._channel.num_unsent_bytes:
            self._loop.add_writer(self._channel.socket, self._on_writable)

    def forget(self, number: int) -> None:
        """Drop an answer that is no longer awaited, and close a descriptor that comes with it."""
        self._waiting.pop(number, None)

    async def wait_lost(self) -> str:
        """Wait until the connection is lost and return why."""
        await asyncio.shield(self._ended)
        return self.lost_kind

    async def end(self, limit_s: float) -> None:
        """End the sandbox and wait until it has ended. May be called twice.

        Raises: SandboxLost if it has not ended after `limit_s`.
        """
        if not self._ended.done():
            self.lost_kind = self.lost_kind or "stopped"
            self.tell({"op": "stop"})
        try:
            # The supervisor closes the stream when nothing is left.
            done, _ = await asyncio.wait({self._ended}, timeout=limit_s)
        finally:
            # Also when the caller is cancelled; the supervisor then still ends the sandbox.
            self.close()
        if not done:
            raise self.lost("infra")

    def close(self) -> None:
        """Close the connection; the supervisor then ends the sandbox."""
        if self._channel.socket.fileno() >= 0:
            self._loop.remove_reader(self._channel.socket)
            self._loop.remove_writer(self._channel.socket)
            self._channel.close()

    def lost(self, kind: str, why: str = "") -> SandboxLost:
        """Make the error of a request that will have no answer."""
        return SandboxLost(
            f"the {self._backend} sandbox does not answer ({kind}){why and f': {why}'}",
            allowed="a sandbox that has not been stopped",
            next_step="make a new one",
            kind=kind,
        )

    def _on_writable(self) -> None:
        try:
            self._channel.flush()
        except ConnectionError:
            self._loop.remove_writer(self._channel.socket)
            return
        if not self._channel.num_unsent_bytes:
            self._loop.remove_writer(self._channel.socket)

    def _on_readable(self) -> None:
        try:
            for header, body in self._channel.receive():
                self._take(header, body)
        except (EOFError, CorruptRecord):
            self._take_end()

    def _take(self, header: dict[str, Any], body: bytes) -> None:
        if header.get("has_descriptor"):
            header["descriptor"] = self._channel.take_descriptor()
        if "refused_call" in header:
            call = "{target}: {why}".format(**header["refused_call"])
            self.refused_calls.append(call)
            _log.warning("a %s sandbox may not reach %s", self._backend, call)
            self.on_refused_call(header)
            return
        if "id" not in header:
            if not self.lost_kind:
                self.lost_kind, self.lost_why = header.get("lost", ""), header.get("why", "")
            if not self._first.done():
                self._first.set_result((header, body))
            return
        if (deliver := self._relayed.pop(header["id"], None)) is not None:
            deliver(header, body)
            return
        answer = self._waiting.pop(header["id"], None)
        if answer is None or answer.done():
            _close_descriptor(header)
        elif "lost" in header:
            answer.set_exception(self.lost(header["lost"], header["why"]))
        elif "failed" in header:
            answer.set_exception(
                SandboxError(
                    f"the {self._backend} sandbox could not do it: {header['why']}",
                    allowed="an operation that its current state allows",
                    next_step=_NEXT_STEPS.get(header["failed"], "look at its message"),
                    kind=header["failed"],
                )
            )
        else:
            answer.set_result((header, body))

    def _take_end(self) -> None:
        self._loop.remove_reader(self._channel.socket)
        self.lost_kind = self.lost_kind or "infra"
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(self.lost(self.lost_kind, self.lost_why))
        for deliver in self._relayed.values():
            deliver({"lost": self.lost_kind, "why": self.lost_why}, b"")
        self._relayed.clear()
        if not self._first.done():
            self._first.set_exception(ConnectionError("its supervisor ended before it was ready"))
        if not self._ended.done():
            self._ended.set_result(None)


def _close_descriptor(header: dict[str, Any]) -> None:
    if "descriptor" in header:
        os.close(header["descriptor"])
