"""The candidate's process: it runs the untrusted program, and the operations that tests ask of its objects.

No test and no expected value was ever in its memory: it is forked from the runner before that reads its job.
This side is not protected against itself: a candidate can do anything to its own process and to this
connection; at most the runner then receives another value.

Values are sent as JSON with tags. An object without a plain form (an instance of the candidate's class, an
iterator, a function) is sent as a number, its reference. A subclass of a plain type is sent as that type:
a Counter as a dict. Decoding makes plain values only and runs no code of the sender's.
Runs in the sandbox, with the standard library only.
"""

from __future__ import annotations

import ast
import atexit
import builtins
import json
import operator
import os
import sys
import types
from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import chain, product
from typing import Any, NoReturn

PACKAGES_DIR = "/packages"
"""Mount point in the sandbox of the packages that a task allows; it holds nothing else."""
LOAD, RUN = 0, 1
"""References of the two functions that the process has from the start."""
_MAX_OUTPUT_BYTES = 8 << 20
_MAX_MESSAGE_BYTES = 32 << 20
_MAX_ERROR_CHARS = 1000
_UsingStatement = ast.Expr | ast.Assert | ast.For | ast.While


def serve(connection: Any) -> NoReturn:
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
    objects: list[Any] = [load_program, _run_program]

    def refer(value: Any) -> Any:
        objects.append(value)
        return ["ref", len(objects) - 1]

    while True:
        operation, target, *rest = receive(connection)
        reply: Any = None
        with Caught() as caught:
            arguments, keywords = (decode(part, objects.__getitem__) for part in rest)
            value = _OPERATIONS[operation](objects[target], *arguments, **keywords)
            reply = encode(("value", value), refer)
        send(connection, reply if caught.error is None else _describe_raised(caught.error))


def load_program(source: str, names: Sequence[str], has_methods: bool) -> dict[str, Any]:
    """Run the candidate's module; return its objects of the tested names; `has_methods`: Solution's too.

    Examples of their use, and what reads input, are not run, also in a function that is called. A statement
    that raises is as if it were not there.
    """
    module = sys.modules["candidate"] = types.ModuleType("candidate")
    namespace = module.__dict__
    body = ast.parse(source).body
    future = [one for one in body if isinstance(one, ast.ImportFrom) and one.module == "__future__"]
    for statement in body:
        code = compile(ast.Module([*future, statement], []), "<candidate>", "exec")
        with Caught():
            used = set(code.co_names)
            for name in code.co_names:
                used |= set(getattr(namespace.get(name), "__code__", code).co_names)
            if not (isinstance(statement, _UsingStatement) and used & {*names, "input"}):
                exec(code, namespace)
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
    "call": operator.call,
    "call_in_place": _call_in_place,
    **{one.__name__: one for one in (getattr, setattr, iter, next, len, bool, str, repr)},
    **{one.__name__: one for one in (operator.getitem, operator.setitem)},
}


def _run_program(source: str, stdin: str) -> tuple[int, str]:
    """Run a program in a fork of this process; return its exit code and its output."""
    files = [os.memfd_create(name) for name in ("input", "output")]
    os.write(files[0], stdin.encode("utf-8", "surrogatepass"))
    os.lseek(files[0], 0, os.SEEK_SET)
    pid = os.fork()
    if pid == 0:
        with Caught():
            _become_program(source, files)
        os._exit(1)
    _, status = os.waitpid(pid, 0)
    output = os.pread(files[1], _MAX_OUTPUT_BYTES + 1, 0)
    for descriptor in files:
        os.close(descriptor)
    if len(output) > _MAX_OUTPUT_BYTES:
        raise OverflowError
    return os.waitstatus_to_exitcode(status), output.decode("utf-8", "surrogateescape")


def _become_program(source: str, files: Sequence[int]) -> NoReturn:
    """Run a program with this input and output as the interpreter would, and exit."""
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


def send(connection: Any, message: Any) -> None:
    """Send encoded values, as a line of JSON."""
    connection.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")
    connection.flush()


def receive(connection: Any) -> Any:
    """Return the next message. Raises: EOFError if there is none; ValueError; RecursionError."""
    line = connection.readline(_MAX_MESSAGE_BYTES)
    if not line.endswith(b"\n"):
        raise EOFError
    return json.loads(line)


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
    if value is None or kind in (bool, int, float, str):
        return value
    # The methods of the plain type are called, because a subclass may override them.
    for plain, to_plain in _PLAIN.items():
        if isinstance(value, plain):
            return to_plain(value)
    for plain, (parts, _) in _FORMS.items():
        if isinstance(value, plain):
            return [plain.__name__, *(encode(part, refer) for part in parts(value))]
    if isinstance(value, type) and value in _TYPES:
        return ["type", value.__name__]
    if kind.__module__ in ("decimal", "fractions") and kind.__name__ in _MAKERS:
        return [kind.__name__, str(value)]
    return refer(value)


def decode(data: Any, resolve: Callable[[int], Any]) -> Any:
    """Return the value of a JSON form. `resolve` returns the object of a reference.

    Raises: LookupError, TypeError, ValueError or ArithmeticError for any other form.
    """
    if not isinstance(data, list):
        return data
    tag, *parts = data
    return resolve(*parts) if tag == "ref" else _MAKERS[tag](*(decode(part, resolve) for part in parts))


_TYPES = {one for one in vars(builtins).values() if isinstance(one, type)}
_PLAIN: dict[type, Callable[[Any], Any]] = {int: int.__pos__, float: float.__pos__, str: str.__str__}
_FORMS: dict[type, tuple[Callable[[Any], Any], Callable[..., Any]]] = {
    list: (list.__iter__, lambda *items: list(items)),
    tuple: (tuple.__iter__, lambda *items: items),
    set: (set.__iter__, lambda *items: set(items)),
    frozenset: (frozenset.__iter__, lambda *items: frozenset(items)),
    dict: (
        lambda value: chain.from_iterable(dict.items(value)),
        lambda *parts: dict(zip(parts[::2], parts[1::2], strict=True)),
    ),
    bytes: (lambda value: [bytes.hex(value)], bytes.fromhex),
    bytearray: (lambda value: [bytearray.hex(value)], bytearray.fromhex),
    complex: (lambda value: (value.real, value.imag), complex),
    range: (lambda value: (value.start, value.stop, value.step), range),
}
"""By type: its parts, and the function that makes it of them."""
_MAKERS: dict[str, Callable[..., Any]] = {
    **{plain.__name__: make for plain, (_, make) in _FORMS.items()},
    "type": {one.__name__: one for one in _TYPES}.__getitem__,
    "Decimal": lambda text: import_module("decimal").Decimal(text),
    "Fraction": lambda text: import_module("fractions").Fraction(text),
}
