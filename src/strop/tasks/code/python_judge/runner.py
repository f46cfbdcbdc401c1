"""The judge inside the sandbox: reads one job on standard input, writes one verdict on standard output.

It is the parent of all processes of the candidate, runs the tests itself, and hides its memory, its
descriptors and the tests from the candidate. If this process is killed, the verdict is missing, which is
never a pass. Linux only.
Runs in the sandbox, with the standard library only.
"""

from __future__ import annotations

import ast
import ctypes
import importlib
import json
import math
import os
import re
import signal
import sys
import time
import types
from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any

from strop.tasks.code.python_judge.candidate import start_fork_server
from strop.tasks.code.python_judge.channel import Caught, describe
from strop.tasks.code.python_judge.remote import (
    FROM_CANDIDATE,
    Alarm,
    CandidateEnded,
    JudgeFault,
    Remote,
    Session,
    TimeUp,
)

STARTED = "started"
_PR_SET_DUMPABLE = 4
_libc = ctypes.CDLL(None)


def main() -> None:
    """Judge one job."""
    # Close /proc/<pid>/fd and /proc/<pid>/mem of this process to other processes of this user.
    set_process_option(_PR_SET_DUMPABLE, 0)
    # An interrupt from the candidate must end this process as a signal, not as an exception.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.set_int_max_str_digits(0)
    fork_server = start_fork_server(set_process_option)
    # What a test prints must not stand between a verdict and the beginning of its line.
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  open as long as the process
    job = json.loads(sys.stdin.buffer.read())
    _write(f"{STARTED} {job['nonce']}\n")
    _write(json.dumps({"nonce": job["nonce"], **judge(fork_server, job)}) + "\n")
    # The verdict is written; an orderly shutdown of the interpreter would take milliseconds.
    os._exit(0)


def set_process_option(option: int, value: int) -> None:
    """Call prctl(2) for this process."""
    _libc.prctl(option, value, 0, 0, 0)


def judge(fork_server: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Run all tests of a job and count their results."""
    session = Session(fork_server, job)
    run_tests = {"statements": run_statements, "calls": run_calls, "programs": run_programs}[job["mode"]]
    results = run_tests(session, job)
    session.drop()
    if session.is_orphaned:
        results = [(ERRORED, "the program ended what its processes come from") for _ in results]
    counts: dict[str, int] = {}
    for status, _ in results:
        counts[status] = counts.get(status, 0) + 1
    cause = next((why for status, why in results if status != PASSED), "")
    return {"counts": counts, "total": len(results), "cause": cause}


def _write(text: str) -> None:
    data = text.encode()
    while data:
        data = data[os.write(1, data) :]


# Every test runs, within one time limit for all, so their order does not matter. After a test that kills or
# hangs the candidate, the next one gets a fresh process.

RunTest = Callable[[Session, Any, float], None]
"""Runs one test up to a deadline; raises AssertionError if the answer is wrong."""
PASSED, FAILED, ERRORED, TIMED_OUT = "passed", "failed", "errored", "timed_out"
_REL_TOLERANCE = 1e-6
_SPARE_S = 0.2
"""A test that is over so long after its end has caught the alarm."""
_SPARE_OUTPUT_BYTES = 1 << 16
_OUTPUT_FACTOR = 4
_MAX_ERROR_BYTES = 400
_NUMBER = re.compile(rb"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
_INTEGER = re.compile(rb"[+-]?\d+")


class WrongAnswer(AssertionError):
    """Raised if an answer is wrong; its text does not reveal the expected one."""


def run_statements(session: Session, job: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Run tests in one namespace, which binds the candidate's names to its values; then what they collect."""
    # A test that does not compile is a fault of the data; it must not count as a wrong answer.
    definitions = compile(job["definitions"], "<definitions>", "exec")
    setup = compile(job["setup"], "<setup>", "exec")
    tests = [_compile(test, f"<test {index}>") for index, test in enumerate(job["tests"])]
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    loaded: list[Any] = [None]

    def run(session: Session, test: CodeType | str, until: float) -> None:
        session.load(until)
        names = module.__dict__
        if loaded[0] is not session.objects:
            loaded[0] = session.objects
            _define(definitions, names)
            names.update({name: _Absent(name) for name in job["names"]})
            names.update(session.objects, **{_IN_PLACE: _call_in_place})
            exec(setup, names)
        if isinstance(test, CodeType):
            exec(test, names)
        else:
            _run_collected(names[test])

    if any("unittest" in test for test in job["tests"]):
        # The tests' own call of it would end this process; their classes are run below.
        vars(importlib.import_module("unittest"))["main"] = lambda *_, **__: None
    results = _run_all(session, tests, run, job["limits"])
    collected = [name for name, value in module.__dict__.items() if _is_collected(name, value)]
    return results + _run_all(session, collected, run, job["limits"])


def _is_collected(name: str, value: Any) -> bool:
    """Whether a value of the tests is a test function or a class of tests, as pytest and unittest see it."""
    if isinstance(value, type):
        unittest: Any = sys.modules.get("unittest")
        is_case = unittest is not None and issubclass(value, unittest.TestCase)
        return is_case and bool(unittest.defaultTestLoader.getTestCaseNames(value))
    is_function = isinstance(value, types.FunctionType) and name.startswith("test")
    return is_function and value.__code__.co_argcount <= len(value.__defaults__ or ())


def _run_collected(test: Any) -> None:
    if not isinstance(test, type):
        test()
        return
    unittest = sys.modules["unittest"]
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(test).run(result)
    if not result.wasSuccessful() or result.testsRun <= len(result.skipped):
        raise AssertionError


# The candidate gets copies of arguments. A call whose result a test does not use is there for its effects:
# what it did to its arguments is taken over. Other calls could so change what they are compared with.

_IN_PLACE = "_strop_in_place"


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
    if not isinstance(target, Remote):
        target(*arguments, **keywords)
        return
    after = target._link.operate("call in place", target._reference, *arguments, **keywords)
    if isinstance(after, tuple):
        list(map(_update, arguments, after))


def _update(mine: Any, after: Any) -> Any:
    """Return a value as it is afterwards: the same container where it is of the same type."""
    if type(mine) is not type(after) or not isinstance(mine, list | dict | set | bytearray):
        return after
    if isinstance(mine, list):
        mine[:] = [*map(_update, mine, after), *after[len(mine) :]]
        return mine
    changed = (
        {key: _update(mine.get(key), value) for key, value in after.items()} if type(mine) is dict else after
    )
    mine.clear()
    add = mine.extend if isinstance(mine, bytearray) else mine.update
    add(changed)
    return mine


def _define(definitions: CodeType, names: dict[str, Any]) -> None:
    """Run the data set's own code. Raises: JudgeFault if it fails, which is not the candidate's fault."""
    with Caught() as caught:
        exec(definitions, names)
    if isinstance(caught.error, TimeUp):
        raise caught.error
    if caught.error is not None:
        raise JudgeFault(f"the definitions of the tests: {describe(caught.error)}")


class _Absent:
    """Stands for a tested name that the candidate does not define; it hides a built-in of that name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise NameError(f"{self._name} is not defined")


def run_calls(session: Session, job: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Call one function with the arguments of each test and compare the result."""
    (name,) = job["names"]

    def run(session: Session, test: tuple[Any, Any], until: float) -> None:
        session.load(until)
        arguments, expected = test
        if not is_same_value(session.objects[name](*arguments), expected):
            raise WrongAnswer("another value than the expected one")

    data = json.loads(job["input_output"])
    inputs = [[_with_int_keys(argument) for argument in arguments] for arguments in data["inputs"]]
    tests = list(zip(inputs, data["outputs"], strict=True))
    return _run_all(session, tests, run, job["limits"])


def run_programs(session: Session, job: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Run the candidate as a program with the input of each test and compare the output."""
    data = json.loads(job["input_output"])
    pairs = zip(data["inputs"], data["outputs"], strict=True)
    texts = [(_as_text(stdin), _as_text(expected)) for stdin, expected in pairs]
    return _run_all(session, texts, _run_program, job["limits"])


def _as_text(value: Any) -> bytes:
    """Return the bytes of a text, which is a list of its lines in some rows."""
    if isinstance(value, list):
        value = "\n".join(str(line) for line in value)
    return str(value).encode("utf-8", "surrogatepass")


def _run_program(session: Session, test: tuple[bytes, bytes], until: float) -> None:
    stdin, expected = test
    files: list[int] = []
    try:
        _open_files(files, stdin)
        status = session.load(until).ask({"op": "run"}, files)
        if type(status) is not int:
            raise CandidateEnded("a status that is no number")
        output, num_bytes = _read_back(files[1], _OUTPUT_FACTOR * len(expected) + _SPARE_OUTPUT_BYTES)
        errors, _ = _read_back(files[2], _MAX_ERROR_BYTES)
    finally:
        for descriptor in files:
            os.close(descriptor)
    if status:
        code = os.waitstatus_to_exitcode(status)
        raise ProgramFailed(f"exit code {code}; {errors.decode(errors='replace')}")
    if num_bytes > len(output):
        raise WrongAnswer("more output than a right answer has")
    if not is_same_output(output, expected):
        raise WrongAnswer("another output than the expected one")


class ProgramFailed(Exception):
    """Raised if a program did not exit with 0."""


def _open_files(files: list[int], stdin: bytes) -> None:
    """Open the standard files of a program, in memory. The caller closes them. Raises: JudgeFault."""
    try:
        for name in ("input", "output", "errors"):
            files.append(os.memfd_create(name))  # noqa: PERF401  if one fails, the others must be closed
        with open(files[0], "wb", closefd=False) as file:
            file.write(stdin)
        os.lseek(files[0], 0, os.SEEK_SET)
    except OSError as error:
        raise JudgeFault(f"no files for a program ({error})") from error


def _read_back(descriptor: int, max_bytes: int) -> tuple[bytes, int]:
    """Return the first bytes of a file, and its size."""
    size = os.fstat(descriptor).st_size
    return os.pread(descriptor, min(size, max_bytes), 0), size


def _run_all(
    session: Session, tests: Sequence[Any], run: RunTest, limits: Mapping[str, Any]
) -> list[tuple[str, str]]:
    """Return the status of each test, and its cause."""
    return [_run_one(session, test, run, float(limits["test_s"])) for test in tests]


def _run_one(session: Session, test: Any, run: RunTest, test_s: float) -> tuple[str, str]:
    now = time.monotonic()
    if now >= session.until:
        return TIMED_OUT, "the time for all tests was used up"
    until = min(session.until, now + test_s)
    with Caught() as caught, Alarm(until):
        run(session, test, until)
    # A test may have caught what it must not.
    error = session.end or caught.error or (TimeUp() if time.monotonic() > until + _SPARE_S else None)
    if error is None:
        return PASSED, ""
    if isinstance(error, JudgeFault):
        raise error
    if isinstance(error, TimeUp | CandidateEnded):
        session.drop()
    if isinstance(error, TimeUp):
        return TIMED_OUT, f"no answer within {until - now:.1f} s"
    if isinstance(error, WrongAnswer):
        return FAILED, str(error)
    if isinstance(error, AssertionError) and FROM_CANDIDATE not in getattr(error, "__notes__", ()):
        # The text of an assertion may contain the answer, which no verdict may reveal.
        return FAILED, "the assertion does not hold"
    return ERRORED, describe(error)


def is_same_output(got: bytes, expected: bytes) -> bool:
    """Compare token by token. A decimal fraction may differ by one part in a million; white space may differ.

    A whole number must be the same number: 1000001 is not 1000000.
    """
    got_tokens, expected_tokens = got.split(), expected.split()
    return len(got_tokens) == len(expected_tokens) and all(
        ours == theirs or _is_same_number(ours, theirs)
        for ours, theirs in zip(got_tokens, expected_tokens, strict=True)
    )


def _is_same_number(got: bytes, expected: bytes) -> bool:
    if not (_NUMBER.fullmatch(got) and _NUMBER.fullmatch(expected)):
        return False
    if _INTEGER.fullmatch(expected):
        # '3.0' is 3 and '03' is 3, but '3e0' is not; a float is too short to compare long integers.
        number = importlib.import_module("decimal").Decimal
        return b"e" not in got.lower() and bool(number(got.decode()) == number(expected.decode()))
    return math.isclose(float(got), float(expected), rel_tol=_REL_TOLERANCE)


def is_same_value(got: Any, expected: Any) -> bool:
    """Compare a returned value with one from JSON, which may be wrapped in a list of one."""
    if _is_same_json(got, expected):
        return True
    return isinstance(expected, list) and len(expected) == 1 and _is_same_json(got, expected[0])


def _is_same_json(got: Any, expected: Any) -> bool:
    """Compare by JSON's rules: a tuple is a list, and the keys of a table are texts."""
    if isinstance(expected, list):
        return (
            isinstance(got, list | tuple)
            and len(got) == len(expected)
            and all(_is_same_json(ours, theirs) for ours, theirs in zip(got, expected, strict=True))
        )
    if isinstance(expected, dict):
        if not isinstance(got, dict):
            return False
        by_text = {str(key): value for key, value in got.items()}
        return by_text.keys() == expected.keys() and all(
            _is_same_json(by_text[key], value) for key, value in expected.items()
        )
    if isinstance(expected, float) and isinstance(got, int | float):
        return got == expected or math.isclose(got, expected, rel_tol=_REL_TOLERANCE)
    return type(got) in (type(None), bool, int, float, str) and bool(got == expected)


def _with_int_keys(value: Any) -> Any:
    """Convert the keys of tables back to integers if all of them are integers as texts."""
    if isinstance(value, list):
        return [_with_int_keys(item) for item in value]
    if not isinstance(value, dict):
        return value
    is_int_keyed = bool(value) and all(re.fullmatch(r"-?\d+", key) for key in value)
    return {int(key) if is_int_keyed else key: _with_int_keys(item) for key, item in value.items()}
