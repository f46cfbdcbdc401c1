"""The candidate's process: it runs the untrusted program, and the operations that tests ask of its objects.

No test and no expected value was ever in its memory: it is forked from the runner before that reads its job,
or newly executed. This side is not protected against itself: a candidate can do anything to its own process
and to this connection; at most the runner then receives another value.

Values are sent as JSON with tags. An object without a plain form (an instance of the candidate's class, an
iterator, a function) is sent as a number, its reference. A subclass of a plain type is sent as that type:
a Counter as a dict. Decoding makes plain values only and runs no code of the sender's.
Runs in the sandbox, with the standard library only.
"""

from __future__ import annotations

import atexit
import builtins
import json
import math
import operator
import os
import socket
import sys
import types
from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import product
from typing import Any, NoReturn

PACKAGES_DIR = "/packages"
"""Mount point in the sandbox of the packages that a task allows; it holds nothing else."""
LOAD, RUN = 0, 1
"""References of the two functions that every process has."""
_MAX_OUTPUT_BYTES = 8 << 20
_MAX_MESSAGE_BYTES = 32 << 20
_MAX_ERROR_CHARS = 1000
_MAX_JSON_INT = 1 << 53
_MAX_JSON_DIGITS = 20


def serve(connection: socket.socket) -> NoReturn:
    """Apply the runner's operations to the candidate's objects until the connection ends."""
    os.setsid()
    sys.set_int_max_str_digits(0)
    # No descriptor of the runner may stay open: its standard output carries the verdict.
    empty = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(empty, standard)
    os.close(empty)
    with Caught(), open("/proc/self/oom_score_adj", "w") as file:
        # If memory runs out, the kernel kills this process and not the runner.
        file.write("1000")
    sys.path.append(PACKAGES_DIR)
    channel = Channel(connection)
    objects: list[Any] = [_load, _run]

    def refer(value: Any) -> Any:
        objects.append(value)
        return ["ref", len(objects) - 1]

    while True:
        operation, target, *rest = channel.receive()
        reply: Any = None
        with Caught() as caught:
            arguments, keywords = (decode(part, objects.__getitem__) for part in rest)
            value = _OPERATIONS[operation](objects[target], *arguments, **keywords)
            reply = encode(("value", value), refer)
        channel.send(reply if caught.error is None else _describe_raised(caught.error))


def _load(source: str, imports: Sequence[str], names: Sequence[str], has_methods: bool) -> dict[str, Any]:
    """Run the candidate's module; return its objects of the tested names; `has_methods`: Solution's too."""
    module = sys.modules["candidate"] = types.ModuleType("candidate")
    namespace = module.__dict__
    for statement in imports:
        exec(compile(statement, "<imports>", "exec"), namespace)
    exec(compile(source, "<candidate>", "exec"), namespace)
    objects = {name: namespace[name] for name in names if name in namespace}
    solution = namespace.get("Solution")
    if has_methods and len(objects) < len(names) and isinstance(solution, type):
        instance = solution()
        objects = {name: getattr(instance, name) for name in names if hasattr(instance, name)} | objects
    return objects


def _describe_raised(error: BaseException) -> Any:
    """Return the name of a built-in class of exceptions, and arguments with which it reads as this one."""
    kinds = [kind for kind in type(error).__mro__ if kind.__module__ == "builtins"]
    for kind, is_text in product(kinds, (False, True)):
        with Caught():
            arguments = (str(error)[:_MAX_ERROR_CHARS],) if is_text else error.args
            if str(kind(*arguments)) == str(error):
                return encode(("raised", kind.__name__, arguments), _refuse)
    return encode(("raised", kinds[0].__name__, ()), _refuse)


def _refuse(value: Any) -> Any:
    raise TypeError(f"a {type(value).__name__} has no plain form")


def _call_in_place(target: Callable[..., Any], *arguments: Any, **keywords: Any) -> tuple[Any, ...]:
    """Call a function for what it does to its arguments, and return them."""
    target(*arguments, **keywords)
    return arguments


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda target, *arguments, **keywords: target(*arguments, **keywords),
    "call_in_place": _call_in_place,
    **{
        function.__name__: function
        for function in (
            getattr,
            setattr,
            iter,
            next,
            len,
            bool,
            str,
            repr,
            operator.getitem,
            operator.setitem,
        )
    },
}


def _run(source: str, stdin: str) -> tuple[int, str]:
    """Run a program in a fork of this process; return its exit code and its output."""
    files = [os.memfd_create(name) for name in ("input", "output")]
    with open(files[0], "wb", closefd=False) as file:
        file.write(stdin.encode("utf-8", "surrogatepass"))
    os.lseek(files[0], 0, os.SEEK_SET)
    pid = os.fork()
    if pid == 0:
        _become_program(source, files)
    _, status = os.waitpid(pid, 0)
    if os.fstat(files[1]).st_size > _MAX_OUTPUT_BYTES:
        raise OverflowError
    output = os.pread(files[1], _MAX_OUTPUT_BYTES, 0)
    for descriptor in files:
        os.close(descriptor)
    return os.waitstatus_to_exitcode(status), output.decode("utf-8", "surrogateescape")


def _become_program(source: str, files: Sequence[int]) -> NoReturn:
    """Run a program with this input and output as the interpreter would, and exit."""
    exit_code = 1
    with Caught():
        for standard, descriptor in enumerate(files):
            os.dup2(descriptor, standard)
        os.closerange(3, 256)
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115  open as long as the process
        sys.stdout, sys.stderr = (open(n, "w", encoding="utf-8", closefd=False) for n in (1, 2))  # noqa: SIM115
        sys.argv = ["solution.py"]
        module = sys.modules["__main__"] = types.ModuleType("__main__")
        with Caught() as caught:
            exec(compile(source, "<candidate>", "exec"), module.__dict__)
        exit_code = int(caught.error is not None)
        if isinstance(caught.error, SystemExit) and isinstance(caught.error.code, int | None):
            exit_code = (caught.error.code or 0) & 0xFF
        # Programs with a deep recursion often answer from a thread, or at exit.
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
    os._exit(exit_code)


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
        line = self._file.readline(_MAX_MESSAGE_BYTES)
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
