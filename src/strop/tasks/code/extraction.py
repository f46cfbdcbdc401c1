"""Find the Python program in a reply. Nothing here runs it.

A reply is text around code: reasoning, tags, fences that may be truncated or opened by the prompt, sessions,
diffs, prose. It is cut into blocks of code that compile. The last block that defines the tested name whole
decides; of other blocks only those statements count that it needs, so a later example of use does not. Where
no name is tested, the last whole program decides: one that reads, prints, and needs no other block.
"""

from __future__ import annotations

import ast
import re
import textwrap
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import islice

from strop.rollout import Outcome
from strop.tasks.answers import text_after_thinking
from strop.tasks.code.python_judge import JudgeVerdict
from strop.tasks.code.statements import (
    Statement,
    does_something,
    find_needed,
    methods,
    parse,
    read_statements,
)

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
_UNFINISHED = ("was never closed", "unterminated triple-quoted")
_FUTURE = re.compile(r"^from __future__ import .*$", re.MULTILINE)
_READS, _PRINTS = re.compile(r"\b(?:input|stdin|fileinput)\b|open\(0"), re.compile(r"\b(?:print|stdout)\b")


def extract_python(text: str, names: Sequence[str] = ()) -> str | None:
    """Return the program of a reply, which need not compile; None if there is none.

    `names` are the tested names, the entry point first; none: the program runs as a whole.
    """
    answer = _answer(text)
    best, best_rank, enough = None, -3, 2 if names else 1
    for part in _parts(answer or ""):
        blocks, outside = _split(part)
        inline = [one for match in _INLINE.finditer(outside) if parse(one := _clean(match[2]))]
        for codes in (blocks, [*blocks, *inline, find_code(outside)]):
            code, rank = _assemble(codes, names)
            if rank > best_rank:
                best, best_rank = code, rank
            if rank >= enough:
                return best
    return best


def extract_completion(text: str, head: str, name: str) -> str | None:
    """Return `head`, which ends in a function's signature and docstring, with a reply as its body.

    A body that lost its indentation, or that of its first line, is indented. None if it is no such code.
    """
    for part in _parts(_answer(text) or ""):
        blocks, outside = _split(part, is_raw=True)
        for piece in (*blocks, outside):
            body = _clean(piece)
            bodies = [body] if body.startswith(" ") else [textwrap.indent(body, "    "), f"    {body}"]
            programs = [head + body for body in bodies]
            for program in (*programs, find_code(programs[-1])):
                if _has_body(program, name):
                    return program
    return None


def _has_body(program: str, name: str) -> bool:
    tree = parse(program)
    functions = [one for one in tree.body if isinstance(one, ast.FunctionDef)] if tree else []
    return any(one.name == name and any(map(does_something, one.body)) for one in functions)


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


def _split(text: str, *, is_raw: bool = False, is_inner: bool = False) -> tuple[list[str], str]:
    """Return the blocks of code in a text, those that compile in their repaired form, and the other text.

    Raw blocks are not repaired. Fences are sought inside a page of Markdown, which is itself one.
    """
    if _is_code(_clean(text)) and not text.lstrip().startswith("~~~"):
        # Its fences, if any, are in strings and comments; `~~~python` is Python, too.
        return [_clean(text)], ""
    blocks: list[str] = []
    outside: list[str] = []
    position = 0
    while opening := _OPENING.search(text, position):
        before, info = text[position : opening.start()], (opening["info"] or "").strip()
        position = opening.end()
        if not (info or opening["late"] or blocks) and _is_code(_clean(before)):
            # The prompt opened the fence that this one closes.
            blocks.append(_clean(before))
            continue
        outside.append(before)
        if "`" in info and not info.endswith("```"):
            outside.append(opening[0])
            continue
        tag = "py" if opening["late"] else (_TAG_WORD.match(info) or "")[1].lower()
        first = info if _CODE_IN_INFO.match(info) else ""
        if info.endswith("```"):
            code = (first or info.partition(" ")[2]).rstrip("`")
            blocks.append(_repair(code) or code)
            continue
        fence = opening["late"] or opening["fence"]
        is_diff, is_page = tag in ("diff", "patch"), tag in ("markdown", "md")
        is_ours = bool(first) or tag in _OTHER_TAGS or tag.startswith("py") or tag.endswith(".py") or is_diff
        code, position = _read_block(
            text, position, fence, first, is_sought=is_ours and not is_diff and len(blocks) < _MAX_BLOCKS
        )
        if ">" in (opening["quote"] or ""):
            code = re.sub(r"^[ \t]*> ?", "", code, flags=re.MULTILINE)
        if is_page and not is_inner:
            blocks += _split(code, is_raw=is_raw, is_inner=True)[0]
        elif is_raw and is_ours:
            blocks.append(code)
        elif is_ours:
            blocks.append(_patch(blocks, code) if is_diff else _repair(code) or code)
    return blocks[-_MAX_BLOCKS:], "".join([*outside, text[position:]])


def _read_block(text: str, start: int, fence: str, first: str, *, is_sought: bool) -> tuple[str, int]:
    """Return the code behind an opening fence, and where the text goes on.

    The code ends at the first fence before which it compiles, because a fence may stand in a docstring; else
    at the first one, or at the end of the text, where the code may go over into prose.
    """
    mark = f"{fence[0]}{{{len(fence)},}}"
    first = f"{first}\n" if first else ""
    closing = re.compile(rf"^[ \t>]*{mark}([^\n]*)$", re.MULTILINE)
    cuts = [*islice(closing.finditer(text, start), _MAX_CUTS)]
    for cut in cuts if is_sought else ():
        code = first + text[start : cut.start()]
        if _repair(code) is not None:
            # Another fence with a tag opens the next block: this one was not closed.
            return code, cut.start() if cut[1].strip() else cut.end()
    end = cuts[0].start() if cuts else len(text)
    for late in islice(
        re.finditer(rf"(?<!{fence[0]}){mark}+[ \t]*$", text[start:end], re.MULTILINE), _MAX_CUTS
    ):
        code = first + text[start : start + late.start()]
        if is_sought and _repair(code) is not None:
            return code, start + late.end()
    for cut in cuts:
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
    lines = [_expand_indent(line) for line in code.split("\n")]
    while lines and (not lines[-1].strip() or re.fullmatch(r"\s*(?:`{3,}|~{3,})\s*", lines[-1])):
        lines.pop()
    first = next((index for index, line in enumerate(lines) if line.strip()), len(lines))
    return "\n".join(lines[first:]).rstrip()


def _expand_indent(line: str) -> str:
    body = line.lstrip(" \t")
    return line[: len(line) - len(body)].expandtabs(4) + body


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
        chunk, index_after = "", index + 1
        for end in [*starts[index + 1 : index + _MAX_CHUNKS], len(lines)][:_MAX_CHUNKS]:
            chunk = "\n".join(lines[starts[index] : end]).rstrip()
            num_parsed += len(chunk)
            try:
                ast.parse(chunk)
            except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
                if not any(reason in str(error) for reason in _UNFINISHED):
                    break
            else:
                index_after = bisect_left(starts, end)
                break
        # Markdown indents code behind a line of prose.
        for form in (chunk, textwrap.dedent(chunk.partition("\n")[2])):
            if _is_code(_clean(form)):
                kept.append(_clean(form))
                break
        index = index_after
    return "\n".join(kept)


def _assemble(codes: Sequence[str], names: Sequence[str]) -> tuple[str | None, int]:
    """Return the program of some blocks, and how good it is: for tested names as `Statement.defines`.

    A whole program is 3 if it needs no other block, 2 if it does, 1 if it reads nothing, 0 if it is no such
    program. -2 is code that does not compile.
    """
    trees = {block: parse(code) for block, code in enumerate(codes) if _is_code(code)}
    statements = [one for block, tree in trees.items() if tree for one in read_statements(tree, block)]
    best, best_rank = next((code for code in reversed(codes) if code.strip() and not parse(code)), None), -2
    if best is None:
        best_rank = -3
    for block in reversed(trees):
        own = [one for one in statements if one.block == block]
        if names:
            rank = max(one.defines(names[0]) for one in own)
            if rank > best_rank:
                needed = find_needed(statements, block, names) if rank >= 0 else own
                best_rank, best = rank, _render(codes, statements, needed)
            continue
        needed = find_needed(statements, block, ())
        code = _render(codes, statements, needed)
        does_print = any(one.acts for one in own) and _PRINTS.search(code)
        rank = 3 - any(one.block != block for one in needed) if _READS.search(code) else 1
        if (rank := rank if does_print else 0) > best_rank:
            best, best_rank = code, rank
    return best, best_rank


def _render(codes: Sequence[str], statements: Sequence[Statement], kept: Sequence[Statement]) -> str:
    """Return the kept statements as text, each block with its comments."""
    texts = []
    for block in dict.fromkeys(one.block for one in kept):
        others = {id(one.node): one.node for one in statements if one.block == block}
        nodes = [others.pop(id(one.node)) for one in kept if one.block == block]
        dropped = {number for node in others.values() for number in _lines_of(node)}
        lines = codes[block].split("\n")
        if any(not dropped.isdisjoint(_lines_of(node)) for node in nodes):
            # They share a line with what is dropped.
            for node in nodes:
                whole = "\n".join(lines[number - 1] for number in _lines_of(node))
                is_decorated = bool(getattr(node, "decorator_list", ()))
                texts.append(whole if is_decorated else ast.get_source_segment(codes[block], node) or whole)
            continue
        texts.append("\n".join(line for n, line in enumerate(lines, 1) if n not in dropped).strip("\n"))
    return join_code(*texts).rstrip()


def join_code(*texts: str) -> str:
    """Return pieces of code as one; imports from `__future__` must stand in front."""
    code = "\n\n".join(texts)
    imports = _FUTURE.findall(code) if len(texts) > 1 else []
    return "\n".join([*imports, _FUTURE.sub("", code)]) if imports else code


def _lines_of(node: ast.stmt) -> range:
    first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])
    return range(first, (node.end_lineno or first) + 1)


def compiles(code: str) -> bool:
    """Whether some text is Python."""
    return parse(code) is not None


def defines(code: str, name: str) -> bool:
    """Whether code compiles and binds a name at its top level, or as a method of a class Solution."""
    return name in bound_names(code)


def bound_names(code: str) -> frozenset[str]:
    """Return the names that some code binds at its top level, and Solution's methods."""
    tree = parse(code)
    if tree is None:
        return frozenset()
    classes = [one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == "Solution"]
    inner = [frozenset(method.name for method in methods(one)) for one in classes]
    return frozenset().union(*(one.binds for one in read_statements(tree, 0)), *inner)


def import_lines(code: str) -> tuple[str, ...]:
    """Return the import statements at the top level of some code; none if it is no Python."""
    tree = parse(code)
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)] if tree else []
    return tuple(ast.unparse(node) for node in imports)


def used_names(code: str) -> tuple[str, ...]:
    """Return the distinct names in some code, outermost first; none if it is no Python."""
    tree = parse(code)
    names = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)] if tree else []
    return tuple(dict.fromkeys(names))


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
