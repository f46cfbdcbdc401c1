"""Tests that rows bring for programs: what they are, what they use, and which of them cannot be judged.

Tests run in another process than the program, and only plain values pass between the two. So tests can call
the program's functions and classes and look at plain values. What would fail a right program there, or let a
wrong one decide the test by itself, is refused when the rows are read. The rest the judge refuses, where it
meets a value that cannot pass.
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import importlib
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from typing_extensions import override

from strop.rollout import Example, FailureOwner, Outcome
from strop.spec.sandboxing import SandboxSettings
from strop.tasks.answers import show_answer
from strop.tasks.code.extraction import (
    MAX_VERIFY_S,
    Definition,
    Import,
    has,
    judge_reply,
    parse,
    scope_of,
    statements_of,
    used_names,
)
from strop.tasks.code.judge import JudgeJob
from strop.tasks.failures import catch_failure
from strop.tasks.user.rewards import Reward, Values

_STAR_MODULES = str.split("math typing collections itertools functools string heapq bisect random")
_OUTSIDE = frozenset(
    str.split(
        "asyncio concurrent contextlib ctypes doctest gc importlib inspect multiprocessing pdb signal"
        " subprocess threading traceback unittest"
        " sys.stdin sys.stdout sys.stderr sys.exit sys.modules sys.path_hooks sys.settrace"
        " __import__ compile eval exec exit globals input locals quit vars"
        " BaseException GeneratorExit KeyboardInterrupt SystemExit"
        " dataclasses.asdict dataclasses.astuple dataclasses.fields dataclasses.replace"
    )
)
"""Modules and names that concern the process of the tests, and exceptions that the judge does not pass on."""
_FAILING = ast.Assert | ast.Raise


class PythonTests(Reward):
    """The tests of a row, run over the reply's program; `tests_passed_frac` is the share that it passed.

    A program that is tested by a table may import numpy; it has no score if the sandbox cannot mount it.
    """

    limit_s = MAX_VERIFY_S
    allowed = "Python such as assert double(2) == 4, a list of it, or inputs and outputs; see docs/tasks.md"

    def __init__(self, name: str, spec: SandboxSettings, *, is_published: bool) -> None:
        """`is_published`: the answers are tests that `problems` has read."""
        self.name, self.identity = name, f"{name}-3"
        self._spec, self.is_published = spec, is_published

    def read(self, answer: Any) -> JudgeJob:
        """Return the tests that an answer is. Raises: ValueError as `read_tests`."""
        if not self.is_published:
            return read_tests(answer)
        job = json.loads(answer) if isinstance(answer, str) else answer
        return JudgeJob(**job, num_tests=len(job["tests"]))

    @override
    def read_answer(self, value: Any) -> str:
        self.read(value)
        return show_answer(value)

    @override
    async def score(self, example: Example, values: Values, replies: Sequence[str]) -> list[Outcome]:
        tests = self.read(example.answer if self.is_published else values["answer"])
        return await asyncio.gather(*(self._judge(reply, tests) for reply in replies))

    async def _judge(self, reply: str, tests: JudgeJob) -> Outcome:
        with catch_failure(FailureOwner.TASK) as caught:
            judged = await judge_reply(reply, tests, self._spec)
            return replace(judged, parts={self.name: judged.parts["correct"]})
        return Outcome(parts={}, failure=caught.failure)


def read_tests(answer: Any) -> JudgeJob:
    """Return the tests of a row as a job without a program.

    `answer` is a text, or a list of texts that run one after the other in one namespace; or APPS's table of
    `inputs` and `outputs` (perhaps as JSON), with a `fn_name` if a function is called.
    Raises: ValueError naming what cannot be judged.
    """
    if isinstance(answer, dict) or (isinstance(answer, str) and answer.lstrip().startswith("{")):
        if not (table := read_table(answer)).num_tests:
            raise ValueError("a table without tests")
        return table
    texts = answer if isinstance(answer, list) else [answer]
    for text in texts:
        if not (isinstance(text, str) and parse(text)):
            raise ValueError(f"the test {text!r:.60} is no Python")
    whole = "\n".join(texts)
    tree, scope = ast.parse(whole), scope_of(whole)
    known = {*dir(builtins), *scope.binds}
    for module in _STAR_MODULES:
        known.update(dir(importlib.import_module(module)) if f"from {module} import *" in whole else ())
    # What they read and do not define is the program's.
    names = tuple(name for name in used_names(whole) if name in scope.reads - known)
    if not names:
        raise ValueError(f"{len(texts)} tests, and none uses a name that a reply could define")
    for fault in _find_faults(tree):
        raise ValueError(f"the tests cannot be judged: {fault}")
    calls = [f"{one.name}()" for one in tree.body if isinstance(one, Definition) and _is_test(one)]
    tests = [*texts, *dict.fromkeys(calls)]
    return JudgeJob(source=statements_of(whole, Import), names=names, tests=tests, num_tests=len(tests))


def read_table(answer: Any) -> JudgeJob:
    """Return the tests of a table of APPS, perhaps as JSON. Raises: ValueError if it is no such table."""
    text = answer if isinstance(answer, str) else json.dumps(answer)
    # Some tests have numbers with more digits than Python parses by default; the judge parses them.
    table = json.loads(text, parse_int=len)
    get: Any = table.get if isinstance(table, dict) else (lambda _: None)
    inputs, outputs, name = get("inputs"), get("outputs"), get("fn_name")
    if not (isinstance(inputs, list) and isinstance(outputs, list) and len(inputs) == len(outputs)):
        raise ValueError("a table without lists `inputs` and `outputs` of one length")
    is_called = isinstance(name, str) and all(isinstance(arguments, list) for arguments in inputs)
    if name and not (is_called and name.isidentifier()):
        raise ValueError("`fn_name` that is no name, or `inputs` of a function that are no lists")
    names = (name,) if name else ()
    return JudgeJob(names=names, input_output=text, num_tests=len(outputs))


def _find_faults(tree: ast.Module) -> Iterator[str]:
    """Yield what in some tests cannot be judged across a process boundary, or judges nothing."""
    nodes = list(ast.walk(tree))
    used = [node for node in nodes if isinstance(node, ast.Name)]
    bound = {node.arg for node in nodes if isinstance(node, ast.arg)}
    bound |= {node.id for node in used if isinstance(node.ctx, ast.Store)}
    for node in nodes:
        for fault in _look_at(node, bound):
            yield f"{fault} ({ast.unparse(node).splitlines()[0][:80]})"
    loaded = {node.id for node in used if isinstance(node.ctx, ast.Load)}
    idle = [one for one in tree.body if isinstance(one, Definition) and one.name not in loaded]
    for one in idle:
        if not _is_test(one) and (one.name.startswith(("setup_", "teardown_")) or has(one, _FAILING)):
            yield f"nothing runs {one.name}"
    if not has(tree, _FAILING):
        yield "they assert nothing"


def _look_at(node: ast.AST, bound: set[str]) -> Iterator[str]:
    """Yield what is not there in the process of the tests, or lets a failed test pass."""
    match node:
        case ast.Import(names=found) | ast.ImportFrom(names=found):
            module = getattr(node, "module", "") or ""
            places = {f"{module}.{one.name}".strip(".") for one in found}
            roots = {place.partition(".")[0] for place in places}
            is_there = roots <= sys.stdlib_module_names and not getattr(node, "level", 0)
            is_known = found[0].name != "*" or module in _STAR_MODULES
            if not (is_there and is_known) or (places | roots) & _OUTSIDE:
                yield f"they import what is not there or not theirs, or * not of {', '.join(_STAR_MODULES)}"
        case ast.Name() | ast.Attribute():
            text = ast.unparse(node)
            if text in _OUTSIDE - bound or re.search(r"\.__(?!init__$)\w*$", text):
                yield "they use what concerns the process of the tests"
        case ast.Assert(test=ast.Tuple(elts=[_, *_])):
            yield "an assertion of a tuple always holds"
        case ast.ExceptHandler(type=ast.expr() as kind):
            if not _names_in(kind) <= vars(builtins).keys():
                yield "they expect an exception that is no built-in one"
        case ast.Try(body=body, handlers=handlers):
            quiet = [one.type for one in handlers if not has(one, _FAILING)]
            caught = {name for kind in quiet for name in _names_in(kind)}
            if caught & {"Exception", "AssertionError", ""} and any(has(one, _FAILING) for one in body):
                yield "a failing assertion is caught"
        case ast.Compare(left=left, ops=[ast.Is() | ast.IsNot()], comparators=[right]):
            sides = (left, right)
            if not any(isinstance(one, ast.Constant) or ast.unparse(one) in dir(builtins) for one in sides):
                yield "they ask whether a value is the same one, and values are copied"


def _names_in(kind: ast.expr | None) -> set[str]:
    """Return the names of classes of exceptions; '' if anything is caught."""
    return {ast.unparse(one) for one in getattr(kind, "elts", [kind])} if kind else {""}


def _is_test(node: Definition) -> bool:
    """Whether the judge calls a definition: a function of that name whose parameters have values."""
    if not isinstance(node, ast.FunctionDef) or has(node, ast.Yield | ast.YieldFrom):
        return False
    needed = [*node.args.posonlyargs, *node.args.args][len(node.args.defaults) :]
    return node.name.startswith("test") and not needed
