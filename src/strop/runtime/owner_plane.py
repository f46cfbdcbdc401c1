"""Serves a sandbox to the process that ordered it, its owner, as if it ran on the owner's machine.

The owner's frames for the sandbox's supervisor come over one connection, an upgraded HTTP request. Each frame
is checked, renumbered for this side and passed on. The supervisor enforces time limits and bounds, as for a
local sandbox. The sandbox ends with the connection, or if none comes. Each connection to a server inside uses
a further HTTP connection.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import platform
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from strop.errors import CorruptRecord, SandboxError, SandboxLost, SandboxRefused, given_of
from strop.runtime.contract import FailureKind
from strop.runtime.planes import SandboxFailed, lost_as_failure
from strop.runtime.ports import splice
from strop.sandbox.frames import pack, unpack
from strop.sandbox.local import LocalSandbox
from strop.sandbox.wire import CONNECT_PATH, FRAMES_PATH, MAX_BODY_BYTES, PROTOCOL, SANDBOX_KEY_HEADER

_OWNER_LIMIT_S = 60.0
"""For the owner to connect after its sandbox was made."""
_BUSY_EVERY_S = 20.0
"""How often a sandbox with running requests is noted as used."""
_LACKS = ("mounts",)
_COMMANDS = ("start", "run")
_CHUNK_BYTES = 64 << 10
_Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
_log = logging.getLogger("strop.runtime.owner_plane")


class OwnerPlane:
    """Serves one sandbox to its owner."""

    num_commands = 0
    first_command_at: float | None = None

    def __init__(self, sandbox: LocalSandbox, key: str, note_use: Callable[[], None]) -> None:
        self._sandbox = sandbox
        self._key = key
        self._note_use = note_use
        self._owner: asyncio.StreamWriter | None = None
        self._numbers: dict[int, int] = {}
        """This side's numbers of the unanswered requests, by the owner's numbers."""
        self._gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """The reason, once the owner is gone."""
        self._waiting = asyncio.get_running_loop().call_later(
            _OWNER_LIMIT_S, self._end, f"its owner did not come within {_OWNER_LIMIT_S:.0f} s"
        )

    async def connect(self) -> asyncio.Protocol:
        """Return the protocol that serves the next connection."""
        reader = asyncio.StreamReader(limit=_CHUNK_BYTES)
        return asyncio.StreamReaderProtocol(reader, self._serve)

    async def wait_ended(self) -> SandboxFailed:
        """Return when the sandbox is lost or its owner is gone."""
        lost = asyncio.create_task(self._sandbox.wait_lost())
        try:
            await asyncio.wait({lost, self._gone}, return_when=asyncio.FIRST_COMPLETED)
            if not lost.done():
                return SandboxFailed(FailureKind.INFRA_LOST, self._gone.result())
            return lost_as_failure(lost.result(), self._sandbox.client.lost_why)
        finally:
            lost.cancel()

    def log_tail(self) -> str:
        """Return an empty text: no server runs inside."""
        return ""

    async def close(self, why: str) -> None:
        """Report the end to the owner."""
        self._end(why)
        self._send({"lost": self._sandbox.client.lost_kind or "infra", "why": why})

    def _end(self, why: str) -> None:
        self._waiting.cancel()
        if not self._gone.done():
            self._gone.set_result(why)

    # Requests.

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the one request of a connection, which asks for an upgrade, and serve it."""
        import h11

        with suppress(ConnectionError, asyncio.CancelledError):
            http = h11.Connection(h11.SERVER)
            # The gate has waited for the whole head.
            http.receive_data(await reader.read(_CHUNK_BYTES))
            try:
                request = http.next_event()
                serve = await self._admit(request if isinstance(request, h11.Request) else None)
            except (h11.RemoteProtocolError, _Refused) as error:
                refused = error if isinstance(error, _Refused) else _Refused(400, str(error))
                body = json.dumps({"kind": refused.kind, "detail": str(refused)}).encode()
                headers = [("content-length", str(len(body))), ("connection", "close")]
                answer = h11.Response(status_code=refused.status, headers=headers)
                events = (answer, h11.Data(data=body), h11.EndOfMessage())
                writer.write(b"".join(http.send(event) for event in events))
                await writer.drain()
            else:
                upgrade = [("connection", "upgrade"), ("upgrade", PROTOCOL)]
                writer.write(http.send(h11.InformationalResponse(status_code=101, headers=upgrade)))
                await serve(reader, writer)
        writer.close()

    async def _admit(self, request: Any) -> _Serve:
        """Return what serves a request. Raises: _Refused."""
        if request is None:
            raise _Refused(400, "no request")
        headers = {name.decode(): value.decode("latin-1") for name, value in request.headers}
        target = urlsplit(request.target.decode())
        if not hmac.compare_digest(headers.get(SANDBOX_KEY_HEADER.lower(), ""), self._key):
            raise _Refused(401, "Unauthorized")
        if request.method != b"GET" or target.path not in (FRAMES_PATH, CONNECT_PATH):
            raise _Refused(404, "Not Found")
        if headers.get("upgrade") != PROTOCOL:
            raise _Refused(426, f"this is asked for with Upgrade: {PROTOCOL}")
        if target.path == CONNECT_PATH:
            return await self._connect_inside(dict(parse_qsl(target.query)))
        if self._owner is not None or self._gone.done():
            raise _Refused(409, "this sandbox has an owner, and ends with it")
        return self._serve_owner

    async def _connect_inside(self, query: Mapping[str, str]) -> _Serve:
        port = query.get("port", "")
        address = query.get("path") or (int(port) if port.isdecimal() else -1)
        try:
            connection = await self._sandbox.connect(address)
        except SandboxError as error:
            raise _Refused(409, given_of(error), kind=error.kind) from error

        async def serve(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await writer.drain()
            outer = await splice(self._note_use, connection)
            writer.transport.set_protocol(outer)
            outer.connection_made(writer.transport)
            await outer.ended.wait()

        return serve

    # Frames.

    async def _serve_owner(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._owner = writer
        self._sandbox.client.on_refused_call = self._send
        self._waiting.cancel()
        noting = asyncio.create_task(self._note_while_busy())
        buffer = bytearray()
        try:
            while data := await reader.read(_CHUNK_BYTES):
                self._note_use()
                buffer += data
                for header, body in unpack(buffer, max_body_bytes=MAX_BODY_BYTES):
                    if header.get("op") == "stop":
                        await self._sandbox.stop()
                        return
                    self._take(header, body)
                # Read no further requests while the owner does not read its answers.
                await writer.drain()
        except CorruptRecord as error:
            _log.warning("an owner is cut off: %s", error)
        except SandboxLost as lost:
            _log.warning("a sandbox did not end in time: %s", lost)
        finally:
            noting.cancel()
            self._end("the connection of its owner has ended")

    async def _note_while_busy(self) -> None:
        while True:
            await asyncio.sleep(_BUSY_EVERY_S)
            if self._numbers:
                self._note_use()

    def _take(self, header: dict[str, Any], body: bytes) -> None:
        """Pass a request on, or answer that it is invalid. Raises: CorruptRecord if it cannot be answered."""
        number, fault = header.get("id"), find_fault(header)
        is_answered = _is_number(number) and number not in self._numbers
        if fault and is_answered:
            self._send({"id": number, "failed": "request", "why": fault})
            return
        if fault or not (is_answered or number is None):
            raise CorruptRecord(f"an owner sent {fault or f'number {number} twice'}")
        operation = header["op"]
        if operation == "describe":
            self._send({"id": number, **self._describe()})
            return
        if operation in _COMMANDS and not header.get("builtin"):
            self.num_commands += 1
            self.first_command_at = self.first_command_at or time.time()
        passed = {name: value for name, value in header.items() if name != "id"}
        if "max_bytes" in passed.get("details", {}):
            passed["details"]["max_bytes"] = min(passed["details"]["max_bytes"], MAX_BODY_BYTES)
        for name in ("job", "shell"):
            if name in passed:
                # -1 names no job: an ended one has no number.
                passed[name] = self._numbers.get(passed[name], -1)
        if number is None:
            self._sandbox.client.tell(passed, body)
            return
        try:
            deliver = partial(self._deliver, number)
            self._numbers[number] = self._sandbox.client.relay(passed, body, deliver)
        except SandboxLost as lost:
            self._send({"id": number, "lost": lost.kind, "why": ""})

    def _deliver(self, number: int, header: dict[str, Any], body: bytes) -> None:
        self._numbers.pop(number, None)
        self._send({**header, "id": number}, body)

    def _describe(self) -> dict[str, Any]:
        sandbox = self._sandbox
        argv: tuple[str, ...] = ()
        with suppress(SandboxRefused):
            argv = sandbox.python_argv
        lacks = tuple(dict.fromkeys((*_LACKS, *sandbox.isolation.lacks)))
        isolation = replace(sandbox.isolation, node=platform.node(), lacks=lacks)
        return {
            "isolation": asdict(isolation),
            "scratch": sandbox.scratch,
            "python_argv": argv,
            "supervisor_pid": sandbox.supervisor_pid,
        }

    def _send(self, header: dict[str, Any], body: bytes = b"") -> None:
        if self._owner is not None and not self._owner.is_closing():
            self._owner.write(pack(header, body))


class _Refused(Exception):
    """A request that is refused with a status."""

    def __init__(self, status: int, detail: str, *, kind: str = "") -> None:
        super().__init__(detail)
        self.status = status
        self.kind = kind


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 53


def _is_time(value: Any) -> bool:
    # Infinity is allowed; NaN is not.
    return type(value) in (int, float) and value >= 0


def _is_words(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_details(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and _is_text(value.get("path"))
        and all(_is_number(detail) for name, detail in value.items() if name != "path")
    )


_Check = Callable[[Any], bool]
_COMMAND_FIELDS: Mapping[str, _Check] = {
    "env": lambda value: isinstance(value, dict) and all(map(_is_text, value.values())),
    "cwd": lambda value: value is None or isinstance(value, str),
}
_FIELDS: Mapping[str, Mapping[str, _Check]] = {
    "describe": {},
    "start": {
        "argv": _is_words,
        "wall_limit_s": _is_time,
        "has_stdin": _is_bool,
        **_COMMAND_FIELDS,
    },
    "builtin": {
        "builtin": lambda value: value in ("read", "write", "make_dir", "list"),
        "details": _is_details,
        "wall_limit_s": _is_time,
    },
    "open_shell": {"argv": _is_words, **_COMMAND_FIELDS},
    "run": {"shell": _is_number, "wall_limit_s": _is_time},
    "stats": {},
    **{name: {"job": _is_number} for name in ("cancel", "end", "drop", "input", "input_end")},
    "signal": {"job": _is_number, "number": lambda value: type(value) is int and 1 <= value <= 64},
    "output": {
        "job": _is_number,
        "positions": lambda value: (
            isinstance(value, list) and len(value) == 2 and all(map(_is_number, value))
        ),
    },
}
"""The fields of each operation that an owner may request, and their checks."""
_OPTIONAL = frozenset({"has_stdin"})
_UNANSWERED = frozenset({"cancel", "end", "drop", "input_end", "signal"})


def find_fault(header: Mapping[str, Any]) -> str:
    """Return the fault of a request, empty if a supervisor can take it."""
    operation = header.get("op")
    fields = _FIELDS.get("builtin" if operation == "start" and "builtin" in header else str(operation))
    if fields is None or operation == "builtin":
        return f"operation {operation!r}, which there is not"
    for name, value in header.items():
        if name == "id":
            if operation in _UNANSWERED or not _is_number(value):
                return f"number {value!r} with {operation}"
        elif name != "op" and not (name in fields and fields[name](value)):
            return f"a field {name!r} that {operation} does not take, or not so"
    needed = fields.keys() | (set() if operation in _UNANSWERED else {"id"})
    missing = needed - header.keys() - _OPTIONAL
    return f"{operation} without {', '.join(sorted(missing))}" if missing else ""
