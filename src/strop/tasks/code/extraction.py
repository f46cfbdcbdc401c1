"""Find the Python program in a reply, and judge it.

Fences and tags cut a reply into pieces: code, sessions of the interpreter, and prose that may hold code. The
last block of code that defines the tested name whole decides; of other blocks only those count that it needs,
so a later example of use does not. Where no name is tested, the last whole program decides: one that reads,
prints, and needs no other block.
"""

from __future__ import annotations

import ast
import builtins
import codeop
import re
import textwrap
import warnings
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from strop.rollout import Outcome
from strop.spec.sandboxing import SandboxSettings
from strop.tasks.answers import text_after_thinking
from strop.tasks.code.judge import JudgeJob, judge_python
from strop.tasks.code.runner import TIMED_OUT
from strop.tasks.task import right_or_wrong

MAX_CODE_CHARS = 100_000
"""Longer texts count as without code: no reply within a task's budget is as long, and parsing is slow."""
_MAX_MARKS, _MAX_CUTS, _MAX_CHUNKS = 200, 6, 40
_MAX_PARSED_CHARS = 5 * MAX_CODE_CHARS
"""Of the attempts to find code in prose, so that no reply takes seconds."""
_WHOLE = 2
"""Rank of a whole definition."""
_TAG = (
    r"(?:</?(?:answer|final_answer|solution|code|python|pre)(?: [^<>\n]*)?>|<\|python_tag\|>"
    r"|\[/?(?:BEGIN|PYTHON|ANSWER|SOLUTION|CODE|TESTS)\])"
)
_MARK = re.compile(
    r"^[ \t>]*(?:(?:[-*+]|\d{1,3}[.)])[ \t]+)?(?P<fence>`{3,}|~{3,})(?P<tag>[^\n`()]*$)?"
    r"|(?<!`)(?P<late>`{3,}+)[ \t]*(?P<python>python3?|py)?[ \t]*$"
    rf"|^[ \t]*{_TAG}++|(?<![>\]]){_TAG}++[ \t]*$",
    re.MULTILINE | re.IGNORECASE,
)
"""What stands between pieces: a fence on its own line or behind other text, or a tag."""
_INLINE = re.compile(r"(?<!`)(`{1,3})(?:(?:python3?|py)\s)?([^`\n]+)\1(?!`)")
_ANSWERS = re.compile(r"<(answer|final_answer|solution)>(.*?)(?:</\1>|\Z)", re.DOTALL | re.IGNORECASE)
_MARKED_LINE = re.compile(r"^[ \t]*(?:>>>|\.\.\.|>)(?: (.*)|)$", re.MULTILINE)
"""Of a session of the interpreter, or of a quotation."""
_SHELL_LINE = re.compile(r"^[!%].*\n?", re.MULTILINE)
_INNER_LINE = re.compile(r"[ \t)\]}#]|(?:else|elif|except|finally)\b|\"\"\"|'''|\Z")
_READS, _PRINTS = re.compile(r"\b(?:input|stdin|fileinput)\b|open\(0"), re.compile(r"\b(?:print|stdout)\b")


def extract_python(text: str, names: Sequence[str] = (), head: str = "") -> str | None:
    """Return the program of a reply; None if there is none, or none that defines the first name.

    `names` are the tested names, the entry point first; none: the program runs as a whole. `head` begins the
    function of the first name, and a reply may hold only its body.
    """
    answer = text_after_thinking(text.replace("\r\n", "\n").replace("\r", "\n"))
    if answer is None or len(answer) > MAX_CODE_CHARS:
        return None
    answer = answer.partition("[DONE]")[0].lstrip("\ufeff")
    answer = re.sub(r"^[ \t]+", lambda margin: margin[0].expandtabs(4), answer, flags=re.MULTILINE)
    inline = [match[2].strip() for match in _INLINE.finditer(answer)]
    # What stands in tags of an answer decides: it is read again, behind the others.
    tagged = [match[2] for match in _ANSWERS.finditer(answer)]
    pieces = list(_split("\n<answer>\n".join([answer, *tagged[-_MAX_CUTS:]])))
    # A body may have lost its indentation, or that of its first line.
    bodies = [_strip(piece) for piece, _ in reversed(pieces) if head]
    forms = [form for body in bodies for form in (f"    {body.lstrip(' ')}", textwrap.indent(body, "    "))]
    wholes = [code for form in forms if _rank_of(code := find_code(head + form), names[0]) == _WHOLE]
    return _assemble([*wholes, *inline, answer, *(code for _, code in pieces)], names)


def _split(text: str) -> Iterator[tuple[str, str]]:
    """Yield the pieces of a text, and the code of each, which may be none."""
    marks = [*_MARK.finditer(text)][-_MAX_MARKS:]
    starts = [0, *(mark.end() for mark in marks)]
    ends = [*(mark.start() for mark in marks), len(text)]
    is_open, index = False, 0
    while index < len(starts):
        if index:
            mark = marks[index - 1]
            is_fence = bool(mark["fence"] or mark["late"])
            is_open = is_fence and (bool(mark["python"] or (mark["tag"] or "").strip()) or not is_open)
        # A fence may stand in a string: code goes on to the first one before which it compiles.
        for last in range(index, min(index + _MAX_CUTS, len(ends))):
            code = _repair(text[starts[index] : ends[last]])
            if code is not None:
                break
        else:
            last = index
            # A closed block that does not compile is no code.
            code = "" if is_open and index < len(marks) else find_code(text[starts[index] : ends[index]])
        yield text[starts[index] : ends[last]], code
        index = last + 1


def _repair(piece: str) -> str | None:
    """Return code that compiles; there may be lines for a shell, or a session or a quotation."""
    # Docstrings have such lines, too.
    marked = "\n".join(_MARKED_LINE.findall(piece)) if piece.lstrip().startswith(">") else piece
    for form in map(_strip, (piece, textwrap.dedent(piece), _SHELL_LINE.sub("", piece), marked)):
        if parse(form) and (form or not piece.strip()):
            return form
    return None


def _strip(code: str) -> str:
    return code.strip("\n").rstrip()


def _is_code(code: str) -> bool:
    return any(map(does_something, body_of(code)))


def find_code(text: str) -> str:
    """Return the statements that stand among prose."""
    lines = text.split("\n")
    starts = [
        index
        for index, line in enumerate(lines)
        if not (_INNER_LINE.match(line) or (index and lines[index - 1].startswith("@")))
    ]
    kept: list[str] = []
    num_parsed, index = 0, 0
    while index < len(starts) and num_parsed < _MAX_PARSED_CHARS:
        is_whole: bool | None = None
        for end in [*starts[index + 1 : index + _MAX_CHUNKS], len(lines)][:_MAX_CHUNKS]:
            chunk = "\n".join(lines[starts[index] : end]).rstrip()
            num_parsed += len(chunk)
            is_whole = _is_whole(chunk)
            if is_whole is not None:
                break
        # Markdown indents code behind a line of prose.
        forms = (chunk, _strip(textwrap.dedent(chunk.partition("\n")[2])))
        kept += [form for form in forms if _is_code(form)][:1]
        index = bisect_left(starts, end) if is_whole else index + 1
    return "\n".join(kept)


def _is_whole(chunk: str) -> bool | None:
    """Return whether a text is whole Python; None if it could begin some."""
    try:
        return codeop.compile_command(chunk, symbol="exec") is not None or None
    except (SyntaxError, ValueError, MemoryError, RecursionError, OverflowError):
        return False


def _assemble(codes: Sequence[str], names: Sequence[str]) -> str | None:
    """Return the program of some blocks: the best one, and of these the last.

    For tested names `_rank` says how good one is. A whole program is 3 if it needs no other block, 2 if it
    does, 1 if it reads nothing, 0 if it is no such program.
    """
    best, best_rank = None, -1
    blocks = dict(enumerate(filter(_is_code, codes)))
    for main in reversed(blocks):
        body = body_of(blocks[main])
        rank = _rank_of(blocks[main], names[0]) if names else 0
        if names and rank <= best_rank:
            continue
        needed = _find_needed(blocks, main)
        # A statement that raises does no harm beside a tested name, and a whole program must not print twice.
        texts = [blocks[one] if names else statements_of(blocks[one], _Binding) for one in needed]
        code = join_code(*texts, blocks[main])
        acting = [node for node in body if not isinstance(node, Definition) and has(node, ast.Call)]
        if not names and acting and _PRINTS.search(code):
            rank = 3 - bool(needed) if _READS.search(code) else 1
        if rank > best_rank:
            best, best_rank = code, rank
    return best


def _find_needed(blocks: Mapping[int, str], main: int) -> list[int]:
    """Return the blocks that a block needs, in order.

    A name that it lacks has the value of the last block before it that binds it; else of the last one.
    """
    scopes = {block: scope_of(code) for block, code in blocks.items()}
    found = [main]
    for block in found:
        for name in scopes[block].reads - scopes[block].binds - scopes[main].binds - set(dir(builtins)):
            fitting = [
                (name in scope.binds, one < main, one)
                for one, scope in scopes.items()
                if {name, "*"} & scope.binds
            ]
            found += {max(fitting, default=(main,))[-1]} - set(found)
    return sorted(found[1:])


def join_code(*texts: str) -> str:
    """Return pieces of code as one; imports from `__future__` must stand in front."""
    lines = "\n\n".join(filter(None, texts)).split("\n")
    return "\n".join(sorted(lines, key=lambda line: not line.startswith("from __future__ ")))


def statements_of(code: str, kinds: Any) -> str:
    """Return the statements of some kinds at the top level of some code; none if it is no Python."""
    try:
        return "".join(f"{ast.unparse(node)}\n" for node in body_of(code) if isinstance(node, kinds))
    except RecursionError:
        # Sums of hundreds of terms are not written again.
        return code


def used_names(code: str) -> tuple[str, ...]:
    """Return the distinct names in some code, outermost first; none if it is no Python."""
    nodes = ast.walk(ast.Module(body_of(code), []))
    return tuple(dict.fromkeys(node.id for node in nodes if isinstance(node, ast.Name)))


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


def body_of(code: str) -> list[ast.stmt]:
    """Return the statements of some code; none if it is no Python."""
    return tree.body if (tree := parse(code)) else []


Import = ast.Import | ast.ImportFrom
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_Binding = Definition | Import | ast.Assign | ast.AnnAssign


class Scope(NamedTuple):
    """Names of a module that some code binds ('*': all of another one), and those that it reads."""

    binds: Set[str]
    reads: Set[str]


@lru_cache(maxsize=256)
def scope_of(code: str) -> Scope:
    """Return the names in some code; none if it is no Python."""
    scopes = [names_of(node) for node in body_of(code)]
    return Scope(*({name for scope in scopes for name in scope[one]} for one in (0, 1)))


def names_of(node: ast.stmt) -> Scope:
    """Return the names in a statement."""
    nodes: list[Any] = list(ast.walk(node))
    names = [one for one in nodes if isinstance(one, ast.Name)]
    reads = {one.id for one in names if isinstance(one.ctx, ast.Load)}
    binds = {one.id for one in names if not isinstance(one.ctx, ast.Load)}
    named = [one for one in nodes if isinstance(getattr(one, "name", None), str)]
    binds |= {(getattr(one, "asname", None) or one.name).partition(".")[0] for one in named}
    reads -= {one.arg for one in nodes if isinstance(one, ast.arg)}
    return Scope({node.name}, reads - binds) if isinstance(node, Definition) else Scope(binds, reads)


def _rank(node: ast.stmt, name: str) -> int:
    """Return how well a statement defines a name: 2 whole, 1 by a value, 0 as a stub or otherwise, -1 not."""
    if isinstance(node, ast.ClassDef) and node.name == "Solution" != name:
        return max((_rank(one, name) for one in node.body if isinstance(one, ast.FunctionDef)), default=-1)
    binds, reads = names_of(node)
    if name not in binds:
        return -1
    if isinstance(node, Definition):
        values = [inner.value for inner in node.body if isinstance(inner, ast.Expr)]
        is_cut = any(isinstance(one, ast.Constant) and one.value is ... for one in values)
        acts = any(does_something(inner) for inner in node.body if not isinstance(inner, ast.Pass))
        return _WHOLE if acts and not is_cut else 0
    if isinstance(node, Import):
        return 0
    if isinstance(value := getattr(node, "value", None), ast.Lambda):
        return _WHOLE
    return -1 if name in reads else int(not isinstance(value, ast.Constant))


def _rank_of(code: str, name: str) -> int:
    return max((_rank(node, name) for node in body_of(code)), default=-1)


def does_something(node: ast.stmt) -> bool:
    """Whether a statement is more than a bare name, number or annotation, which are valid Python."""
    if isinstance(node, ast.AnnAssign) and node.value is None:
        return False
    return not isinstance(node, ast.Expr) or has(node, ast.Call | ast.Yield | ast.Await)


def has(node: ast.AST, kind: Any) -> bool:
    """Whether there is a node of a kind in a tree."""
    return any(isinstance(inner, kind) for inner in ast.walk(node))


# The verdict on a reply.

WALL_S = 5.0
"""Wall time (seconds) of all tests of one reply together."""
_MAX_WALL_S, _TEST_S = 60.0, 3.0
"""Of tables of inputs and outputs: most time for all tests, each of which adds a second; time of one test."""
MAX_VERIFY_S = _MAX_WALL_S + 20.0
"""Longest judgement: with start and end of the sandbox, and the judge's own limit."""


async def judge_reply(text: str, job: JudgeJob, spec: SandboxSettings) -> Outcome:
    """Run a job's tests over the program of a reply, behind the job's own code, which may begin a function.

    Right if every test passed; `format_ok`: the code compiles and defines the first tested name.
    Raises: like `judge_python`.
    """
    head = job.source if scope_of(job.source).binds & set(job.names[:1]) else ""
    code = extract_python(text, job.names, head)
    if code is None:
        return right_or_wrong(is_correct=False, format_ok=False)
    job = replace(job, source=join_code(job.source, code), wall_s=WALL_S)
    if job.input_output:
        job = replace(job, wall_s=min(_MAX_WALL_S, WALL_S + job.num_tests), test_s=_TEST_S)
    outcome = await judge_python(job, min_isolation=spec.min_isolation, sandbox=spec.sandbox)
    return replace(outcome, extracted=code, timed_out=outcome.metrics[f"tests_{TIMED_OUT}"] > 0)
