"""Tests that rows bring for programs: what they are, what they use, and which of them cannot be judged.

Tests run in another process than the program, and only plain values pass between the two. So tests can call
the program's functions and classes and look at plain values. What they cannot do there is refused when the
rows are read: a right program would fail, or a wrong one could decide the test by itself.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import sys
from collections.abc import Iterator
from typing import Any

from strop.tasks.code.extraction import compiles, import_lines, read_statements
from strop.tasks.code.python_judge import JudgeJob

_STAR_MODULES = str.split("math typing collections itertools functools string heapq bisect random")
_OUTSIDE = frozenset(
    str.split(
        "asyncio concurrent contextlib ctypes doctest gc importlib inspect multiprocessing pdb signal"
        " subprocess threading traceback unittest.mock"
    )
)
"""Modules of the standard library whose use in a test concerns the process of the tests."""
_SYS = frozenset({"stdin", "stdout", "stderr", "exit", "modules", "path_hooks", "settrace"})
# The judge does not pass on the exceptions among these.
_NAMES = frozenset(
    str.split(
        "__import__ compile eval exec exit globals input locals quit vars"
        " BaseException GeneratorExit KeyboardInterrupt SystemExit"
    )
)
_PYTEST_HOOKS = ("setup_", "teardown_")
_FREE_ASSERTS = ("assertTrue", "assertFalse", "assertIsNone", "assertIsNotNone", "assertRaises")
_VALUES = ("int", "float", "str", "bool", "bytes", "bytearray", "complex", "list", "tuple", "dict", "set")
_OPERATOR = "an operator of the program's own class decides; compare its plain values"
_SWALLOWERS = ("Exception", "AssertionError")
_ASSIGNMENTS = (ast.Assign, ast.AnnAssign, ast.NamedExpr)


def read_tests(answer: Any) -> JudgeJob:
    """Return the tests of a row as a job without a program.

    `answer` is a text, or a list of texts that run one after the other in one namespace; or APPS's table of
    `inputs` and `outputs` (perhaps as JSON), with a `fn_name` if a function is called.
    Raises: ValueError naming what cannot be judged.
    """
    if isinstance(answer, str) and answer.lstrip().startswith("{"):
        answer = json.loads(answer)
    if isinstance(answer, dict):
        if not (table := read_table(answer)).num_tests:
            raise ValueError("a table without tests")
        return table
    texts = answer if isinstance(answer, list) else [answer]
    for text in texts:
        if not (isinstance(text, str) and compiles(text)):
            raise ValueError(f"the test {text!r:.60} is no Python")
    whole = "\n".join(texts)
    tree = ast.parse(whole)
    names = _find_names(tree)
    if not names:
        raise ValueError(f"{len(texts)} tests, and none uses a name that a reply could define")
    for fault in _Faults(tree, names).find():
        raise ValueError(f"the tests cannot be judged: {fault}")
    tests, imports = tuple(texts), import_lines(whole)
    return JudgeJob(source="", names=names, imports=imports, tests=tests, num_tests=len(tests))


def read_table(table: Any) -> JudgeJob:
    """Return the tests of a table of APPS. Raises: ValueError if it is no such table."""
    get: Any = table.get if isinstance(table, dict) else (lambda _: None)
    inputs, outputs, name = get("inputs"), get("outputs"), get("fn_name")
    is_sound = isinstance(inputs, list) and isinstance(outputs, list) and isinstance(name, str | None)
    if not is_sound or len(inputs) != len(outputs):
        raise ValueError("a table without lists `inputs` and `outputs` of one length")
    if name and not all(isinstance(arguments, list) for arguments in inputs):
        raise ValueError("`inputs` of a function that are no lists of arguments")
    names = (name,) if name else ()
    return JudgeJob(source="", names=names, input_output=json.dumps(table), num_tests=len(outputs))


def _find_names(tree: ast.Module) -> tuple[str, ...]:
    """Return the names that tests read and do not define, outermost first: the program's."""
    own, read = set(dir(builtins)), set[str]()
    for statement in read_statements(tree):
        own |= statement.binds | (statement.changes - statement.reads)
        read |= statement.reads
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*" and node.module in _STAR_MODULES:
            module = importlib.import_module(node.module)
            own.update(getattr(module, "__all__", vars(module)))
    ordered = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
    return tuple(dict.fromkeys(name for name in ordered if name in read - own))


class _Faults:
    """What in some tests cannot be judged across a process boundary, or judges nothing."""

    def __init__(self, tree: ast.Module, names: tuple[str, ...]) -> None:
        self._tree, self._names = tree, names
        nodes = list(ast.walk(tree))
        defined = {node.name for node in nodes if isinstance(node, ast.ClassDef)}
        self._own = defined | {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
        self._classes = {name for name in names if name[0].isupper() and not name.isupper()}
        self._of_program = self._find_made(self._classes)
        self._of_tests = self._find_made(defined)
        self._bound = {node.arg for node in nodes if isinstance(node, ast.arg)}
        self._bound |= {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}

    def _find_made(self, classes: set[str]) -> set[str]:
        """Return the expressions that make or hold an instance of one of these classes."""
        made: set[str] = set()
        for node in ast.walk(self._tree):
            value = getattr(node, "value", None) if isinstance(node, _ASSIGNMENTS) else node
            if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in classes:
                targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", node)]
                made |= set(map(ast.unparse, targets))
        return made

    def find(self) -> Iterator[str]:
        """Yield the faults, each in words."""
        for node in ast.walk(self._tree):
            for fault in self._look(node):
                yield f"{fault} ({ast.unparse(node).splitlines()[0][:80]})"
        yield from self._find_unused()
        if not any(_is_assertion(node) or isinstance(node, ast.Raise) for node in ast.walk(self._tree)):
            yield "they assert nothing"

    def _look(self, node: ast.AST) -> Iterator[str]:
        match node:
            case ast.Import(names=names):
                yield from _module_faults(*(alias.name for alias in names))
            case ast.ImportFrom(module=module, names=names):
                root = "." if node.level or module is None else module
                yield from _module_faults(root, *(f"{root}.{alias.name}" for alias in names))
                if names[0].name == "*" and root not in _STAR_MODULES:
                    yield "they import * from another module than " + ", ".join(_STAR_MODULES)
            case ast.Name(id=name) if name in _NAMES - self._bound:
                yield f"they use {name}"
            case ast.Attribute(value=ast.Name(id="sys"), attr=attr) if attr in _SYS:
                yield f"they use sys.{attr}"
            case ast.Attribute(value=value, attr=attr) if attr.startswith("__") and self._is_program(value):
                yield f"they read {attr} of what the program defines"
            case ast.Await() | ast.AsyncFunctionDef() | ast.AsyncWith() | ast.AsyncFor():
                yield "they are asynchronous"
            case ast.Assert(test=ast.Tuple(elts=[_, *_])):
                yield "an assertion of a tuple always holds"
            case ast.Try() if _swallows(node):
                yield "a failing assertion is caught"
            case ast.ExceptHandler(type=ast.expr() as kind) if not _are_built_in(kind):
                yield "they catch an exception that is no built-in one"
            case ast.With(items=items) if any(self._is_program(item.context_expr) for item in items):
                yield "they enter a context of the program"
            case ast.ClassDef() | ast.FunctionDef() if node.name.startswith(_PYTEST_HOOKS):
                yield "they need pytest, which is not there"
            case ast.ClassDef() | ast.FunctionDef() if any(
                map(self._names_program, [*getattr(node, "bases", ()), *node.decorator_list])
            ):
                yield "they derive from what the program defines, or decorate with it"
            case ast.Compare() | ast.BinOp() | ast.UnaryOp() | ast.AugAssign() if self._decides(node):
                yield _OPERATOR
            case ast.Call():
                yield from self._look_at_call(node)

    def _is_program(self, node: ast.expr) -> bool:
        """Whether a value is the program's function, what it returns, or an instance of its class."""
        value = node.func if isinstance(node, ast.Call) else node
        is_named = isinstance(value, ast.Name) and value.id in self._names
        return is_named or ast.unparse(node) in self._of_program

    def _is_instance(self, node: ast.AST) -> bool:
        inner = node.elts if isinstance(node, ast.List | ast.Tuple | ast.Set) else []
        is_class = isinstance(node, ast.Name) and node.id in self._classes
        return is_class or ast.unparse(node) in self._of_program or any(map(self._is_instance, inner))

    def _decides(self, node: ast.Compare | ast.BinOp | ast.UnaryOp | ast.AugAssign) -> bool:
        """Whether an operator is the program's: one of its operands is an instance of the program's class."""
        operands = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
        literals = [operand.value for operand in operands if isinstance(operand, ast.Constant)]
        if None in literals or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)):
            return False
        members = [o.value for o in operands if isinstance(o, ast.Attribute) and not literals]
        return any(map(self._is_instance, operands)) or any(
            isinstance(value, ast.Name) and value.id in self._classes for value in members
        )

    def _look_at_call(self, node: ast.Call) -> Iterator[str]:
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        called = getattr(node.func, "id", getattr(node.func, "attr", ""))
        if called in ("isinstance", "issubclass") and any(map(self._names_program, arguments[1:])):
            yield "they ask for the program's own class"
        if called.startswith("assertRaises"):
            if not (node.args and _are_built_in(node.args[0])):
                yield "they expect an exception that is no built-in one"
            arguments = arguments[2:]
        elif called.startswith("assert") and called not in _FREE_ASSERTS:
            if any(map(self._is_instance, arguments)):
                yield _OPERATOR
            return
        root: ast.expr = node.func
        while isinstance(root, ast.Attribute | ast.Call) and not self._is_program(root):
            root = root.value if isinstance(root, ast.Attribute) else root.func
        if (self._is_program(root) or called.startswith("assertRaises")) and not all(
            map(self._is_plain, arguments)
        ):
            yield "they pass the program something that is no plain value"

    def _names_program(self, node: ast.AST) -> bool:
        return any(isinstance(inner, ast.Name) and inner.id in self._names for inner in ast.walk(node))

    def _is_plain(self, node: ast.expr) -> bool:
        """Whether an argument can be passed, as far as its form shows."""
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            return all(map(self._is_plain, node.elts))
        if isinstance(node, ast.Name):
            is_function = callable(getattr(builtins, node.id, None)) and node.id not in _VALUES
            is_free = is_function and node.id not in self._bound
            return node.id not in self._own | self._of_tests and not is_free
        if isinstance(node, ast.Attribute):
            return not (isinstance(node.value, ast.Name) and node.value.id in _VALUES)
        return not isinstance(node, ast.Lambda | ast.GeneratorExp) and ast.unparse(node) not in self._of_tests

    def _find_unused(self) -> Iterator[str]:
        """Find functions of the tests that nothing calls: they judge nothing."""
        loaded = [node.id for node in ast.walk(self._tree) if isinstance(node, ast.Name)]
        for node in self._tree.body:
            if isinstance(node, ast.ClassDef) and node.name not in loaded:
                bases = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
                if node.name.startswith("Test") and "TestCase" not in bases:
                    yield f"nothing runs the class {node.name}, which is no unittest.TestCase"
            if isinstance(node, ast.FunctionDef) and node.name not in loaded:
                needs = len(node.args.args) + len(node.args.posonlyargs) - len(node.args.defaults)
                is_generator = any(isinstance(inner, ast.Yield | ast.YieldFrom) for inner in ast.walk(node))
                if needs > 0 or is_generator or not node.name.startswith("test"):
                    yield f"nothing calls {node.name}"


def _module_faults(*names: str) -> Iterator[str]:
    for name in names:
        root = name.partition(".")[0]
        if root not in sys.stdlib_module_names:
            yield f"they import {name}, which is not there; the program's names are there without an import"
        elif {root, name} & _OUTSIDE:
            yield f"they use {name}"


def _are_built_in(kind: ast.expr) -> bool:
    """Whether an expression names built-in classes of exceptions, which are passed on."""
    kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    found = [getattr(builtins, one.id, None) if isinstance(one, ast.Name) else None for one in kinds]
    return all(isinstance(one, type) and issubclass(one, Exception) for one in found)


def _is_assertion(node: ast.AST) -> bool:
    is_method = isinstance(node, ast.Attribute) and (node.attr.startswith("assert") or node.attr == "fail")
    return is_method or isinstance(node, ast.Assert)


def _swallows(node: ast.Try) -> bool:
    """Whether one of its handlers lets a failed assertion of its body pass."""

    def asserts(statements: list[ast.stmt]) -> bool:
        nodes = [inner for statement in statements for inner in ast.walk(statement)]
        return any(_is_assertion(inner) or isinstance(inner, ast.Raise) for inner in nodes)

    def catches(handler: ast.ExceptHandler) -> bool:
        kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
        return any(kind is None or ast.unparse(kind) in _SWALLOWERS for kind in kinds)

    return asserts(node.body) and any(catches(one) and not asserts(one.body) for one in node.handlers)
