"""The client's end of a sandbox's connection: numbered requests, and the futures of their answers.

`Client` has a connection to an agent of this machine; `hosts` asks one of another node.

Time limits and pipes are the agent's, so a busy event loop makes a result late but never wrong.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from strop.errors import SandboxError, SandboxLost
from strop.sandbox.agent import Channel

_NEXT_STEPS = {
    "busy": "try again; a process may wait for a disk",
    "refused": "wait until something listens there",
    "missing": "wait until something listens there",
}
_MAX_REFUSED_CALLS = 1000
_log = logging.getLogger("strop.sandbox.client")
Answer = tuple[dict[str, Any], bytes]


class Requests(ABC):
    """Numbered requests to a sandbox's agent, and the futures of their answers."""

    def __init__(self, backend: str, first_number: int = 0) -> None:
        self._backend = backend
        self._numbers = itertools.count(first_number)
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self.refused_calls: deque[str] = deque(maxlen=_MAX_REFUSED_CALLS)
        """The newest connections that the proxy refused: host, port and reason."""
        self.num_refused_calls = 0
        self.lost_kind = ""
        """Why the sandbox was lost; empty while it works."""

    def begin(self, header: dict[str, Any], body: bytes = b"") -> tuple[int, asyncio.Future[Answer]]:
        """Send a request; return its number and a future of its answer.

        A caller that no longer waits must call `forget`.
        Raises: SandboxLost.
        """
        number = next(self._numbers)
        return number, self.pass_on({"id": number, **header}, body)

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

    def lost(self, kind: str, why: str = "") -> SandboxLost:
        """Make the error of a request that will have no answer."""
        return SandboxLost(
            f"the {self._backend} sandbox does not answer ({kind}){why and f': {why}'}",
            allowed="a sandbox that has not been stopped",
            next_step="make a new one",
            kind=kind,
        )

    @abstractmethod
    def pass_on(self, header: dict[str, Any], body: bytes) -> asyncio.Future[Answer]:
        """Send a request whose header has a number; return a future of its answer. Raises: SandboxLost."""

    @abstractmethod
    def tell(self, header: dict[str, Any], body: bytes = b"") -> None:
        """Send a message that has no answer. That the sandbox was lost is noticed by `wait_lost`."""

    def forget(self, number: int) -> None:
        """Drop an answer that is no longer awaited."""
        self._waiting.pop(number, None)

    @abstractmethod
    async def wait_lost(self) -> str:
        """Wait until the sandbox is lost and return why."""

    @abstractmethod
    async def end(self, limit_s: float) -> None:
        """End the sandbox and wait until it has ended. May be called twice.

        Raises: SandboxLost if it has not ended after `limit_s`.
        """

    @abstractmethod
    def close(self) -> None:
        """Leave the sandbox; it ends by itself then."""


class Client(Requests):
    """One connection to an agent. Usable from one event loop."""

    def __init__(
        self,
        connection: socket.socket,
        backend: str,
        finish: Callable[[], Awaitable[bool]],
        serve_caller: Callable[[socket.socket, Callable[[str, str], None]], Awaitable[None]] | None = None,
    ) -> None:
        """`finish` removes what is left once the agent is gone; it returns whether nothing is.

        `serve_caller` is the proxy of a sandbox with a list of allowed hosts; it reports what it refuses.
        """
        super().__init__(backend)
        self._finish = finish
        self._serve_caller = serve_caller
        self._callers: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._channel = Channel(connection)
        self._first: asyncio.Future[Answer] = self._loop.create_future()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(connection, self._on_readable)

    async def first_frame(self) -> dict[str, Any]:
        """Return the agent's first frame: it is ready, or refuses. Raises: ConnectionError."""
        return (await asyncio.shield(self._first))[0]

    def pass_on(self, header: dict[str, Any], body: bytes) -> asyncio.Future[Answer]:
        """Send a request whose header has a number; see `Requests.pass_on`."""
        if self.lost_kind:
            raise self.lost(self.lost_kind)
        answer = self._waiting[header["id"]] = self._loop.create_future()
        self.tell(header, body)
        return answer

    def tell(self, header: dict[str, Any], body: bytes = b"") -> None:
        """Send a message that has no answer; the reading side notices a lost connection."""
        try:
            self._channel.send(header, body)
        except ConnectionError:
            return
        if self._channel.has_unsent:
            self._loop.add_writer(self._channel.socket, self._on_writable)

    async def wait_lost(self) -> str:
        """Wait until the connection is lost and return why."""
        await asyncio.shield(self._ended)
        return self.lost_kind

    async def end(self, limit_s: float) -> None:
        """End the sandbox; see `Requests.end`."""
        if not self._ended.done():
            self.lost_kind = self.lost_kind or "stopped"
            self.tell({"op": "stop"})
        is_over = False
        try:
            async with asyncio.timeout(limit_s):
                await asyncio.shield(self._ended)
                self.close()
                is_over = await self._finish()
        except TimeoutError:
            pass
        finally:
            # Also when the caller is cancelled; the agent then still ends the sandbox.
            self.close()
        if not is_over:
            raise self.lost("infra")

    def close(self) -> None:
        """Close the connection; the agent then ends the sandbox."""
        for caller in self._callers:
            caller.cancel()
        if self._channel.socket.fileno() >= 0:
            self._loop.remove_reader(self._channel.socket)
            self._loop.remove_writer(self._channel.socket)
            self._channel.close()

    def _on_writable(self) -> None:
        try:
            self._channel.flush()
        except ConnectionError:
            self._loop.remove_writer(self._channel.socket)
            return
        if not self._channel.has_unsent:
            self._loop.remove_writer(self._channel.socket)

    def _on_readable(self) -> None:
        try:
            for header, body in self._channel.receive():
                self._take(header, body)
        except (EOFError, ValueError):
            self._take_end()

    def _take(self, header: dict[str, Any], body: bytes) -> None:
        if header.get("has_descriptor"):
            header["descriptor"] = self._channel.take_descriptor()
        if "caller" in header:
            task = self._loop.create_task(self._serve(socket.socket(fileno=header["descriptor"])))
            self._callers.add(task)
            task.add_done_callback(self._callers.discard)
            return
        if "id" not in header:
            if not self.lost_kind:
                self.lost_kind = header.get("lost", "")
            if not self._first.done():
                self._first.set_result((header, body))
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

    async def _serve(self, caller: socket.socket) -> None:
        """Serve a program's connection to the proxy."""
        assert self._serve_caller is not None
        try:
            await self._serve_caller(caller, self._on_refused)
        finally:
            caller.close()
            self.tell({"op": "caller_end"})

    def _on_refused(self, target: str, why: str) -> None:
        self.num_refused_calls += 1
        self.refused_calls.append(f"{target}: {why}")
        _log.warning("a %s sandbox may not reach %s: %s", self._backend, target, why)

    def _take_end(self) -> None:
        self._loop.remove_reader(self._channel.socket)
        self.lost_kind = self.lost_kind or "infra"
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(self.lost(self.lost_kind))
        if not self._first.done():
            self._first.set_exception(ConnectionError("its first process ended before it was ready"))
        if not self._ended.done():
            self._ended.set_result(None)


def _close_descriptor(header: dict[str, Any]) -> None:
    if "descriptor" in header:
        os.close(header["descriptor"])
