"""The judge inside the sandbox: reads one job on standard input, writes one verdict on standard output.

It runs the tests itself, and hides its memory, its descriptors and the tests from its child, the candidate's
process. If this process is killed, the verdict is missing, which is never a pass.

The candidate's process runs the untrusted program, and the operations that tests ask of its objects. It is
forked before the job is read: no test and no expected value was ever in its memory. It is not protected
against itself: a candidate can do anything there and to the connection; at most the runner then receives
another value.

Values are sent as JSON with tags. A subclass of a plain type is sent as that type: a Counter as a dict. Any
other object (an instance of the candidate's class, an iterator, a function) is sent as a number; in the
runner it is a `Remote`, which can be called, iterated, indexed, read and written, and which equals no plain
value. So no method of the candidate ever runs in the runner. Linux only, the standard library only.
"""

from __future__ import annotations

import ast
import atexit
import builtins
import ctypes
import json
import math
import operator
import os
import re
import signal
import socket
import sys
import time
import types
from collections import Counter, deque, namedtuple
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial, partialmethod
from importlib import import_module
from types import CodeType
from typing import Any, NoReturn

PACKAGES_DIR = "/packages"
"""Mount point in the sandbox of the packages that a task allows; it holds nothing else."""
RESULTS = PASSED, FAILED, ERRORED, TIMED_OUT = "passed", "failed", "errored", "timed_out"
_PR_SET_DUMPABLE = 4
_MAX_OUTPUT_BYTES = 8 << 20
_MAX_MESSAGE_BYTES = 32 << 20
_MAX_DIGITS = 100_000
"""Longer numbers of the candidate's would take minutes to read, uninterruptibly."""
_REL_TOLERANCE, _ABS_TOLERANCE = 1e-6, 1e-9
_IN_PLACE = "_strop_in_place"
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_INTEGER = re.compile(r"[+-]?\d+", re.ASCII)
_UsingStatement = ast.Expr | ast.Assert | ast.For | ast.While
Test = Callable[[], object]
"""Raises AssertionError if the answer is wrong."""


def main() -> None:
    """Judge one job."""
    session = Session()
    # Close /proc/<pid>/fd and /proc/<pid>/mem of this process to other processes of this user.
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    # An interrupt from the candidate must end this process as a signal, not as an exception.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.set_int_max_str_digits(_MAX_DIGITS)
    # What a test prints must not stand before a verdict.
    out, sys.stdout = sys.stdout, open(os.devnull, "w")  # noqa: SIM115  open as long as the process
    job = json.loads(sys.stdin.buffer.read())
    print(job["nonce"], "started", file=out, flush=True)
    counts = session.judge(job)
    found = {"counts": counts} if session.fault is None else {"fault": session.fault}
    print(job["nonce"], json.dumps(found), file=out, flush=True)
    # The verdict is written; an orderly shutdown of the interpreter would take milliseconds.
    os._exit(0)


# What both sides do.


def _send(connection: Any, message: Any) -> None:
    connection.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")
    connection.flush()


def _receive(connection: Any) -> Any:
    line = connection.readline(_MAX_MESSAGE_BYTES)
    if not line.endswith(b"\n"):
        raise EOFError
    return json.loads(line)


def encode(value: Any, refer: Callable[[Any], Any]) -> Any:
    """Return the JSON form of a value. `refer` returns the form of an object that is not plain.

    Raises: RecursionError if a value contains itself; any exception of `refer`.
    """
    if value is None or isinstance(value, int | float | str):
        # Of a subclass, `json` writes the plain value.
        return value
    if isinstance(value, type):
        return ["type", value.__name__] if _TYPES.get(value.__name__) is value else refer(value)
    if isinstance(value, tuple) and (names := getattr(type(value), "_fields", None)):
        named = type(value).__name__, list(names), *tuple.__iter__(value)
        return ["named", *(encode(part, refer) for part in named)]
    parts: Iterable[Any]
    kinds: tuple[Any, ...] = type(value).__mro__
    for kind in kinds:
        # The methods of the plain type are called, because a subclass may override them.
        name = kind.__name__
        if name in _LISTED and kind.__module__ in ("builtins", "collections"):
            parts = dict.items(value) if kind is dict else kind.__iter__(value)
        elif kind.__module__ == _MODULES.get(name):
            parts = (value.real, value.imag) if kind is complex else kind.__reduce__(value)[1]
        else:
            continue
        return [name, *(encode(part, refer) for part in parts)]
    return refer(value)


def decode(data: Any, resolve: Callable[[int], Any]) -> Any:
    """Return the value of a JSON form. `resolve` returns the object of a reference.

    Raises: LookupError, TypeError, ValueError or ArithmeticError for any other form.
    """
    if not isinstance(data, list):
        return data
    tag, *forms = data
    if tag == "ref":
        return resolve(*forms)
    parts = [decode(form, resolve) for form in forms]
    if tag == "named":
        return namedtuple(*parts[:2])(*parts[2:])
    if tag == "type":
        return _TYPES[parts[0]]
    if tag in _LISTED:
        return _LISTED[tag](parts)
    return getattr(import_module(_MODULES[tag]), tag)(*parts)


_TYPES = {one.__name__: one for one in vars(builtins).values() if isinstance(one, type)}
_LISTED: dict[str, Any] = {one.__name__: one for one in (list, tuple, dict, bytes, deque)}
_LISTED |= {"dict_keys": lambda ks: dict.fromkeys(ks).keys(), "dict_items": lambda xs: dict(xs).items()}
"""Types that are made of a list of their parts."""
_MODULES = {
    **dict.fromkeys(("set", "frozenset", "bytearray", "range", "complex"), "builtins"),
    **dict.fromkeys(("date", "datetime", "time", "timedelta", "timezone"), "datetime"),
    "Decimal": "decimal",
    "Fraction": "fractions",
}
"""Modules of types that are made of arguments, which `__reduce__` gives."""


# The candidate's side.


def serve(connection: Any) -> NoReturn:
    """Apply the runner's operations to the candidate's objects until the connection ends."""
    os.setsid()
    sys.set_int_max_str_digits(0)
    # No descriptor of the runner may stay open: its standard output carries the verdict.
    empty = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(empty, standard)
    os.close(empty)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        # If memory runs out, the kernel kills this process and not the runner.
        file.write("1000")
    sys.path.append(PACKAGES_DIR)
    objects: list[Any] = []
    operations = {**vars(operator), **vars(builtins), **globals()}

    def refer(value: Any) -> Any:
        objects.append(value)
        return ["ref", len(objects) - 1]

    while True:
        operation, *rest = _receive(connection)
        try:
            arguments, keywords = (decode(part, objects.__getitem__) for part in rest)
            reply = encode(("value", operations[operation](*arguments, **keywords)), refer)
        except BaseException as error:
            reply = encode(_describe_raised(error), refer)
        _send(connection, reply)


def load_program(source: str, names: Sequence[str], has_methods: bool) -> dict[str, Any]:
    """Run the candidate's module; return its objects of the tested names; `has_methods`: Solution's too.

    Examples of their use, and what reads input, are not run, also in a function that is called. A statement
    that raises is as if it were not there. A name that is missing is None.
    Raises: NameError if the first one is missing.
    """
    module = sys.modules["candidate"] = types.ModuleType("candidate")
    namespace = module.__dict__
    body = ast.parse(source).body
    future = [one for one in body if isinstance(one, ast.ImportFrom) and one.module == "__future__"]
    for statement in body:
        code = compile(ast.Module([*future, statement], []), "<candidate>", "exec")
        with suppress(BaseException):
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
    if names[0] not in objects:
        raise NameError(names[0])
    # A built-in of that name is not the program's.
    return dict.fromkeys(names) | objects


def _describe_raised(error: BaseException) -> tuple[str, str, Any]:
    """Return the name of a built-in class of exceptions, and arguments with which it reads as this one."""
    kind = next(one for one in type(error).__mro__ if one is vars(builtins).get(one.__name__))
    arguments: tuple[Any, ...] = ()
    with suppress(BaseException):
        arguments = error.args if str(kind(*error.args)) == str(error) else (str(error),)
    return "raised", kind.__name__, arguments


def call_for_effects(target: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> list[Any]:
    """Call a function for what it does to its arguments, and return them."""
    target(*arguments, **keywords)
    return [*arguments, *keywords.values()]


def defines(value: Any, name: str) -> bool:
    """Whether a value's class has a method, and the candidate wrote it."""
    return any(kind.__module__ == "candidate" and name in vars(kind) for kind in type(value).__mro__)


def run_program(source: str, stdin: str) -> tuple[int, str]:
    """Run a program in a fork of this process; return its exit code and its output."""
    files = [os.memfd_create(name) for name in ("input", "output")]
    os.write(files[0], stdin.encode("utf-8", "surrogatepass"))
    os.lseek(files[0], 0, os.SEEK_SET)
    pid = os.fork()
    if pid == 0:
        with suppress(BaseException):
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
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    exit_code = 1
    try:
        exec(compile(source, "<candidate>", "exec"), module.__dict__)
        exit_code = 0
    except SystemExit as end:
        exit_code = (end.code or 0) & 0xFF if isinstance(end.code, int | None) else 1
    except BaseException:
        pass
    # Programs with a deep recursion often answer from a thread, or at exit.
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(exit_code)


# The runner's side.


class Ended(BaseException):
    """Time is up, the candidate's process ended or broke the protocol, or the tests cannot be judged.

    The argument is the result of this test and of those behind it. No Exception: a test may catch those.
    """


class Session:
    """The candidate's process, and tests. After the test that ends or stops the process none passes."""

    def __init__(self) -> None:
        """Fork a process from this one, which must not know the job yet."""
        ours, theirs = socket.socketpair()
        if os.fork() == 0:
            with suppress(BaseException):
                ours.close()
                serve(theirs.makefile("rwb"))
            os._exit(1)
        theirs.close()
        self._socket, self._connection = ours, ours.makefile("rwb")
        self._until = math.inf
        """When the time of a test is up."""
        self._end: Ended | None = None
        """What decides from then on, whatever a test catches."""
        self.fault: str | None = None
        """Why the tests cannot be judged: there is no verdict then."""
        self._job: dict[str, Any] = {}
        module = sys.modules["__main__"] = types.ModuleType("__main__")
        self._names = module.__dict__
        """The namespace of the tests, with the candidate's objects."""

    def ask(self, operation: str, /, *arguments: Any, **keywords: Any) -> Any:
        """Have the candidate's process call a function of this module, `builtins` or `operator`.

        Raises: Ended; the exception that the candidate raised.
        """
        if self._end is not None:
            raise self._end
        error: Exception | None = None
        try:
            self._socket.settimeout(max(self._until - time.monotonic(), 0.001))
            forms = [encode(part, self._refer) for part in (arguments, keywords)]
            _send(self._connection, [operation, *forms])
            kind, *found = decode(_receive(self._connection), partial(Remote, self))
            if kind == "raised":
                raised = vars(builtins)[found[0]]
                # Others end a program.
                assert issubclass(raised, Exception)
                error = raised(*found[1])
        except Exception as cause:
            self._end = Ended(TIMED_OUT if isinstance(cause, TimeoutError) else ERRORED)
            raise self._end from cause
        if error is not None:
            raise error
        return found[0] if found else None

    def _refer(self, value: Any) -> Any:
        if not isinstance(value, Remote):
            self.refuse(f"they bring a {type(value).__name__}, which is no plain value")
        return ["ref", value._reference]

    def refuse(self, fault: str) -> NoReturn:
        """End the tests without a verdict."""
        self.fault = self.fault or fault
        self._end = Ended(ERRORED)
        raise self._end

    def judge(self, job: dict[str, Any]) -> Counter[str]:
        """Run all tests of a job, and count their results."""
        self._job = job
        # A test that does not compile is a fault of the data; it must not count as a wrong answer.
        compile(job["setup"], "<setup>", "exec")
        codes = [_compile(test, f"<test {index}>") for index, test in enumerate(job["tests"])]
        tests: Iterable[Test] = [partial(exec, code, self._names) for code in codes]
        if job["input_output"]:
            table = json.loads(job["input_output"], object_hook=_with_int_keys)
            tests = map(partial(partial, self._compare), table["inputs"], table["outputs"])
        return Counter(map(partial(self._run, time.monotonic() + job["wall_s"]), tests))

    def _run(self, until: float, test: Test) -> str:
        self._until = min(until, time.monotonic() + self._job["test_s"])
        error: BaseException | None = None
        try:
            if self._job["names"] and _IN_PLACE not in self._names:
                self._load(**self._job)
            test()
        except BaseException as raised:
            error = raised
        error = self._end or error
        if time.monotonic() > self._until:
            return TIMED_OUT
        if isinstance(error, Ended):
            return str(error.args[0])
        return PASSED if error is None else FAILED if isinstance(error, AssertionError) else ERRORED

    def _load(self, source: str, names: list[str], setup: str, input_output: str, **_: Any) -> None:
        """Load the candidate, and define its names for the tests. Raises: Ended; LookupError."""
        found = self.ask("load_program", source, names, bool(input_output))
        objects = {name: found[name] for name in names}
        self._names.update(objects, **{_IN_PLACE: _call_in_place})
        # It may use the candidate's names, and must not define them.
        exec(compile(setup, "<setup>", "exec"), self._names)
        self._names.update(objects)

    def _compare(self, given: Any, expected: Any) -> None:
        """Test a program with its standard input and output, or a function with arguments and a result."""
        if not self._job["names"]:
            exit_code, output = self.ask("run_program", self._job["source"], _as_text(given))
            if exit_code != 0:
                raise ChildProcessError
            assert is_same_output(output, _as_text(expected))
            return
        got = self._names[self._job["names"][0]](*given)
        # Some rows wrap the result in a list of one.
        is_wrapped = isinstance(expected, list) and len(expected) == 1
        assert is_same(got, expected) or (is_wrapped and is_same(got, expected[0]))


class Remote:  # noqa: PLW1641  (`__hash__` is set below)
    """Proxy of an object of the candidate, which equals no plain value, whatever its `__eq__` returns.

    There is no verdict where two of them are compared, or where its class has the operator that is used.
    """

    __slots__ = ("_reference", "_session")
    _session: Session
    _reference: int

    def __init__(self, session: Session, reference: int) -> None:
        object.__setattr__(self, "_session", session)
        object.__setattr__(self, "_reference", reference)

    def _ask(self, operation: str, /, *arguments: Any, **keywords: Any) -> Any:
        return self._session.ask(operation, self, *arguments, **keywords)

    def _refuse(self, *_: Any) -> NoReturn:
        self._session.refuse("they need the program's own class, which is no plain value")

    def _operate(self, name: str, *others: Any) -> Any:
        if any(isinstance(one, Remote) for one in others) or self._ask("defines", name):
            self._refuse()
        return NotImplemented

    def __eq__(self, other: object) -> bool:
        encode(other, self._session._refer)
        if isinstance(other, Remote) and other is not self:
            self._refuse()
        return other is self

    def __contains__(self, item: object) -> bool:
        try:
            return any(one is item or one == item for one in self)  # type: ignore[attr-defined]
        except TypeError:
            self._operate("__contains__")
            raise


for _name in str.split(
    "call getattr setattr delattr iter next reversed len getitem setitem delitem hash bool str repr format"
    " dir int float complex bytes index round abs neg pos invert"
):
    setattr(Remote, f"__{_name}__", partialmethod(Remote._ask, _name))
for _name in str.split("enter exit mro_entries instancecheck subclasscheck copy deepcopy floor ceil trunc"):
    setattr(Remote, f"__{_name}__", Remote._refuse)
for _name in str.split(
    "lt le gt ge add radd sub rsub mul rmul matmul rmatmul truediv rtruediv floordiv rfloordiv mod rmod pow"
    " rpow and rand or ror xor rxor lshift rlshift rshift rrshift divmod rdivmod"
):
    setattr(Remote, f"__{_name}__", partialmethod(Remote._operate, f"__{_name}__"))


def _as_text(value: Any) -> str:
    """Return a text, which is a list of its lines in some rows."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


# The candidate gets copies of arguments. A call whose result a test does not use is there for its effects:
# what it did to its arguments is taken over. Other calls could so change what they are compared with.


def _compile(test: str, name: str) -> CodeType:
    tree = ast.parse(test)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(call := node.value, ast.Call):
            call.args.insert(0, call.func)
            call.func = ast.Name(_IN_PLACE, ast.Load())
    code: CodeType = compile(ast.fix_missing_locations(tree), name, "exec", optimize=0)
    return code


def _call_in_place(target: Any, /, *arguments: Any, **keywords: Any) -> None:
    if not isinstance(target, Remote):
        target(*arguments, **keywords)
        return
    changed = target._ask("call_for_effects", *arguments, **keywords)
    for mine, after in zip([*arguments, *keywords.values()], changed, strict=True):
        if isinstance(mine, list | bytearray):
            mine[:] = after
        elif isinstance(mine, dict | set):
            mine.clear()
            mine.update(after)


def is_same(got: Any, expected: Any) -> bool:
    """Compare with a value of JSON: a tuple is a list, keys are texts; a float may differ by a millionth."""
    if isinstance(expected, list) and isinstance(got, list | tuple):
        return len(got) == len(expected) and all(map(is_same, got, expected))
    if isinstance(expected, dict) and isinstance(got, dict):
        got, expected = ({str(key): value for key, value in table.items()} for table in (got, expected))
        return got.keys() == expected.keys() and all(is_same(got[key], expected[key]) for key in got)
    if isinstance(expected, float) and isinstance(got, int | float):
        return math.isclose(got, expected, rel_tol=_REL_TOLERANCE, abs_tol=_ABS_TOLERANCE)
    return type(got) in (type(None), bool, int, float, str) and bool(got == expected)


def is_same_output(got: str, expected: str) -> bool:
    """Compare word by word, and numbers by their value; an expected 007 is a text. White space may differ."""
    ours, theirs = got.split(), expected.split()
    return len(ours) == len(theirs) and all(
        one == other or (not re.match("[+-]?0[0-9]", other) and is_same(_read_word(one), _read_word(other)))
        for one, other in zip(ours, theirs, strict=True)
    )


def _read_word(word: str) -> int | float | str:
    return int(word) if _INTEGER.fullmatch(word) else float(word) if _NUMBER.fullmatch(word) else word


def _with_int_keys(table: dict[str, Any]) -> dict[Any, Any]:
    """Convert the keys of a table of JSON back to integers if all of them are integers as texts."""
    is_int_keyed = all(re.fullmatch(r"-?\d+", key) for key in table)
    return {int(key): value for key, value in table.items()} if is_int_keyed else table
