"""Values between a candidate and its judge, as JSON with tags, and the socket that carries them.

An object without a plain form (an instance of the candidate's class, an iterator, a function) is sent as a
number, its reference. A subclass of a plain type is sent as the plain type: a Counter as a dict. Decoding
makes plain values only and runs no code of the sender's.
Runs in the sandbox, with the standard library only.
"""

from __future__ import annotations

import builtins
import json
import math
import socket
from collections.abc import Callable
from importlib import import_module
from typing import Any

MAX_BYTES = 32 << 20
_MAX_JSON_INT = 1 << 53
_MAX_JSON_DIGITS = 20


class MalformedValue(ValueError):
    """Raised if received data is not in the form that `encode` writes."""


class Channel:
    """One end of a socket that carries messages, each a line of JSON."""

    def __init__(self, connection: socket.socket) -> None:
        self._file = connection.makefile("rwb")
        self.close = connection.close

    def send(self, message: Any) -> None:
        """Send encoded values."""
        self._file.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")
        self._file.flush()

    def receive(self) -> Any:
        """Return the next message. Raises: EOFError if there is none; MalformedValue."""
        line = self._file.readline(MAX_BYTES)
        if not line.endswith(b"\n"):
            raise EOFError
        return parse(line)


def parse(line: bytes) -> Any:
    """Return the message in a line. Raises: MalformedValue."""
    try:
        return json.loads(line, parse_int=_short_int)
    except (ValueError, RecursionError) as error:
        raise MalformedValue(f"a message that is not JSON ({type(error).__name__})") from error


def _short_int(text: str) -> int:
    """Read a decimal number. A million digits would take minutes, uninterruptibly, and are refused."""
    if len(text) > _MAX_JSON_DIGITS:
        raise MalformedValue(f"a decimal number of {len(text)} digits")
    return int(text)


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


def encode(value: Any, refer: Callable[[Any], Any]) -> Any:
    """Return the JSON form of a value. `refer` returns the form of an object that is not plain.

    Raises: RecursionError if a value contains itself; any exception of `refer`.
    """
    kind = type(value)
    form: Any = value
    # The methods of the plain type are called, because a subclass may override them.
    if value is None or kind in (bool, str):
        pass
    elif isinstance(value, int):
        form = int.__pos__(value)
        form = form if -_MAX_JSON_INT < form < _MAX_JSON_INT else ["int", hex(form)]
    elif isinstance(value, float):
        form = float.__pos__(value)
        form = form if math.isfinite(form) else ["float", repr(form)]
    elif isinstance(value, str):
        form = str.__str__(value)
    elif isinstance(value, dict):
        form = ["dict", *(encode(part, refer) for pair in dict.items(value) for part in pair)]
    elif isinstance(value, _CONTAINERS):
        plain: Any = next(one for one in _CONTAINERS if isinstance(value, one))
        form = [plain.__name__, *(encode(item, refer) for item in plain.__iter__(value))]
    elif isinstance(value, bytes | bytearray):
        form = ["bytes" if isinstance(value, bytes) else "bytearray", bytes(value).hex()]
    elif isinstance(value, type) and _TYPES.get(value.__name__) is value:
        form = ["type", value.__name__]
    elif parts := _PARTS.get(f"{kind.__module__}.{kind.__name__}"):
        form = [kind.__name__, *(encode(part, refer) for part in parts(value))]
    else:
        form = refer(value)
    return form


def decode(data: Any, resolve: Callable[[int], Any]) -> Any:
    """Return the value of a JSON form. `resolve` returns the object of a reference.

    Raises: MalformedValue for any other form.
    """
    if not isinstance(data, list):
        return data
    try:
        tag, *parts = data
        if tag == "ref":
            return resolve(*parts)
        return _MAKERS[tag](*(decode(part, resolve) for part in parts))
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:
        raise MalformedValue(f"a value in no known form: {type(error).__name__}") from error


_TYPES = {name: kind for name, kind in vars(builtins).items() if isinstance(kind, type)}
_CONTAINERS = (list, tuple, set, frozenset)
_PARTS: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "builtins.complex": lambda value: (value.real, value.imag),
    "builtins.range": lambda value: (value.start, value.stop, value.step),
    "decimal.Decimal": lambda value: (str(value),),
    "fractions.Fraction": lambda value: (value.numerator, value.denominator),
}
_MAKERS: dict[str, Callable[..., Any]] = {
    "int": lambda text: int(text, 16),
    "float": float,
    "list": lambda *items: list(items),
    "tuple": lambda *items: items,
    "set": lambda *items: set(items),
    "frozenset": lambda *items: frozenset(items),
    "dict": lambda *parts: dict(zip(parts[::2], parts[1::2], strict=True)),
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "type": _TYPES.__getitem__,
    "complex": complex,
    "range": range,
    "Decimal": lambda text: import_module("decimal").Decimal(text),
    "Fraction": lambda *parts: import_module("fractions").Fraction(*parts),
}
