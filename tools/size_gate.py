"""Hold every function and file to the sizes that a reader can live with.

Checks library code, tools and benchmarks: function length, file length, nesting, parameters,
annotations, broad excepts and module names. Not for tests, whose shape follows what they test.
Left out on purpose: complexity scores, which nobody can verify by looking.

Exceptions stand in an allow-list, one line each with its reason. An entry that is no longer
needed is an error, so the list can only shrink.

Usage: python -m tools.size_gate [--allow FILE] PATH [PATH ...]
"""

from __future__ import annotations

import argparse
import ast
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

MAX_FUNCTION_P99_LINES = 50
MAX_FUNCTION_LINES = 80
MAX_FILE_LINES = 500
MAX_NESTING = 4
MAX_PARAMETERS = 8
BOUNDARIES = ("rollout worker", "sandbox execution", "user code", "CLI top level")
VAGUE_MODULES = frozenset({"utils", "util", "common", "misc", "helpers"})

_BOUNDARY = re.compile(r"#\s*boundary:\s*(?P<name>[^#]+?)\s*$")
_BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.TryStar, ast.Match)
_FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Finding:
    """One rule broken in one place."""

    path: str
    line: int
    name: str
    """Qualified name of the function, or '<file>' and '<module>'."""
    rule: str
    detail: str

    @property
    def key(self) -> str:
        """How the allow-list names this finding."""
        return f"{self.path}::{self.name}::{self.rule}"


@dataclass(frozen=True, kw_only=True, slots=True)
class FileReport:
    """What one file contributes to the whole."""

    num_lines: int
    function_lines: tuple[int, ...]
    boundaries: tuple[str, ...]
    findings: tuple[Finding, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Function:
    """A function where it stands."""

    name: str
    node: _FunctionNode
    is_method: bool


def find_functions(tree: ast.Module) -> Iterator[_Function]:
    """Yield every function of a module, nested ones included, with its qualified name."""

    def walk(node: ast.AST, prefix: str, in_class: bool) -> Iterator[_Function]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, _FunctionNode):
                yield _Function(name=f"{prefix}{child.name}", node=child, is_method=in_class)
                yield from walk(child, f"{prefix}{child.name}.", False)
            elif isinstance(child, ast.ClassDef):
                yield from walk(child, f"{prefix}{child.name}.", True)
            else:
                yield from walk(child, prefix, in_class)

    return walk(tree, "", False)


def measure_nesting(node: ast.AST, depth: int = 0) -> int:
    """Return the deepest stack of blocks below a node; an elif adds none, an inner def starts anew."""
    deepest = depth
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _FunctionNode | ast.ClassDef):
            continue
        is_elif = isinstance(node, ast.If) and node.orelse == [child] and _starts_at_same_column(node, child)
        adds = isinstance(child, _BLOCKS) and not is_elif
        deepest = max(deepest, measure_nesting(child, depth + int(adds)))
    return deepest


def _starts_at_same_column(parent: ast.If, child: ast.AST) -> bool:
    """Tell `elif` from an `if` inside `else`: only the former stands in the column of its parent."""
    return isinstance(child, ast.If) and child.col_offset == parent.col_offset


def count_module_lines(tree: ast.Module) -> int:
    """Count the lines that run on import: statements other than imports, definitions and constants."""
    lines = 0
    for node in tree.body:
        is_definition = isinstance(node, _FunctionNode | ast.ClassDef | ast.Import | ast.ImportFrom)
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_constant = isinstance(node, ast.Assign | ast.AnnAssign) and not any(
            isinstance(inner, ast.Call) for inner in ast.walk(node)
        )
        if not (is_definition or is_text or is_constant):
            lines += (node.end_lineno or node.lineno) - node.lineno + 1
    return lines


def list_parameters(function: _Function) -> list[ast.arg]:
    """Return the parameters that a caller passes: without `self` and `cls`, with the starred ones."""
    arguments = function.node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    is_static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in function.node.decorator_list)
    if function.is_method and not is_static:
        positional = positional[1:]
    starred = [arg for arg in (arguments.vararg, arguments.kwarg) if arg is not None]
    return [*positional, *arguments.kwonlyargs, *starred]


def check_function(path: str, function: _Function) -> Iterator[Finding]:
    """Yield what a function breaks by itself."""
    node = function.node

    def finding(rule: str, detail: str) -> Finding:
        return Finding(path=path, line=node.lineno, name=function.name, rule=rule, detail=detail)

    lines = count_lines(node)
    if lines > MAX_FUNCTION_LINES:
        yield finding("function-length", f"{lines} lines; allowed: {MAX_FUNCTION_LINES}")
    nesting = measure_nesting(node)
    if nesting > MAX_NESTING:
        yield finding("nesting", f"{nesting} blocks deep; allowed: {MAX_NESTING}")
    parameters = list_parameters(function)
    if len(parameters) > MAX_PARAMETERS:
        yield finding("parameters", f"{len(parameters)} parameters; allowed: {MAX_PARAMETERS}")
    untyped = [parameter.arg for parameter in parameters if parameter.annotation is None]
    if node.returns is None:
        untyped.append("return")
    if untyped:
        yield finding("typed", f"no annotation on {', '.join(untyped)}; allowed: none missing")


def count_lines(node: _FunctionNode) -> int:
    """Count a function's lines, docstring included, decorators not."""
    return (node.end_lineno or node.lineno) - node.lineno + 1


def check_handlers(path: str, tree: ast.Module, lines: Sequence[str]) -> Iterator[Finding | str]:
    """Yield a finding for each broad except, or the boundary's name where one is marked."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.ExceptHandler):
            continue
        caught = (
            {part.id for part in ast.walk(node.type) if isinstance(part, ast.Name)} if node.type else {""}
        )
        if not caught & {"", "Exception", "BaseException"}:
            continue
        marker = _BOUNDARY.search(lines[node.lineno - 1])
        if caught == {"Exception"} and marker and marker["name"] in BOUNDARIES:
            yield marker["name"]
            continue
        detail = f"a broad except; allowed: Exception at one place each for {', '.join(BOUNDARIES)}, marked"
        yield Finding(path=path, line=node.lineno, name="<file>", rule="broad-except", detail=detail)


def check_file(path: str, source: str) -> FileReport:
    """Measure one file and collect what it breaks by itself."""
    tree = ast.parse(source, filename=path)
    lines = source.splitlines()
    functions = list(find_functions(tree))
    findings = [finding for function in functions for finding in check_function(path, function)]
    handlers = list(check_handlers(path, tree, lines))
    findings += [handler for handler in handlers if isinstance(handler, Finding)]
    module_lines = count_module_lines(tree)
    if module_lines > MAX_FUNCTION_LINES:
        detail = f"{module_lines} lines run on import; allowed: {MAX_FUNCTION_LINES}"
        findings.append(Finding(path=path, line=1, name="<module>", rule="function-length", detail=detail))
    if len(lines) > MAX_FILE_LINES:
        detail = f"{len(lines)} lines; allowed: {MAX_FILE_LINES}"
        findings.append(Finding(path=path, line=1, name="<file>", rule="file-length", detail=detail))
    if Path(path).stem.lstrip("_") in VAGUE_MODULES:
        detail = "a module is named for its one concept"
        findings.append(Finding(path=path, line=1, name="<file>", rule="module-name", detail=detail))
    function_lines = [count_lines(function.node) for function in functions]
    return FileReport(
        num_lines=len(lines),
        function_lines=tuple(function_lines + [module_lines] * bool(module_lines)),
        boundaries=tuple(handler for handler in handlers if isinstance(handler, str)),
        findings=tuple(findings),
    )


def rank_percentile(values: Sequence[int], percent: float) -> int:
    """Return the smallest value that at least `percent` of the values do not exceed; 0 if none."""
    if not values:
        return 0
    return sorted(values)[math.ceil(len(values) * percent / 100) - 1]


def check_whole(reports: Mapping[str, FileReport]) -> Iterator[Finding]:
    """Yield what only all files together can break: the tail of lengths, boundaries used twice."""
    lengths = [length for report in reports.values() for length in report.function_lines]
    p99 = rank_percentile(lengths, 99)
    if p99 > MAX_FUNCTION_P99_LINES:
        detail = f"p99 of function lengths is {p99} lines; allowed: {MAX_FUNCTION_P99_LINES}"
        yield Finding(path="<all>", line=0, name="<all>", rule="function-p99", detail=detail)
    places = [(name, path) for path, report in reports.items() for name in report.boundaries]
    for boundary in BOUNDARIES:
        paths = [path for name, path in places if name == boundary]
        for path in paths[1:]:
            detail = f"boundary {boundary!r} is already taken in {paths[0]}; allowed: one place"
            yield Finding(path=path, line=0, name="<file>", rule="broad-except", detail=detail)


def read_allow_list(text: str) -> dict[str, str]:
    """Read `path::name::rule  reason` lines; # starts a comment.

    Raises: ValueError if an entry has no reason.
    """
    allowed: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        entry = line.strip()
        if not entry or entry.startswith("#"):
            continue
        key, _, reason = entry.partition(" ")
        if not reason.strip():
            raise ValueError(
                f"allow-list line {number} has no reason: {key}. Allowed: 'path::name::rule reason'. "
                "Next: say why the code is better as it is."
            )
        allowed[key] = reason.strip()
    return allowed


def split_allowed(findings: Iterable[Finding], allowed: Mapping[str, str]) -> tuple[list[Finding], list[str]]:
    """Return the findings that nobody allowed, and the allow-list entries that nothing needs."""
    found = sorted(findings)
    needed = {finding.key for finding in found}
    return [f for f in found if f.key not in allowed], [key for key in allowed if key not in needed]


def collect_sources(paths: Sequence[Path]) -> dict[str, str]:
    """Read every Python file at or below the paths, by its name as given."""
    files = [file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("*.py")))]
    return {file.as_posix(): file.read_text(encoding="utf-8") for file in files}


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the paths of the command line; return 1 if anything is broken."""
    parser = argparse.ArgumentParser(description="Check sizes, nesting, parameters, types and broad excepts.")
    parser.add_argument("--allow", type=Path, help="file of allowed exceptions")
    parser.add_argument("paths", nargs="+", type=Path)
    options = parser.parse_args(arguments)
    allowed = read_allow_list(options.allow.read_text(encoding="utf-8")) if options.allow else {}
    reports = {path: check_file(path, source) for path, source in collect_sources(options.paths).items()}
    findings = [finding for report in reports.values() for finding in report.findings]
    broken, stale = split_allowed([*findings, *check_whole(reports)], allowed)
    for finding in broken:
        print(f"{finding.path}:{finding.line}: {finding.name}: {finding.rule}: {finding.detail}")
    for key in stale:
        print(f"allow-list: {key} is not needed any more. Next: delete its line.")
    lengths = [length for report in reports.values() for length in report.function_lines]
    print(
        f"size gate: {len(reports)} files, {len(lengths)} functions, lines median "
        f"{rank_percentile(lengths, 50)}, p99 {rank_percentile(lengths, 99)}, max {max(lengths, default=0)}; "
        f"longest file {max((r.num_lines for r in reports.values()), default=0)}; "
        f"{len(broken) + len(stale)} broken, {len(allowed)} allowed"
    )
    return 1 if broken or stale else 0


if __name__ == "__main__":
    sys.exit(main())
