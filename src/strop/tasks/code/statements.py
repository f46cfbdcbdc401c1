"""What the top-level statements of some Python bind, change and need. Nothing here runs them."""

from __future__ import annotations

import ast
import builtins
import dis
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_DYNAMIC = frozenset({"eval", "exec", "globals", "locals", "vars", "__import__"})
"""Code that uses these may need a name that it does not spell."""
_SETTINGS = frozenset({"setrecursionlimit", "set_int_max_str_digits", "stack_size", "seed", "prec"})
"""Attributes of the standard library that set something for the whole process."""
_OUTER = frozenset(
    {"input", "print", "exit", "quit", "unittest", "doctest", "timeit", "stdin", "_exit", "argv"}
)
"""Names and attributes that a function to be tested does not need when it is loaded."""


@lru_cache(maxsize=256)
def parse(code: str) -> ast.Module | None:
    """Return the tree of some code; None if it is no Python."""
    try:
        with warnings.catch_warnings():
            # About invalid escapes in string literals.
            warnings.simplefilter("ignore")
            tree = ast.parse(code)
            compile(tree, "<reply>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, MemoryError, RecursionError, OverflowError):
        return None
    return tree


@dataclass(frozen=True, kw_only=True, slots=True)
class Statement:
    """A statement at the top level of a block of code."""

    block: int
    """Number of its block in the reply."""
    node: ast.stmt
    binds: frozenset[str]
    reads: frozenset[str]
    """Names of the module that it uses, in the bodies of its functions too."""
    runs: frozenset[str]
    """Those of them that it uses at once."""
    changes: frozenset[str]
    """Names whose objects it changes, or binds by `global`."""

    @property
    def is_definition(self) -> bool:
        """Whether it defines a function or class."""
        return isinstance(self.node, _Definition)

    @property
    def sets_process(self) -> bool:
        """Whether it sets something for the process, such as the recursion limit, or imports all names."""
        if isinstance(self.node, ast.ImportFrom):
            return self.node.module == "__future__" or self.node.names[0].name == "*"
        attributes = {inner.attr for inner in ast.walk(self.node) if isinstance(inner, ast.Attribute)}
        return not self.is_definition and bool(attributes & _SETTINGS)

    @property
    def is_foreign(self) -> bool:
        """Whether it imports something that is not of the standard library."""
        modules = [alias.name for alias in self.node.names] if isinstance(self.node, ast.Import) else []
        if isinstance(self.node, ast.ImportFrom):
            modules = [self.node.module or "."]
        return any(name.partition(".")[0] not in sys.stdlib_module_names for name in modules)

    @property
    def acts(self) -> bool:
        """Whether it does more than to define names: it belongs to the main part of a program."""
        is_quiet = isinstance(self.node, _Definition | ast.Import | ast.ImportFrom)
        calls = any(isinstance(inner, ast.Call) for inner in ast.walk(self.node))
        return not is_quiet and (calls or not isinstance(self.node, ast.Assign | ast.AnnAssign | ast.Expr))

    def defines(self, name: str) -> int:
        """Return how well it defines a name: 3 whole, 2 by a value, 1 by an import, 0 as a stub, -1 not."""
        node = self.node
        if isinstance(node, ast.ClassDef) and node.name == "Solution" and node.name != name:
            return max((_wholeness(one) for one in methods(node) if one.name == name), default=-1)
        if name not in self.binds:
            return -1
        if isinstance(node, _Definition):
            return _wholeness(node)
        if isinstance(node, ast.Import | ast.ImportFrom):
            return 1
        value = getattr(node, "value", None)
        return -1 if name in self.reads else 1 if isinstance(value, ast.Constant) else 2


def methods(node: ast.ClassDef) -> list[ast.FunctionDef]:
    """Return the methods in the body of a class."""
    return [inner for inner in node.body if isinstance(inner, ast.FunctionDef)]


def _wholeness(node: _Definition) -> int:
    is_cut = any(_is_ellipsis(inner) for inner in node.body)
    does_something_else = (does_something(inner) for inner in node.body if not isinstance(inner, ast.Pass))
    return 3 if not is_cut and any(does_something_else) else 0


def _is_ellipsis(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and node.value.value is ...


def does_something(node: ast.stmt) -> bool:
    """Whether a statement is more than a bare name, number or annotation, which are valid Python."""
    if isinstance(node, ast.AnnAssign) and node.value is None:
        return False
    return not isinstance(node, ast.Expr) or any(
        isinstance(part, ast.Call | ast.Yield | ast.Await) for part in ast.walk(node)
    )


def read_statements(tree: ast.Module, block: int) -> list[Statement]:
    """Return the statements of a block of code that compiles."""
    return [_read(node, block) for node in tree.body]


def _read(node: ast.stmt, block: int) -> Statement:
    binds, reads, runs, changes = set(), set(), set(), set()
    is_class = isinstance(node, ast.ClassDef)
    is_later = isinstance(node, _Definition) and not is_class
    if not (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                outer = compile(ast.Module([node], []), "<statement>", "exec", dont_inherit=True)
            except RecursionError:  # It compiled a few frames higher: no statement of a real program.
                outer = compile("", "<statement>", "exec")
        for code in _walk(outer):
            for instruction in dis.get_instructions(code):
                action, _, scope = instruction.opname.partition("_")
                if action == "LOAD" and scope.endswith(("NAME", "GLOBAL", "GLOBALS")):
                    reads.add(instruction.argval)
                    # The body of a class runs at once, that of its methods later.
                    if code is outer or not (is_later or (is_class and scope != "NAME")):
                        runs.add(instruction.argval)
                elif action in ("STORE", "DELETE") and scope in ("NAME", "GLOBAL"):
                    if code is outer:
                        binds.add(instruction.argval)
                    elif scope == "GLOBAL":
                        changes.add(instruction.argval)
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute | ast.Subscript) and not isinstance(inner.ctx, ast.Load):
            changes |= {_root(inner)} & reads
        elif isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute):
            changes |= {_root(inner.func)} & reads
    return Statement(
        block=block,
        node=node,
        binds=frozenset(binds),
        reads=frozenset(reads),
        runs=frozenset(runs),
        changes=frozenset(changes),
    )


def _walk(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _walk(constant)


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def find_needed(statements: list[Statement], main: int, names: Sequence[str]) -> list[Statement]:
    """Return the statements that the names need, in the order in which they must run.

    A name has the value that the block `main` gives it; else that of the last block that defines it, else of
    the last block before. A later block of nothing but definitions of names in `main` corrects these. What
    else stands in `main` is kept, too, unless it uses the program: it calls one of the names, asserts, reads
    the input, prints, or needs a package that nothing else needs. Without names all of `main` is needed.
    """
    return _Program(statements, main, names).find()


class _Program:
    def __init__(self, statements: list[Statement], main: int, names: Sequence[str]) -> None:
        self._statements, self._main, self._names = statements, main, names
        self._functions = {one.node.name: one for one in statements if isinstance(one.node, _Definition)}
        self._own = _union(one.binds for one in statements if one.block == main)
        self._known = _union(one.binds for one in statements) | set(dir(builtins))
        self._outer = _union(one.binds for one in statements if one.is_foreign) | _OUTER | set(names)
        corrected = self._own - set(names[:1])
        others = {one.block for one in statements if not (one.is_definition and one.binds <= corrected)}
        self._corrections = {one.block for one in statements if one.block > main} - others
        self._reached = [self._reach(one) for one in statements]
        self._affected = [self._affect(*pair) for pair in zip(statements, self._reached, strict=True)]
        self._places: dict[str, int] = {}

    def find(self) -> list[Statement]:
        """Return the needed statements."""
        names, main = self._names, self._main
        kept = {
            index
            for index, one in enumerate(self._statements)
            if (one.block == main and (not names or one.defines(names[0]) >= 0))
            or (one.block <= main and one.sets_process)
        }
        self._close(kept, set())
        beside = {
            index
            for index, one in enumerate(self._statements)
            if one.block == main and index not in kept and not self._is_use(one, self._reached[index])
        }
        self._close(kept, beside)
        # What other blocks define stands before `main`, which may need it at once; corrections stand behind.
        found = [self._statements[index] for index in sorted(kept | beside)]
        return sorted(found, key=lambda one: 2 if one.block in self._corrections else int(one.block == main))

    def _close(self, kept: set[int], beside: set[int]) -> None:
        """Add to `kept` what it needs, and what those `beside` need when they are loaded."""
        while True:
            needed = _union(self._statements[index].reads for index in kept) | set(self._names)
            needed |= _union(self._statements[index].runs for index in beside)
            if not (ahead := needed - self._places.keys()):
                return
            self._places |= {name: self._place(name) for name in ahead}
            is_dynamic = bool(ahead & _DYNAMIC)
            for index, one in enumerate(self._statements):
                is_needed = any(self._places.get(name) == one.block for name in self._affected[index])
                if is_needed or (is_dynamic and one.block == self._main):
                    kept.add(index)

    def _reach(self, statement: Statement) -> set[str]:
        """Return the names that a statement uses when it runs, in the functions that it calls too."""
        found: set[str] = set()
        ahead = set(statement.runs)
        while ahead:
            found |= ahead
            ahead = _union(self._functions[name].reads for name in ahead & self._functions.keys()) - found
        return found

    def _affect(self, statement: Statement, reached: set[str]) -> set[str]:
        """Return the names that a statement binds or changes; a use of the program changes nothing for it."""
        if isinstance(statement.node, ast.Assert) or reached.intersection(self._functions, self._names):
            return set(statement.binds)
        changed = statement.binds if statement.is_definition else statement.binds | statement.changes
        return _union(self._functions[name].changes for name in reached & self._functions.keys()) | changed

    def _is_use(self, statement: Statement, reached: set[str]) -> bool:
        called = [self._functions[name].node for name in reached & self._functions.keys()]
        nodes = called if statement.is_definition else [statement.node, *called]
        attributes = {n.attr for node in nodes for n in ast.walk(node) if isinstance(n, ast.Attribute)}
        is_other = isinstance(statement.node, ast.Assert | ast.Raise | ast.Import | ast.ImportFrom)
        return is_other or bool((attributes | reached) & self._outer) or not statement.runs <= self._known

    def _place(self, name: str) -> int:
        """Return the block that gives a name its value."""
        binding = [one for one in self._statements if name in one.binds]
        defining = [one.block for one in binding if one.is_definition]
        if name in self._own:
            return max([self._main, *(block for block in defining if block in self._corrections)])
        before = [one.block for one in binding if one.block < self._main]
        return max(defining or before or [one.block for one in binding], default=self._main)


def _union(sets: Iterable[frozenset[str]]) -> set[str]:
    return set().union(*sets)
