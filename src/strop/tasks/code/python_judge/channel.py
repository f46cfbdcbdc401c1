"""Frames and values between a candidate and its judge, and `Caught`, which catches every exception.

A frame is a length, then JSON. Runs in the sandbox, with the standard library only.
"""

from __future__ import annotations

import json
import math
import socket
import struct
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

_LENGTH = struct.Struct("!I")
MAX_FRAME_BYTES = 16 << 20


class ChannelEnded(Exception):
    """Raised if the other end closed its socket, or sent an invalid frame."""


class Channel:
    """One end of a socket that carries frames. Deadlines are times of `time.monotonic`."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    def send(self, message: Any, *, until: float | None = None) -> None:
        """Send a message of encoded values.

        Raises: ChannelEnded; TimeoutError if it cannot be sent in time.
        """
        body = dump(message)
        if len(body) > MAX_FRAME_BYTES:
            raise ChannelEnded(f"a message of {len(body)} bytes; at most {MAX_FRAME_BYTES} pass")
        self._limit(until)
        try:
            self.connection.sendall(_LENGTH.pack(len(body)) + body)
        except TimeoutError:
            raise
        except OSError as error:
            raise ChannelEnded(f"the connection is closed ({error})") from error

    def receive(self, *, until: float | None = None) -> Any:
        """Return the next message.

        Raises: ChannelEnded; TimeoutError if it is not complete in time.
        """
        (length,) = _LENGTH.unpack(self._receive(_LENGTH.size, until))
        if length > MAX_FRAME_BYTES:
            raise ChannelEnded(f"a message of {length} bytes; at most {MAX_FRAME_BYTES} pass")
        try:
            return parse(self._receive(length, until))
        except MalformedValue as error:
            raise ChannelEnded(str(error)) from error

    def _receive(self, length: int, until: float | None) -> bytes:
        parts: list[bytes] = []
        while length:
            self._limit(until)
            try:
                part = self.connection.recv(min(length, 1 << 20))
            except TimeoutError:
                raise
            except OSError as error:
                raise ChannelEnded(f"the connection is closed ({error})") from error
            if not part:
                raise ChannelEnded("the connection is closed")
            parts.append(part)
            length -= len(part)
        return b"".join(parts)

    def _limit(self, until: float | None) -> None:
        if until is None:
            return
        left_s = until - time.monotonic()
        if left_s <= 0.0:
            raise TimeoutError
        self.connection.settimeout(left_s)


class Caught:
    """Catches every exception of its block, `SystemExit` too; `error` is None if there was none.

    A program may raise anything, and every exception is a value here: the reply to a call, the verdict of a
    test. boundary: sandbox execution
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def __enter__(self) -> Caught:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        self.error = error
        return True


def describe(error: BaseException, max_chars: int = 400) -> str:
    """Describe an exception in one line, even if its `__str__` raises."""
    text = ""
    with Caught():
        text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:max_chars]


# Values are sent as JSON with type tags, from which only plain values are built: decoding cannot run code. An
# object without a plain form (an instance of the candidate's class, an iterator, a function) is sent as a
# number, its reference. A subclass of a plain type is sent as the plain type: a Counter as a dict.

_MAX_JSON_INT = 1 << 53
_MAX_JSON_DIGITS = 20
_PLAIN_TYPES: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        *(bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, range, object),
        type(None),
    )
}


class MalformedValue(ValueError):
    """Raised if received data is not in the form that `encode` writes."""


def encode(value: Any, refer: Callable[[Any], Any]) -> Any:
    """Return the JSON form of a value. `refer` returns the form of an object that is not plain.

    Raises: RecursionError if a value contains itself; any exception of `refer`.
    """
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    # The methods of the plain type are called, because a subclass may override them.
    if isinstance(value, int):
        plain = int.__pos__(value)
        return plain if -_MAX_JSON_INT < plain < _MAX_JSON_INT else {"t": "int", "v": hex(plain)}
    if isinstance(value, float):
        number = float.__pos__(value)
        return number if math.isfinite(number) else {"t": "float", "v": repr(number)}
    return str.__str__(value) if isinstance(value, str) else _encode_container(value, refer)


def _encode_container(value: Any, refer: Callable[[Any], Any]) -> Any:
    if isinstance(value, list):
        return [encode(item, refer) for item in list.__iter__(value)]
    if isinstance(value, dict):
        pairs = [[encode(key, refer), encode(item, refer)] for key, item in dict.items(value)]
        return {"t": "dict", "v": pairs}
    plain: Any
    for plain in (tuple, set, frozenset):
        if isinstance(value, plain):
            return {"t": plain.__name__, "v": [encode(item, refer) for item in plain.__iter__(value)]}
    return _encode_rare(value, refer)


def _encode_rare(value: Any, refer: Callable[[Any], Any]) -> Any:
    if isinstance(value, bytes | bytearray):
        return {"t": "bytes" if isinstance(value, bytes) else "bytearray", "v": bytes(value).hex()}
    if type(value) is complex:
        return {"t": "complex", "v": [encode(value.real, refer), encode(value.imag, refer)]}
    if type(value) is range:
        return {"t": "range", "v": [encode(part, refer) for part in (value.start, value.stop, value.step)]}
    if isinstance(value, type) and _PLAIN_TYPES.get(value.__name__) is value:
        return {"t": "type", "v": value.__name__}
    # A value of such a type exists only if its module has been imported.
    if "decimal" in sys.modules and type(value) is sys.modules["decimal"].Decimal:
        return {"t": "Decimal", "v": str(value)}
    is_fraction = "fractions" in sys.modules and type(value) is sys.modules["fractions"].Fraction
    parts = (value.numerator, value.denominator) if is_fraction else ()
    return {"t": "Fraction", "v": [encode(part, refer) for part in parts]} if is_fraction else refer(value)


def decode(data: Any, resolve: Callable[[int], Any]) -> Any:
    """Return the value of a JSON form. `resolve` returns the object of a reference.

    Raises: MalformedValue for any other form.
    """
    if isinstance(data, list):
        return [decode(item, resolve) for item in data]
    if not isinstance(data, dict):
        return data
    tag, body = data.get("t"), data.get("v")
    try:
        if tag in _CONTAINERS:
            return _CONTAINERS[tag]([decode(item, resolve) for item in _checked(body, list)])
        if tag == "dict":
            return {decode(key, resolve): decode(item, resolve) for key, item in _checked(body, list)}
        if tag == "ref":
            return resolve(_checked(body, int))
        return _SCALARS[tag](_checked(body, str))
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise MalformedValue(f"a value of form {str(tag)[:20]!r}: {type(error).__name__}") from error


def _checked(body: Any, kind: type) -> Any:
    if type(body) is not kind:
        raise TypeError(type(body).__name__)
    return body


def _short_int(text: str) -> int:
    """Read a decimal number. A million digits would take minutes, uninterruptibly, and are refused."""
    if len(text) > _MAX_JSON_DIGITS:
        raise MalformedValue(f"a decimal number of {len(text)} digits")
    return int(text)


_CONTAINERS: dict[Any, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "range": lambda parts: range(*parts),
    "complex": lambda parts: complex(*parts),
    "Fraction": lambda parts: import_module("fractions").Fraction(*parts),
}
_SCALARS: dict[Any, Callable[[str], Any]] = {
    "int": lambda text: int(text, 16),
    "float": float,
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "type": _PLAIN_TYPES.__getitem__,
    "Decimal": lambda text: import_module("decimal").Decimal(text),
}


def dump(message: Any) -> bytes:
    """Return a message of encoded values as bytes."""
    return json.dumps(message, separators=(",", ":")).encode()


def parse(body: bytes) -> Any:
    """Return the message in some bytes. Raises: MalformedValue if they are not JSON."""
    try:
        return json.loads(body, parse_int=_short_int)
    except (ValueError, RecursionError) as error:
        raise MalformedValue(f"a message that is not JSON ({type(error).__name__})") from error
