"""A small HTTP/1.1 server for a connection that is accepted elsewhere, and a reader of forms.

A sandbox's address belongs to a relay, which decides for each connection what serves it; a web framework
needs the listening socket. h11 parses the heads, answers are written in one piece, keep-alive works, bodies
are held in memory up to a limit. A connection can be upgraded to another protocol.

Not covered: HTTP/2, WebSockets, answers without a known length.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, unquote

from pydantic import BaseModel, ValidationError

from strop.runtime.ports import Serve

_CHUNK_BYTES = 1 << 18
_HEAD_LIMIT_S = 10.0
"""From the start of a connection to the end of its first request's head."""
_IDLE_LIMIT_S = 120.0
"""From an answer to the end of the next head."""
_BODY_LIMIT_S = 300.0
_DISCARD_LIMIT_S = 2.0
_PART_NAME = re.compile(r'[; ]name="((?:[^"\\]|\\.)*)"|[; ]name=([^;\s"]+)')
_log = logging.getLogger("strop.runtime.http_server")


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One request, read to its end."""

    method: str
    path: str
    """Decoded, without the query."""
    query: Mapping[str, list[str]]
    headers: Mapping[str, str]
    """By names in lower case."""
    body: bytes

    def query_field(self, name: str, default: str = "") -> str:
        """Return a query field's first value."""
        return self.query.get(name, [default])[0]

    def number(self, name: str, default: int) -> int:
        """Return a query field as a whole number. Raises: HttpError 422."""
        text = self.query_field(name, str(default))
        try:
            return int(text)
        except ValueError:
            raise HttpError(422, f"{name}={text!r} is no whole number") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The answer to a request."""

    status: int = 200
    body: bytes = b""
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Upgrade:
    """An answer that hands the connection to `serve`. The client waits for it before it sends more."""

    protocol: str
    serve: Serve


class HttpError(Exception):
    """A request is refused with a status."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail


Handler = Callable[[Request], Awaitable[Answer | Upgrade]]
Admit = Callable[[str, Mapping[str, str]], None]
"""Checks the path and the headers of a request before its body is read. Raises: HttpError."""


def has_key(headers: Mapping[str, str], header: str, key: str) -> bool:
    """Whether a header holds a key; compared in constant time."""
    return hmac.compare_digest(headers.get(header.lower(), "").encode(), key.encode())


def json_answer(value: Any, status: int = 200) -> Answer:
    """Return an answer with a JSON value or a model as its body."""
    text = value.model_dump_json() if isinstance(value, BaseModel) else json.dumps(value)
    return Answer(status=status, body=text.encode())


async def serve_connection(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    handler: Handler,
    *,
    max_body_bytes: int,
    admit: Admit = lambda path, headers: None,
) -> None:
    """Answer the requests of one connection until its end. Exceptions of the handler are answered too."""
    import h11

    protocol = h11.Connection(h11.SERVER)
    head_limit_s = _HEAD_LIMIT_S
    with suppress(ConnectionError, TimeoutError):
        while True:
            request: Request | None = None
            try:
                request = await _read_request(
                    protocol, reader, writer, admit, max_body_bytes=max_body_bytes, head_limit_s=head_limit_s
                )
                if request is None:
                    return
                answer = await _handle(handler, request)
                if isinstance(answer, Upgrade):
                    await _upgrade(protocol, answer, reader, writer)
                    return
            except HttpError as error:
                answer = json_answer({"detail": error.detail}, error.status)
            except h11.RemoteProtocolError as error:
                answer = json_answer({"detail": str(error)}, error.error_status_hint)
            is_over = protocol.their_state is not h11.DONE
            has_body = request is None or request.method != "HEAD"
            headers = {
                "content-type": answer.content_type,
                "content-length": str(len(answer.body)),
                **answer.headers,
                **({"connection": "close"} if is_over else {}),
            }
            fields = [(name.encode(), _header_value(value)) for name, value in headers.items()]
            head = h11.Response(status_code=answer.status, headers=fields)
            events = (head, h11.Data(data=answer.body if has_body else b""), h11.EndOfMessage())
            writer.write(b"".join(protocol.send(event) for event in events))
            await writer.drain()
            if is_over or protocol.our_state is not h11.DONE:
                await _discard(reader, writer)
                return
            protocol.start_next_cycle()
            head_limit_s = _IDLE_LIMIT_S


def _header_value(text: str) -> bytes:
    """Return a header's bytes, in UTF-8; what a header cannot have, such as a line end, as %XX."""
    encoded = text.strip().encode("utf-8", errors="surrogateescape")
    return re.sub(rb"[\x00-\x1f\x7f]", lambda found: b"%%%02X" % ord(found[0]), encoded)


async def _upgrade(
    protocol: Any, answer: Upgrade, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    import h11

    is_asked = protocol.their_state not in (h11.DONE, h11.MUST_CLOSE)
    if not is_asked or protocol.trailing_data[0]:
        raise HttpError(426, f"this is asked for with Upgrade: {answer.protocol}, and nothing behind it yet")
    headers = [("connection", "upgrade"), ("upgrade", answer.protocol)]
    writer.write(protocol.send(h11.InformationalResponse(status_code=101, headers=headers)))
    await answer.serve(reader, writer)


async def _handle(handler: Handler, request: Request) -> Answer | Upgrade:
    try:
        return await handler(request)
    except ValidationError as error:
        return json_answer({"detail": str(error)}, 422)
    except (ConnectionError, TimeoutError, OSError) as error:
        _log.warning("%s %s failed", request.method, request.path, exc_info=error)
        return json_answer({"detail": f"{type(error).__name__}: {error}"}, 500)


async def _read_request(
    protocol: Any,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    admit: Admit,
    *,
    max_body_bytes: int,
    head_limit_s: float,
) -> Request | None:
    """Return the next request, None at the end of the connection."""
    import h11

    path, query, headers = "", "", dict[str, str]()
    head: h11.Request | None = None
    parts: list[bytes] = []
    num_bytes = 0
    now = asyncio.get_running_loop().time
    head_until = now() + head_limit_s
    while True:
        event = protocol.next_event()
        if event is h11.NEED_DATA:
            if protocol.they_are_waiting_for_100_continue:
                proceed = h11.InformationalResponse(status_code=100, headers=[])
                writer.write(protocol.send(proceed))
            async with asyncio.timeout_at(head_until if head is None else now() + _BODY_LIMIT_S):
                protocol.receive_data(await reader.read(_CHUNK_BYTES))
        elif isinstance(event, h11.Request):
            head = event
            path, _, query = head.target.decode("ascii").partition("?")
            headers = {name.decode(): value.decode("latin-1") for name, value in head.headers}
            admit(unquote(path), headers)
        elif isinstance(event, h11.Data):
            num_bytes += len(event.data)
            if num_bytes > max_body_bytes:
                raise HttpError(413, f"a body of more than {max_body_bytes} bytes")
            parts.append(bytes(event.data))
        elif isinstance(event, h11.EndOfMessage) and head is not None:
            break
        else:
            return None
    return Request(
        method=head.method.decode(),
        path=unquote(path),
        query=parse_qs(query, keep_blank_values=True),
        headers=headers,
        body=b"".join(parts),
    )


async def _discard(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Read the rest of the request: a close over unread bytes resets the connection and loses the answer."""
    with suppress(TimeoutError, OSError):
        if writer.can_write_eof():
            writer.write_eof()
        async with asyncio.timeout(_DISCARD_LIMIT_S):
            while await reader.read(_CHUNK_BYTES):
                pass


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One field of a form."""

    name: str
    data: bytes


def read_form(content_type: str, body: bytes) -> list[Part]:
    """Return the parts of a form (RFC 7578) in their order. Raises: HttpError 422 if the body is no form."""
    kind, _, rest = content_type.partition(";")
    boundary = re.search(r'boundary="?([^";]+)"?', rest)
    if kind.strip().lower() != "multipart/form-data" or boundary is None:
        raise HttpError(422, f"a form is expected, and this is {content_type or 'nothing'}")
    delimiter = b"--" + boundary[1].strip().encode("latin-1")
    # The first delimiter may be at the very start; each other one follows the end of a line.
    pieces = (b"\r\n" + body).split(b"\r\n" + delimiter)
    if len(pieces) < 2 or not pieces[-1].startswith(b"--"):
        raise HttpError(422, "the form has no end")
    parts = []
    for piece in pieces[1:-1]:
        head, gap, data = piece.partition(b"\r\n\r\n")
        name = _PART_NAME.search(head.decode("utf-8", errors="replace"))
        if not gap or name is None:
            raise HttpError(422, "a part of the form has no name")
        parts.append(Part(name=name[1] if name[1] is not None else name[2], data=data))
    return parts


def one_part(parts: list[Part], name: str) -> bytes:
    """Return the data of a named part. Raises: HttpError 422 if there is none."""
    for part in parts:
        if part.name == name:
            return part.data
    raise HttpError(422, f"the form has no part {name!r}")
