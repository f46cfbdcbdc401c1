"""Find the Python program in a reply, and judge it.

A reply is text around code: reasoning, tags, fences that may be truncated or opened by the prompt, sessions,
diffs, prose. It is cut into blocks of code that compile. The last block that defines the tested name whole
decides; of other blocks only those statements count that it needs, so a later example of use does not. Where
no name is tested, the last whole program decides: one that reads, prints, and needs no other block.
"""

from __future__ import annotations

import ast
import builtins
import re
import textwrap
import warnings
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

from strop.rollout import Outcome
from strop.spec.sandboxing import SandboxSettings
from strop.tasks.answers import text_after_thinking
from strop.tasks.code.judge import JudgeJob, judge_python

MAX_CODE_CHARS = 100_000
"""Longer texts count as without code: no reply within a task's budget is as long, and parsing is slow."""
_MAX_BLOCKS, _MAX_CUTS, _MAX_CHUNKS = 100, 6, 40
_MAX_PARSED_CHARS = 5 * MAX_CODE_CHARS
"""Of the attempts to find code in prose, so that no reply takes seconds."""
_BEGIN, _DONE = "[BEGIN]", "[DONE]"
# A fence opens on a separate line; behind other text only with a tag for Python.
_OPENING = re.compile(
    r"^(?P<quote>[ \t>]*)(?:(?:[-*+]|\d{1,3}[.)])[ \t]+)?(?P<fence>`{3,}|~{3,})(?P<info>[^\n]*)(?:\n|\Z)"
    r"|(?<!`)(?P<late>`{3,}+)[ \t]*(?:python3?|py)[ \t]*(?:\n|\Z)",
    re.MULTILINE | re.IGNORECASE,
)
_TAG_WORD = re.compile(r"\W*([\w+#.-]*)")
_OTHER_TAGS = frozenset({"", "ipython", "ipython3", "sage", "tool_code", "code", "text", "txt", "plaintext"})
"""Beside those that begin with `py` or end in `.py`."""
_CODE_IN_INFO = re.compile(r"(?:async |def |class |from |import |@)")
_INLINE = re.compile(r"(?<!`)(`{1,3})(?:(?:python3?|py)\s)?([^`]+)\1(?!`)")
_ANSWERS = re.compile(r"<(answer|final_answer|solution)>(.*?)(?:</\1>|\Z)", re.DOTALL | re.IGNORECASE)
_TAG = (
    r"(?:</?(?:answer|final_answer|solution|code|python|pre)(?: [^<>\n]*)?>|<\|python_tag\|>"
    r"|\[/?(?:PYTHON|ANSWER|SOLUTION|CODE|TESTS)\])"
)
_TAGS = re.compile(rf"^[ \t]*{_TAG}++|(?<![>\]]){_TAG}++[ \t]*$", re.MULTILINE | re.IGNORECASE)
_SESSION = re.compile(r"^[ \t]*(?:>>>|In \[\d+\]:)", re.MULTILINE)
_SESSION_LINE = re.compile(r"^[ \t]*(?:>>>|\.\.\.:?|In \[\d+\]:)(?: (.*)|)$", re.MULTILINE)
_SHELL_LINE = re.compile(r"^[!%].*\n?", re.MULTILINE)
_DIFF_HEAD = re.compile(r"^(?:---|\+\+\+|@@|diff |index |new file).*\n?", re.MULTILINE)
_INNER_LINE = re.compile(r"[ \t)\]}#]|(?:else|elif|except|finally)\b|\"\"\"|'''|\Z")
_UNFINISHED = ("was never closed", "unterminated triple-quoted", "unexpected EOF")
_FUTURE = re.compile(r"^from __future__ import .*$", re.MULTILINE)
_READS, _PRINTS = re.compile(r"\b(?:input|stdin|fileinput)\b|open\(0"), re.compile(r"\b(?:print|stdout)\b")


def extract_python(text: str, names: Sequence[str] = (), head: str = "") -> str | None:
    """Return the program of a reply, which need not compile; None if there is none.

    `names` are the tested names, the entry point first; none: the program runs as a whole. `head` begins the
    function of the first name, and a reply may hold only its body.
    """
    best, best_rank = None, -3
    for part in _parts(_answer(text) or ""):
        blocks, outside = _split(part)
        inline = [one for match in _INLINE.finditer(outside) if parse(one := _clean(match[2]))]
        bodies = [_complete(head, piece, names[0]) for piece in (outside, *reversed(blocks)) if head]
        code, rank = _assemble([*bodies, find_code(outside), *inline, *blocks], names)
        if rank > best_rank:
            best, best_rank = code, rank
        if rank > 0:
            break
    return best


def _complete(head: str, piece: str, name: str) -> str:
    """Return the start of a function, up to its docstring, with its body; '' if that is no such code.

    A body that lost its indentation, or that of its first line, is indented.
    """
    body = _clean(piece)
    bodies = [body] if body.startswith(" ") else [textwrap.indent(body, "    "), f"    {body}"]
    programs = [head + body for body in bodies]
    for program in (*programs, find_code(programs[-1])):
        tree = parse(program)
        functions = [one for one in tree.body if isinstance(one, ast.FunctionDef)] if tree else []
        if any(one.name == name and any(map(does_something, one.body)) for one in functions):
            return program
    return ""


def _answer(text: str) -> str | None:
    """Return the part of a reply that may hold code; None if its thinking has no end, or it is too long."""
    answer = text_after_thinking(text.replace("\r\n", "\n").replace("\r", "\n"))
    if answer is None or len(answer) > MAX_CODE_CHARS:
        return None
    return answer.partition(_DONE)[0].lstrip("\ufeff")


def _parts(answer: str) -> Iterator[str]:
    """Yield what may hold the program, the best first: what stands in tags of an answer, and all.

    Behind the last [BEGIN] stands the code; or a base model went on to invent another problem.
    """
    for part in dict.fromkeys((answer.rpartition(_BEGIN)[2], answer.partition(_BEGIN)[0])):
        if not _is_code(part):
            yield from reversed([match[2] for match in islice(_ANSWERS.finditer(part), _MAX_BLOCKS)])
        yield part


def _is_code(code: str) -> bool:
    tree = parse(code)
    return tree is not None and any(map(does_something, tree.body))


def _split(text: str) -> tuple[list[str], str]:
    """Return the blocks of code in a text, those that compile in their repaired form, and the other text."""
    if _is_code(_clean(text)) and not text.lstrip().startswith("~~~"):
        # Its fences, if any, are in strings and comments; `~~~python` is Python, too.
        return [_clean(text)], ""
    blocks: list[str] = []
    outside: list[str] = []
    position = 0
    while opening := _OPENING.search(text, position):
        info = (opening["info"] or "").strip()
        outside.append(text[position : opening.start()])
        position = opening.end()
        tag = "py" if opening["late"] else (_TAG_WORD.match(info) or "")[1].lower()
        if "`" in info or tag in ("markdown", "md"):
            # Inline code, or a page around the fences that count.
            outside.append(opening[0])
            continue
        first = info if _CODE_IN_INFO.match(info) else ""
        is_diff = tag in ("diff", "patch")
        is_ours = bool(first) or tag in _OTHER_TAGS or tag.startswith("py") or tag.endswith(".py") or is_diff
        is_sought = is_ours and not is_diff and len(blocks) < _MAX_BLOCKS
        code, position = _read_block(text, position, opening["late"] or opening["fence"], first, is_sought)
        if ">" in (opening["quote"] or ""):
            code = re.sub(r"^[ \t]*> ?", "", code, flags=re.MULTILINE)
        if is_ours:
            blocks.append(_patch(blocks, code) if is_diff else _repair(code) or code)
    return blocks[-_MAX_BLOCKS:], "".join([*outside, text[position:]])


def _read_block(text: str, start: int, fence: str, first: str, is_sought: bool) -> tuple[str, int]:
    """Return the code behind an opening fence, and where the text goes on.

    The code ends at the first fence before which it compiles, because a fence may stand in a docstring; else
    at the first one, or at the end of the text, where the code may go over into prose.
    """
    mark = f"{fence[0]}{{{len(fence)},}}"
    first = f"{first}\n" if first else ""
    closing, late = (
        list(islice(re.compile(pattern, re.MULTILINE).finditer(text, start), _MAX_CUTS))
        for pattern in (rf"^[ \t>]*{mark}([^\n]*)$", rf"(?<!{fence[0]}){mark}+()[ \t]*$")
    )
    for cut in (*closing, *late) if is_sought else ():
        code = first + text[start : cut.start()]
        if _repair(code) is not None:
            # Another fence with a tag opens the next block: this one was not closed.
            return code, cut.start() if cut[1].strip() else cut.end()
    for cut in closing:
        if not cut[1].strip():
            return first + text[start : cut.start()], cut.end()
    rest = first + text[start:]
    return rest if _repair(rest) is not None else find_code(rest) or rest, len(text)


def _repair(code: str) -> str | None:
    """Return code that compiles: as it is, dedented, without lines for a shell, or a session's input."""
    session = _SESSION_LINE.findall(code) if _SESSION.search(code) else []
    for form in (code, textwrap.dedent(code), _SHELL_LINE.sub("", code), "\n".join(session)):
        if parse(cleaned := _clean(form)) and (cleaned or not code.strip()):
            return cleaned
    return None


def _clean(code: str) -> str:
    """Expand tabs in front of lines; strip blank lines around the code, and a fence behind it."""
    bodies = [(line, line.lstrip(" \t")) for line in code.split("\n")]
    lines = [line[: len(line) - len(body)].expandtabs(4) + body for line, body in bodies]
    while lines and (not lines[-1].strip() or re.fullmatch(r"\s*(?:`{3,}|~{3,})\s*", lines[-1])):
        lines.pop()
    first = next((index for index, line in enumerate(lines) if line.strip()), len(lines))
    return "\n".join(lines[first:]).rstrip()


def _patch(blocks: Sequence[str], diff: str) -> str:
    """Return the last block with a diff applied; the diff's new side if it is not about that block."""
    lines = _DIFF_HEAD.sub("", diff).strip("\n").split("\n")
    old, new = ("\n".join(line[1:] for line in lines if line[:1] in (sign, " ")) for sign in "-+")
    before = blocks[-1] if blocks else ""
    return before.replace(old, new) if old.strip() and before.count(old) == 1 else new


def find_code(text: str) -> str:
    """Return the statements that stand among prose."""
    lines = _TAGS.sub("\n", text).split("\n")
    starts = [
        index
        for index, line in enumerate(lines)
        if not (_INNER_LINE.match(line) or (index and lines[index - 1].startswith("@")))
    ]
    kept: list[str] = []
    num_parsed, index = 0, 0
    while index < len(starts) and num_parsed < _MAX_PARSED_CHARS:
        for end in [*starts[index + 1 : index + _MAX_CHUNKS], len(lines)][:_MAX_CHUNKS]:
            chunk = "\n".join(lines[starts[index] : end]).rstrip()
            num_parsed += len(chunk)
            fault = _find_fault(chunk)
            if fault is None or not any(reason in fault for reason in _UNFINISHED):
                break
        # Markdown indents code behind a line of prose.
        forms = map(_clean, (chunk, textwrap.dedent(chunk.partition("\n")[2])))
        kept += [form for form in forms if _is_code(form)][:1]
        index = bisect_left(starts, end) if fault is None else index + 1
    return "\n".join(kept)


def _find_fault(code: str) -> str | None:
    try:
        ast.parse(code)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        return str(error)
    return None


def _assemble(codes: Sequence[str], names: Sequence[str]) -> tuple[str | None, int]:
    """Return the program of some blocks, and how good it is: for tested names as `_rank`.

    A whole program is 3 if it needs no other block, 2 if it does, 1 if it reads nothing, 0 if it is no such
    program. -2 is code that does not compile.
    """
    broken = next((code for code in reversed(codes) if code.strip() and not parse(code)), None)
    best, best_rank = broken, -3 if broken is None else -2
    blocks = dict(enumerate(filter(_is_code, codes)))
    for main in reversed(blocks):
        body = tree.body if (tree := parse(blocks[main])) else []
        rank = max(_rank(node, names[0]) for node in body) if names else 0
        if names and rank <= best_rank:
            continue
        needed, corrections = _find_needed(blocks, main, names)
        # A statement that raises does no harm beside a tested name, and a whole program must not print twice.
        texts = [blocks[one] if names else _defining_lines(blocks[one]) for one in needed]
        code = join_code(*texts, *(blocks[one] for one in (main, *corrections))).rstrip()
        if not names and any(map(_acts, body)) and _PRINTS.search(code):
            rank = 3 - bool(needed) if _READS.search(code) else 1
        if rank > best_rank:
            best, best_rank = code, rank
    return best, best_rank


def _find_needed(blocks: Mapping[int, str], main: int, names: Sequence[str]) -> tuple[list[int], list[int]]:
    """Return the blocks that a block needs, and those that correct it.

    A name that it lacks has the value of the last block that defines it; else of the last one before it. A
    later block of nothing but definitions of names in `main`, but for the tested one, corrects these.
    """
    scopes = {block: scope_of(code) for block, code in blocks.items()}
    own = scopes[main].binds
    corrections = [
        block
        for block, scope in scopes.items()
        if block > main and scope.is_pure and scope.binds <= own - set(names[:1])
    ]
    found = [main, *corrections]
    for block in found:
        for name in scopes[block].reads - scopes[block].binds - own - set(dir(builtins)):
            binding = [one for one in scopes if name in scopes[one].binds]
            binding = binding or [one for one in scopes if "*" in scopes[one].binds]
            defining = [one for one in binding if name in scopes[one].defines]
            place = max(defining or [one for one in binding if one < main] or binding, default=main)
            found += [place] if place not in found else []
    return sorted(found[1 + len(corrections) :]), corrections


def _defining_lines(code: str) -> str:
    """Return the lines of the statements of some code that define names."""
    tree, lines = parse(code), code.split("\n")
    kept: dict[int, None] = {}
    for node in tree.body if tree else ():
        if isinstance(node, _Definition | ast.Import | ast.ImportFrom | ast.Assign | ast.AnnAssign):
            first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])
            kept |= dict.fromkeys(range(first - 1, node.end_lineno or first))
    return "\n".join(lines[number] for number in kept)


def join_code(*texts: str) -> str:
    """Return pieces of code as one; imports from `__future__` must stand in front."""
    code = "\n\n".join(filter(None, texts))
    imports = _FUTURE.findall(code) if len(texts) > 1 else []
    return "\n".join([*imports, _FUTURE.sub("", code)]) if imports else code


def bound_names(code: str) -> Set[str]:
    """Return the names that some code binds at its top level, and Solution's methods."""
    body = tree.body if (tree := parse(code)) else []
    classes = [one for one in body if isinstance(one, ast.ClassDef) and one.name == "Solution"]
    methods = {inner.name for one in classes for inner in one.body if isinstance(inner, ast.FunctionDef)}
    return scope_of(code).binds | methods


def import_lines(code: str) -> str:
    """Return the import statements at the top level of some code, each a line; none if it is no Python."""
    tree = parse(code)
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)] if tree else []
    return "".join(f"{ast.unparse(node)}\n" for node in imports)


def used_names(code: str) -> tuple[str, ...]:
    """Return the distinct names in some code, outermost first; none if it is no Python."""
    tree = parse(code)
    names = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)] if tree else []
    return tuple(dict.fromkeys(names))


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


_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Scope(NamedTuple):
    """Names of a module: those that some code binds ('*': all of another one), reads, and defines."""

    binds: Set[str]
    reads: Set[str]
    defines: Set[str]
    """Of functions and classes."""
    is_pure: bool
    """Whether it only defines."""


@lru_cache(maxsize=256)
def scope_of(code: str) -> Scope:
    """Return the names in some code; none if it is no Python."""
    body = tree.body if (tree := parse(code)) else []
    binds, reads = (
        set[str]().union(*sets) for sets in zip((set(), set()), *map(names_of, body), strict=True)
    )
    defined = [node.name for node in body if isinstance(node, _Definition)]
    return Scope(binds, reads, set(defined), len(defined) == len(body))


def names_of(node: ast.stmt) -> tuple[set[str], set[str]]:
    """Return the names of the module that a statement binds, and those that it reads; '*' for all."""
    nodes: list[Any] = list(ast.walk(node))
    names = [one for one in nodes if isinstance(one, ast.Name)]
    reads = {one.id for one in names if isinstance(one.ctx, ast.Load)}
    binds = {one.id for one in names if not isinstance(one.ctx, ast.Load)}
    named = [one for one in nodes if isinstance(getattr(one, "name", None), str)]
    binds |= {(getattr(one, "asname", None) or one.name).partition(".")[0] for one in named}
    reads -= {one.arg for one in nodes if isinstance(one, ast.arg)}
    return ({node.name}, reads - binds) if isinstance(node, _Definition) else (binds, reads)


def _rank(node: ast.stmt, name: str) -> int:
    """Return how well a statement defines a name: 2 whole, 1 by a value, 0 as a stub or otherwise, -1 not."""
    if isinstance(node, ast.ClassDef) and node.name == "Solution" != name:
        return max((_rank(one, name) for one in node.body if isinstance(one, ast.FunctionDef)), default=-1)
    binds, reads = names_of(node)
    if name not in binds:
        return -1
    if isinstance(node, _Definition):
        values = [inner.value for inner in node.body if isinstance(inner, ast.Expr)]
        is_cut = any(isinstance(one, ast.Constant) and one.value is ... for one in values)
        acts = any(does_something(inner) for inner in node.body if not isinstance(inner, ast.Pass))
        return 2 if acts and not is_cut else 0
    if isinstance(node, ast.Import | ast.ImportFrom):
        return 0
    return -1 if name in reads else int(not isinstance(getattr(node, "value", None), ast.Constant))


def does_something(node: ast.stmt) -> bool:
    """Whether a statement is more than a bare name, number or annotation, which are valid Python."""
    if isinstance(node, ast.AnnAssign) and node.value is None:
        return False
    return not isinstance(node, ast.Expr) or any(
        isinstance(part, ast.Call | ast.Yield | ast.Await) for part in ast.walk(node)
    )


def _acts(node: ast.stmt) -> bool:
    """Whether a statement does more than to define names: it belongs to the main part of a program."""
    if isinstance(node, _Definition | ast.Import | ast.ImportFrom):
        return False
    is_value = isinstance(node, ast.Assign | ast.AnnAssign | ast.Expr)
    return not is_value or any(isinstance(inner, ast.Call) for inner in ast.walk(node))


# The verdict on a reply.

WALL_S = 5.0
"""Wall time (seconds) of all tests of one reply together."""
_RESULTS = ("passed", "failed", "errored", "timed_out")
SPARE_VERIFY_S = 20.0
"""Additional time of a judgement: start and end of the sandbox, and the judge's own limit."""


async def judge_reply(text: str, job: JudgeJob, spec: SandboxSettings, head: str = "") -> Outcome:
    """Run a job's tests over the program of a reply, behind the job's own code.

    Right if every test passed; `format_ok`: the code compiles and defines the first tested name. `head` is
    that of `extract_python`. Raises: like `judge_python`.
    """
    code = extract_python(text, job.names, head)
    if code is None or not (job.names[0] in bound_names(code) if job.names else parse(code)):
        return Outcome(parts={"correct": 0.0}, is_correct=False, format_ok=False, extracted=code)
    job = replace(job, source=join_code(job.source, code))
    verdict = await judge_python(job, min_isolation=spec.min_isolation, sandbox=spec.sandbox)
    return Outcome(
        parts={"correct": float(verdict.is_right)},
        is_correct=verdict.is_right,
        format_ok=True,
        extracted=code,
        timed_out=verdict.num_timed_out > 0,
        isolation=verdict.isolation,
        metrics={
            **{f"tests_{name}": getattr(verdict, f"num_{name}") for name in _RESULTS},
            "tests_total": verdict.num_tests,
            "tests_passed_frac": verdict.num_passed / max(1, verdict.num_tests),
        },
    )


def fence(code: str) -> str:
    """Return code in a fenced block, as tasks request it."""
    return f"```python\n{code.strip(chr(10))}\n```"
