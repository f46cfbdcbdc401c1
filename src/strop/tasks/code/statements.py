"""What the top-level statements of some Python bind, change and need. Nothing here runs them."""

from __future__ import annotations

import ast
import builtins
import dis
import sys
import warnings
from collections.abc import Iterator, Sequence
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
            outer = compile(ast.Module([node], []), "<statement>", "exec", dont_inherit=True)
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
    functions = {one.node.name: one for one in statements if isinstance(one.node, _Definition)}
    bound = frozenset(dir(builtins)).union(*(one.binds for one in statements))
    own = frozenset().union(*(one.binds for one in statements if one.block == main))
    corrections = {
        block
        for block in {one.block for one in statements if one.block > main}
        if all(
            one.is_definition and one.binds <= own.difference(names[:1])
            for one in statements
            if one.block == block
        )
    }

    def reach(statement: Statement) -> set[str]:
        """Return the names that a statement uses when it runs, in the functions that it calls too."""
        found, ahead = set(), set(statement.runs)
        while ahead:
            found |= ahead
            ahead = set().union(*(functions[name].reads for name in ahead & functions.keys())) - found
        return found

    def affect(statement: Statement) -> frozenset[str]:
        """Return the names that a statement binds or changes; a use of the program changes nothing for it."""
        called = reached[id(statement)] & functions.keys()
        if isinstance(statement.node, ast.Assert) or called.intersection(names):
            return statement.binds
        changed = statement.binds if statement.is_definition else statement.binds | statement.changes
        return changed.union(*(functions[name].changes for name in called))

    def place(name: str) -> int:
        binding = [one for one in statements if name in one.binds]
        defining = [one.block for one in binding if one.is_definition]
        if name in own:
            return max([main, *(block for block in defining if block in corrections)])
        before = [one.block for one in binding if one.block < main]
        return max(defining or before or [one.block for one in binding], default=main)

    def is_kept_anyway(one: Statement) -> bool:
        is_main = one.block == main and (not names or one.defines(names[0]) >= 0)
        return is_main or (one.block <= main and one.sets_process)

    def is_use(one: Statement) -> bool:
        of_functions = [functions[name].node for name in reached[id(one)] & functions.keys()]
        attributes = {
            inner.attr
            for node in (one.node, *of_functions)
            for inner in (() if node is one.node and one.is_definition else ast.walk(node))
            if isinstance(inner, ast.Attribute)
        }
        outer = _OUTER.union(names, *(other.binds for other in statements if other.is_foreign))
        is_other = isinstance(one.node, ast.Assert | ast.Raise | ast.Import | ast.ImportFrom)
        return is_other or bool((attributes | reached[id(one)]) & outer) or not one.runs <= bound

    def close() -> None:
        while (
            ahead := set(names)
            .union(*(statements[i].reads for i in kept))
            .union(*(statements[i].runs for i in beside))
            - places.keys()
        ):
            places.update({name: place(name) for name in ahead})
            for index, one in enumerate(statements):
                is_needed = any(places.get(name) == one.block for name in affected[index])
                if is_needed or (one.block == main and ahead & _DYNAMIC):
                    kept.add(index)

    reached = {id(one): reach(one) for one in statements}
    affected = [affect(one) for one in statements]
    kept = {index for index, one in enumerate(statements) if is_kept_anyway(one)}
    places: dict[str, int] = {}
    beside: set[int] = set()
    close()
    beside |= {
        i for i, one in enumerate(statements) if one.block == main and i not in kept and not is_use(one)
    }
    close()
    # What other blocks define stands before `main`, which may need it at once; corrections stand behind.
    found = [statements[index] for index in sorted(kept | beside)]
    return sorted(found, key=lambda one: 2 if one.block in corrections else int(one.block == main))
