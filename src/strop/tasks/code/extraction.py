"""Find the Python code in a reply, and the names that it defines. Nothing here runs it.

A reply is text around code: reasoning, fences that may be truncated or opened by the prompt, markers of the
few-shot form, prose. The rules are tried in order; the first candidate that compiles and defines the tested
name is taken, else the first that compiles, else the fenced text as it is.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

from strop.rollout import Outcome
from strop.tasks.answers import text_after_thinking
from strop.tasks.code.python_judge import JudgeVerdict

MAX_CODE_CHARS = 100_000
"""Longer texts count as without code: no reply within a task's budget is as long, and parsing is slow."""
_MAX_PROSE_LINES = 20
_PYTHON_TAGS = frozenset({"python", "py", "python3"})
# A fence opens on a separate line; behind other text only with a tag for Python.
_OPENING = re.compile(
    r"^(?P<indent>[ \t]*)(?P<fence>`{3,})[ \t]*(?P<tag>[^\s`]*)[^\n`]*(?:\n|\Z)"
    r"|(?P<late_fence>`{3,})[ \t]*(?P<late_tag>(?i:python3?|py))[ \t]*(?:\n|\Z)",
    re.MULTILINE,
)
_BEGIN, _DONE = "[BEGIN]", "[DONE]"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Block:
    code: str
    tag: str
    is_closed: bool
    starts_at: int
    """Offset of its opening fence in the text."""


def extract_python(text: str, *, entry_point: str | None = None) -> str | None:
    """Return the code of a reply, which need not compile; None if there is none.

    `entry_point` is the tested name, which decides between several candidates.
    """
    answer = _answer(text)
    if answer is None:
        return None
    best, best_rank = None, -1
    for candidate in _candidates(answer, entry_point):
        code = _clean(candidate)
        rank = _rank(code, entry_point)
        if rank > best_rank:
            best, best_rank = code, rank
        if rank == _DEFINES:
            break
    return best if best and best.strip() else None


def _answer(text: str) -> str | None:
    """Return the part of a reply that may hold code; None if its thinking has no end, or it is too long."""
    answer = text_after_thinking(text.replace("\r\n", "\n").replace("\r", "\n"))
    if answer is None or len(answer) > MAX_CODE_CHARS:
        return None
    return answer.partition(_DONE)[0].rpartition(_BEGIN)[2]


def compiles(code: str) -> bool:
    """Whether some text is Python."""
    return _parse(code) is not None


def defines(code: str, name: str) -> bool:
    """Whether code compiles and binds a name at its top level, or as a method of a class Solution."""
    tree = _parse(code)
    return tree is not None and name in top_level_names(tree)


def top_level_names(tree: ast.Module) -> set[str]:
    """Return the names that a module binds by definition, assignment or import, and Solution's methods."""
    names: set[str] = set()
    for node in tree.body:
        names |= _bound_names(node)
        if isinstance(node, ast.ClassDef) and node.name == "Solution":
            names |= {inner.name for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return names


def _bound_names(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    # Definitions below `if` or `try` count too; names inside functions do not.
    stores = {
        inner.id
        for inner in ast.walk(node)
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)
    }
    nested = [inner for inner in ast.iter_child_nodes(node) if isinstance(inner, ast.stmt)]
    return stores.union(*(_bound_names(inner) for inner in nested))


_NO_CODE, _BROKEN, _COMPILES, _DEFINES = range(-1, 3)


def _rank(code: str, entry_point: str | None) -> int:
    if not code.strip():
        return _NO_CODE
    tree = _parse(code)
    if tree is None:
        return _BROKEN
    if not any(_does_something(node) for node in tree.body):
        return _NO_CODE
    return _DEFINES if entry_point is None or entry_point in top_level_names(tree) else _COMPILES


def _does_something(node: ast.stmt) -> bool:
    """Whether a statement is more than a bare name or number, which are valid Python."""
    return not isinstance(node, ast.Expr) or any(isinstance(part, ast.Call) for part in ast.walk(node))


def _parse(code: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            # About invalid escapes in the reply's string literals.
            warnings.simplefilter("ignore")
            tree = ast.parse(code)
            compile(tree, "<reply>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, MemoryError, RecursionError, OverflowError):
        return None
    return tree


def _candidates(answer: str, entry_point: str | None) -> Iterator[str]:
    """Yield texts that may be the code, in the order of the rules; those without a fence must compile."""
    blocks = list(_blocks(answer))
    # If the whole text is Python, its fences, if any, are in strings and comments.
    if _rank(answer, None) >= _COMPILES:
        yield answer
        return
    if not blocks:
        # Drop first lines as prose until the rest is Python.
        lines = answer.split("\n")
        for num_dropped in range(min(_MAX_PROSE_LINES, len(lines) - 1) + 1):
            rest = "\n".join(lines[num_dropped:])
            if _rank(_clean(rest), entry_point) >= _COMPILES:
                yield rest
        return
    closed = [block for block in blocks if block.is_closed]
    for tags in (_PYTHON_TAGS, {""}):
        codes = [block.code for block in closed if block.tag.lower() in tags]
        if codes:
            yield "\n".join(codes)
            yield from reversed(codes)
            break
    before = answer[: blocks[0].starts_at]
    opened = [block for block in blocks if not block.is_closed and block.tag.lower() in {*_PYTHON_TAGS, ""}]
    # An untagged fence behind code closes the one that the prompt opened.
    if _rank(_clean(before), entry_point) == _DEFINES and not blocks[0].tag:
        yield before
    yield from (block.code for block in opened)
    if _rank(_clean(before), None) >= _COMPILES:
        yield before


def _blocks(text: str) -> Iterator[_Block]:
    position = 0
    while opening := _OPENING.search(text, position):
        fence = opening["fence"] or opening["late_fence"]
        closing = re.compile(rf"^[ \t]*`{{{len(fence)},}}(?![\w`])", re.MULTILINE).search(text, opening.end())
        end = closing.start() if closing else len(text)
        code = text[opening.end() : end]
        indent = opening["indent"] or ""
        yield _Block(
            code="\n".join(line.removeprefix(indent) for line in code.split("\n")) if indent else code,
            tag=opening["tag"] or opening["late_tag"] or "",
            is_closed=closing is not None,
            starts_at=opening.start(),
        )
        position = closing.end() if closing else len(text)


def _clean(code: str) -> str:
    """Expand tabs in front of lines; strip blank lines around the code, and a fence behind it."""
    lines = [_expand_indent(line) for line in code.split("\n")]
    while lines and (not lines[-1].strip() or re.fullmatch(r"\s*`{3,}\s*", lines[-1])):
        lines.pop()
    first = next((index for index, line in enumerate(lines) if line.strip()), len(lines))
    return "\n".join(lines[first:]).rstrip()


def _expand_indent(line: str) -> str:
    body = line.lstrip(" \t")
    return line[: len(line) - len(body)].expandtabs(4) + body


def extract_body(text: str, head: str, entry_point: str) -> str | None:
    """Return a reply's code as the body of a function that begins with `head`; None if it is no such code.

    `head` ends in the function's signature and docstring. A body that lost its indentation is indented.
    """
    answer = _answer(text)
    if answer is None:
        return None
    blocks = [*_blocks(answer)]
    pieces = [block.code for block in blocks if block.is_closed or block.tag]
    pieces.append(answer[: blocks[0].starts_at] if blocks else answer)
    for piece in pieces:
        lines = [_expand_indent(line) for line in piece.split("\n")]
        for body in ("\n".join(lines), "\n".join(f"    {line}" if line else line for line in lines)):
            if body.lstrip("\n").startswith(" ") and _has_body(head + body, entry_point):
                return body.rstrip()
    return None


def _has_body(program: str, entry_point: str) -> bool:
    tree = _parse(program)
    for node in tree.body if tree else []:
        if isinstance(node, ast.FunctionDef) and node.name == entry_point:
            return any(_does_something(inner) for inner in node.body)
    return False


def import_lines(code: str) -> tuple[str, ...]:
    """Return the import statements at the top level of some code; none if it is no Python."""
    tree = _parse(code)
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)] if tree else []
    return tuple(ast.unparse(node) for node in imports)


def used_names(code: str) -> tuple[str, ...]:
    """Return the distinct names in some code, outermost first; none if it is no Python."""
    tree = _parse(code)
    names = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)] if tree else []
    return tuple(dict.fromkeys(names))


def module_names(code: str) -> frozenset[str]:
    """Return the names that some code defines at its top level; none if it is no Python."""
    tree = _parse(code)
    return frozenset(top_level_names(tree)) if tree else frozenset()


WALL_S = 5.0
"""Wall time (seconds) of all tests of one reply together."""
SPARE_VERIFY_S = 20.0
"""Additional time of a judgement: start and end of the sandbox, and the judge's own limit."""


def no_code_outcome(code: str | None) -> Outcome:
    """Return the outcome of a reply without code, or with code that cannot be tested."""
    return Outcome(parts={"correct": 0.0}, is_correct=False, format_ok=False, extracted=code)


def judged_outcome(code: str, verdict: JudgeVerdict) -> Outcome:
    """Return the outcome of tested code: right if every test passed."""
    return Outcome(
        parts={"correct": float(verdict.is_right)},
        is_correct=verdict.is_right,
        format_ok=True,
        extracted=code,
        timed_out=verdict.timed_out,
        isolation=verdict.isolation,
        metrics={
            "tests_passed": verdict.num_passed,
            "tests_failed": verdict.num_failed,
            "tests_errored": verdict.num_errored,
            "tests_timed_out": verdict.num_timed_out,
            "tests_total": verdict.num_tests,
            "tests_passed_frac": verdict.num_passed / max(1, verdict.num_tests),
        },
    )


def fence(code: str) -> str:
    """Return code in a fenced block, as tasks request it."""
    return f"```python\n{code.strip(chr(10))}\n```"
