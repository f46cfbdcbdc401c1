"""The judge inside the sandbox: reads one job on standard input, writes one verdict on standard output.

It is the parent of the candidate's process, runs the tests itself, and hides its memory, its descriptors
and the tests from the candidate. If this process is killed, the verdict is missing, which is never a pass.

A value that the candidate returns is rebuilt from plain types; an object without a plain form becomes a
`Remote`, which can be called, iterated, indexed, read and written, and which equals nothing but itself.
So no method of the candidate ever runs in this process.
Linux only. Runs in the sandbox, with the standard library only.
"""

from __future__ import annotations

import ast
import builtins
import ctypes
import importlib
import json
import math
import os
import re
import signal
import socket
import sys
import time
import types
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial, partialmethod
from itertools import zip_longest
from types import CodeType
from typing import Any

from strop.tasks.code.candidate import LOAD, RUN, Caught, decode, encode, receive, send, serve

PASSED, FAILED, ERRORED, TIMED_OUT = "passed", "failed", "errored", "timed_out"
_PR_SET_DUMPABLE = 4
_MAX_DIGITS = 100_000
"""Longer numbers of the candidate's would take minutes to read, uninterruptibly."""
_REL_TOLERANCE = 1e-6
_IN_PLACE = "_strop_in_place"
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_INTEGER = re.compile(r"[+-]?\d+", re.ASCII)
Test = Callable[[], object]
"""Raises AssertionError if the answer is wrong."""


def main() -> None:
    """Judge one job."""
    process = Process()
    # Close /proc/<pid>/fd and /proc/<pid>/mem of this process to other processes of this user.
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    # An interrupt from the candidate must end this process as a signal, not as an exception.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, _ring)
    sys.set_int_max_str_digits(_MAX_DIGITS)
    # What a test prints must not stand before a verdict.
    out, sys.stdout = sys.stdout, open(os.devnull, "w")  # noqa: SIM115  open as long as the process
    job = json.loads(sys.stdin.buffer.read())
    print(job["nonce"], "started", file=out, flush=True)
    try:
        found: dict[str, Any] = {"counts": Session(job, process).judge()}
    except JudgeFault as fault:
        found = {"fault": str(fault)}
    print(job["nonce"], json.dumps(found), file=out, flush=True)
    # The verdict is written; an orderly shutdown of the interpreter would take milliseconds.
    os._exit(0)


class Session:
    """One candidate under one time limit. After the test that ends or stops its process none passes."""

    def __init__(self, job: dict[str, Any], process: Process) -> None:
        self._job, self._process = job, process
        self._until = time.monotonic() + job["wall_s"]
        self._is_loaded = False
        module = sys.modules["__main__"] = types.ModuleType("__main__")
        self._names = module.__dict__
        """The namespace of the tests, with the candidate's objects."""

    def judge(self) -> Counter[str]:
        """Run all tests and count their results."""
        if not self._job["input_output"]:
            return Counter(map(self._run, self._statements()))
        table = json.loads(self._job["input_output"])
        check = partial(partial, self._call if self._job["names"] else self._run_program)
        return Counter(map(self._run, map(check, table["inputs"], table["outputs"])))

    def _run(self, test: Test) -> str:
        now = time.monotonic()
        until = min(self._until, now + self._job["test_s"])
        if now >= until:
            return TIMED_OUT
        with Caught() as caught:
            try:
                signal.setitimer(signal.ITIMER_REAL, until - now)
                if not self._is_loaded and self._job["names"]:
                    self._load()
                test()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0.0)
        # A test may have caught what it must not.
        error = self._process.end or caught.error
        if isinstance(error, JudgeFault):
            raise error
        if isinstance(error, TimeUp) or time.monotonic() > until:
            return TIMED_OUT
        return PASSED if error is None else FAILED if isinstance(error, AssertionError) else ERRORED

    def _load(self) -> None:
        """Load the candidate, and define its names for the tests. Raises: TimeUp; CandidateEnded."""
        job, self._is_loaded = self._job, True
        with Caught() as caught:
            found = self._process.ask("call", LOAD, job["source"], job["names"], bool(job["input_output"]))
            objects = {name: found[name] for name in job["names"] if name in found}
        if caught.error is not None or job["names"][0] not in objects:
            self._process.end = self._process.end or CandidateEnded()
            raise self._process.end
        self._names.update(dict.fromkeys(job["names"], _Absent()), **{_IN_PLACE: _call_in_place})
        self._names.update(objects)
        # It may use the candidate's names, and must not define them.
        exec(compile(job["setup"], "<setup>", "exec"), self._names)
        self._names.update(objects)

    def _run_program(self, stdin: Any, expected: Any) -> None:
        exit_code, output = self._process.ask("call", RUN, self._job["source"], _as_text(stdin))
        if exit_code != 0:
            raise ChildProcessError
        assert is_same_output(output, _as_text(expected))

    def _call(self, arguments: list[Any], expected: Any) -> None:
        function = self._names[self._job["names"][0]]
        assert is_same_value(function(*map(_with_int_keys, arguments)), expected)

    def _statements(self) -> Iterable[Test]:
        """Yield the tests, which share a namespace with the candidate's names; then what they collect."""
        job = self._job
        # A test that does not compile is a fault of the data; it must not count as a wrong answer.
        compile(job["setup"], "<setup>", "exec")
        tests = [_compile(test, f"<test {index}>") for index, test in enumerate(job["tests"])]
        if any("unittest" in test for test in job["tests"]):
            # The tests' own call of it would end this process; their classes are run below.
            vars(importlib.import_module("unittest"))["main"] = lambda *_, **__: None
        yield from (partial(exec, test, self._names) for test in tests)
        yield from _collect(self._names)


def _as_text(value: Any) -> str:
    """Return a text, which is a list of its lines in some rows."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


class _Absent:
    """Stands for a tested name that the candidate does not define; it hides a built-in of that name."""

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise NameError


def _collect(names: dict[str, Any]) -> Iterable[Callable[[], object]]:
    """Yield the test functions and classes of tests among some names, as pytest and unittest see them."""
    unittest: Any = sys.modules.get("unittest")
    for name, value in list(names.items()):
        if unittest is not None and isinstance(value, type) and issubclass(value, unittest.TestCase):
            suite = unittest.defaultTestLoader.loadTestsFromTestCase(value)
            if suite.countTestCases():
                yield partial(_run_suite, suite, unittest.TestResult())
        is_test = name.startswith("test") and isinstance(value, types.FunctionType)
        if is_test and value.__code__.co_argcount <= len(value.__defaults__ or ()):
            yield value


def _run_suite(suite: Any, result: Any) -> None:
    suite.run(result)
    if not result.wasSuccessful() or result.testsRun <= len(result.skipped):
        raise AssertionError


# The candidate gets copies of arguments. A call whose result a test does not use is there for its effects:
# what it did to its arguments is taken over. Other calls could so change what they are compared with.


class _InPlace(ast.NodeTransformer):
    def visit_Expr(self, node: ast.Expr) -> ast.Expr:
        call = node.value
        if isinstance(call, ast.Call):
            caller = ast.Name(_IN_PLACE, ast.Load())
            node.value = ast.Call(caller, [call.func, *call.args], call.keywords)
        return node


def _compile(test: str, name: str) -> CodeType:
    tree = ast.fix_missing_locations(_InPlace().visit(ast.parse(test)))
    code: CodeType = compile(tree, name, "exec", optimize=0)
    return code


def _call_in_place(target: Any, *arguments: Any, **keywords: Any) -> None:
    if isinstance(target, Remote):
        list(map(_update, arguments, target._ask("call_in_place", *arguments, **keywords)))
    else:
        target(*arguments, **keywords)


def _update(mine: Any, after: Any) -> Any:
    """Return a value as it is afterwards: the same container where it is of the same type."""
    if type(mine) is not type(after) or not isinstance(mine, list | dict | set | bytearray):
        return after
    if isinstance(mine, list):
        after = [*map(_update, mine, after), *after[len(mine) :]]
    elif isinstance(mine, dict):
        after = {key: _update(mine.get(key), value) for key, value in after.items()}
    mine.clear()
    add = mine.extend if isinstance(mine, list | bytearray) else mine.update
    add(after)
    return mine


def is_same_output(got: str, expected: str) -> bool:
    """Compare token by token. A decimal fraction may differ by one part in a million; white space may differ.

    A whole number must be the same number: 1000001 is not 1000000.
    """
    pairs = list(zip_longest(got.split(), expected.split(), fillvalue=""))
    return all(ours == theirs or _is_same_number(ours, theirs) for ours, theirs in pairs)


def _is_same_number(got: str, expected: str) -> bool:
    if not (_NUMBER.fullmatch(got) and _NUMBER.fullmatch(expected)):
        return False
    if _INTEGER.fullmatch(expected):
        # '3.0' is 3 and '03' is 3, but '3e0' is not; a float is too short to compare long integers.
        number = importlib.import_module("decimal").Decimal
        return "e" not in got.lower() and bool(number(got) == number(expected))
    return math.isclose(float(got), float(expected), rel_tol=_REL_TOLERANCE)


def is_same_value(got: Any, expected: Any) -> bool:
    """Compare a returned value with one from JSON, which may be wrapped in a list of one."""
    is_wrapped = isinstance(expected, list) and len(expected) == 1
    return _is_same_json(got, expected) or (is_wrapped and _is_same_json(got, expected[0]))


def _is_same_json(got: Any, expected: Any) -> bool:
    """Compare by JSON's rules: a tuple is a list, and the keys of a table are texts."""
    if isinstance(expected, list) and isinstance(got, list | tuple):
        return len(got) == len(expected) and all(map(_is_same_json, got, expected))
    if isinstance(expected, dict) and isinstance(got, dict):
        got = {str(key): value for key, value in got.items()}
        return got.keys() == expected.keys() and all(_is_same_json(got[key], expected[key]) for key in got)
    if isinstance(expected, float) and isinstance(got, int | float):
        return math.isclose(got, expected, rel_tol=_REL_TOLERANCE)
    return type(got) in (type(None), bool, int, float, str) and bool(got == expected)


def _with_int_keys(value: Any) -> Any:
    """Convert the keys of tables back to integers if all of them are integers as texts."""
    if isinstance(value, list):
        return [_with_int_keys(item) for item in value]
    if not isinstance(value, dict):
        return value
    is_int_keyed = bool(value) and all(re.fullmatch(r"-?\d+", key) for key in value)
    return {int(key) if is_int_keyed else key: _with_int_keys(item) for key, item in value.items()}


class TimeUp(BaseException):
    """Raised if a test's time is used up. Not an Exception, because a test may catch those."""


class CandidateEnded(BaseException):
    """Raised if the candidate's process ended, or broke the protocol; no error that a test may expect."""


class JudgeFault(BaseException):
    """Raised if the tests cannot be judged; there is no verdict then."""


def _ring(*_: object) -> None:
    raise TimeUp


class Process:
    """The candidate's process."""

    def __init__(self) -> None:
        """Fork a process from this one, which must not know the job yet."""
        ours, theirs = socket.socketpair()
        if os.fork() == 0:
            with Caught():
                ours.close()
                serve(theirs.makefile("rwb"))
            os._exit(1)
        theirs.close()
        self._connection = ours.makefile("rwb")
        self.end: BaseException | None = None
        """What a test must not catch, and what decides from then on."""

    def ask(self, operation: str, target: int, *arguments: Any, **keywords: Any) -> Any:
        """Apply an operation to an object of the candidate, and return the result.

        Raises: TimeUp; CandidateEnded; the exception that the candidate raised; JudgeFault if an argument
        has no plain form.
        """
        if self.end is not None:
            raise self.end
        try:
            forms = [encode(part, self._refer) for part in (arguments, keywords)]
            send(self._connection, [operation, target, *forms])
            kind, *found = decode(receive(self._connection), partial(Remote, self))
            error = _rebuild(*found) if kind == "raised" else None
        except Exception as cause:
            self.end = CandidateEnded()
            raise self.end from cause
        except BaseException as cause:
            self.end = cause
            raise
        if error is not None:
            raise error
        return found[0] if found else None

    def _refer(self, value: Any) -> Any:
        if isinstance(value, Remote):
            return ["ref", value._reference]
        if isinstance(value, _Absent):
            raise NameError
        raise JudgeFault(f"they pass the program a {type(value).__name__}, which is no plain value")


class Remote:
    """Proxy of an object of the candidate; equal only to itself, whatever the object's `__eq__` returns."""

    __slots__ = ("_process", "_reference")
    _process: Process
    _reference: int

    def __init__(self, process: Process, reference: int) -> None:
        object.__setattr__(self, "_process", process)
        object.__setattr__(self, "_reference", reference)

    def _ask(self, operation: str, *arguments: Any, **keywords: Any) -> Any:
        return self._process.ask(operation, self._reference, *arguments, **keywords)

    def __contains__(self, value: Any) -> bool:
        # Not by the object's own method, which may agree to everything.
        return any(item is value or item == value for item in self._ask("iter"))


for _name in str.split("call getattr setattr iter next len getitem setitem bool str repr"):
    setattr(Remote, f"__{_name}__", partialmethod(Remote._ask, _name))


def _rebuild(name: str, arguments: tuple[Any, ...]) -> BaseException:
    """Return an exception of a built-in class; those that end a program end the candidate."""
    kind = vars(builtins)[name]
    return kind(*arguments) if issubclass(kind, Exception) else CandidateEnded()
