"""Find the Python program in a reply. Nothing here runs it.

A reply is text around code: reasoning, tags, fences that may be truncated or opened by the prompt, sessions,
diffs, prose. It is cut into blocks of code that compile. The last block that defines the tested name whole
decides; of other blocks only those statements count that it needs, so a later example of use does not. Where
no name is tested, the last whole program decides: one that reads, prints, and needs no other block.
"""

from __future__ import annotations

import ast
import builtins
import dis
import re
import sys
import textwrap
import warnings
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from types import CodeType

from strop.rollout import Outcome
from strop.tasks.answers import text_after_thinking
from strop.tasks.code.python_judge import JudgeVerdict

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
        blocks, outside = _split(part)
        for piece in (*blocks, outside):
            body = _clean(piece)
            bodies = [body] if body.startswith(" ") else [textwrap.indent(body, "    "), f"    {body}"]
            programs = [head + body for body in bodies]
            for program in (*programs, find_code(programs[-1])):
                tree = parse(program)
                functions = [one for one in tree.body if isinstance(one, ast.FunctionDef)] if tree else []
                if any(one.name == name and any(map(does_something, one.body)) for one in functions):
                    return program
    return None


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


def _split(text: str, *, is_inner: bool = False) -> tuple[list[str], str]:
    """Return the blocks of code in a text, those that compile in their repaired form, and the other text.

    Fences are sought inside a page of Markdown, which is itself one.
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
            blocks += _split(code, is_inner=True)[0]
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
    broken = next((code for code in reversed(codes) if code.strip() and not parse(code)), None)
    found: list[tuple[str | None, int]] = [(broken, -3 if broken is None else -2)]
    for block in reversed(trees):
        own = [one for one in statements if one.block == block]
        rank = max(one.defines(names[0]) for one in own) if names else 0
        if names and rank <= max(better for _, better in found):
            continue
        needed = find_needed(statements, block, names) if rank >= 0 else own
        code = _render(codes, statements, needed)
        if not names and any(one.acts for one in own) and _PRINTS.search(code):
            rank = 3 - any(one.block != block for one in needed) if _READS.search(code) else 1
        found.append((code, rank))
    return max(found, key=lambda one: one[1])


def _render(codes: Sequence[str], statements: Sequence[Statement], kept: Sequence[Statement]) -> str:
    """Return the kept statements as text, each block with its comments."""
    texts = []
    for block in dict.fromkeys(one.block for one in kept):
        own = {id(one.node) for one in kept if one.block == block}
        nodes = [one.node for one in statements if one.block == block]
        mine, dropped = ([n for n in nodes if (id(n) in own) is is_kept] for is_kept in (True, False))
        gone = {number for node in dropped for number in _lines_of(node)}
        if any(not gone.isdisjoint(_lines_of(node)) for node in mine):
            # They share a line with what is dropped.
            texts.append(ast.unparse(ast.Module(mine, [])))
        else:
            lines = codes[block].split("\n")
            texts.append("\n".join(line for n, line in enumerate(lines, 1) if n not in gone).strip("\n"))
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
    methods = {inner.name for one in classes for inner in one.body if isinstance(inner, ast.FunctionDef)}
    return frozenset(methods).union(*(one.binds for one in read_statements(tree)))


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
_RESULTS = ("passed", "failed", "errored", "timed_out")
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


# What the top-level statements of some Python bind, change and need.

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


class Statement:
    """A statement at the top level of a block of code: which names of the module it uses, and how."""

    def __init__(self, node: ast.stmt, block: int) -> None:
        self.node, self.block = node, block
        self.is_definition = isinstance(node, _Definition)
        self.attributes = {inner.attr for inner in ast.walk(node) if isinstance(inner, ast.Attribute)}
        self.binds, self.reads = set[str](), set[str]()
        # Of those that it reads: used at once, not only by functions; with the functions that it calls.
        self.runs, self.reached = set[str](), set[str]()
        self.changes = set[str]()
        """Names whose objects it changes, or binds by `global`."""
        if not (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
            self._read_names()
        for inner in ast.walk(node):
            target = inner.func if isinstance(inner, ast.Call) else inner
            is_stored = isinstance(inner, ast.Attribute | ast.Subscript) and not isinstance(
                inner.ctx, ast.Load
            )
            if is_stored or (target is not inner and isinstance(target, ast.Attribute)):
                while isinstance(target, ast.Attribute | ast.Subscript):
                    target = target.value
                self.changes |= {target.id} & self.reads if isinstance(target, ast.Name) else set()

    def _read_names(self) -> None:
        is_class = isinstance(self.node, ast.ClassDef)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                outer = compile(ast.Module([self.node], []), "<statement>", "exec", dont_inherit=True)
            except RecursionError:  # It compiled a few frames higher: no statement of a real program.
                return
        codes = [outer]
        for code in codes:
            codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
            for instruction in dis.get_instructions(code):
                action, _, scope = instruction.opname.partition("_")
                if action == "LOAD" and scope.endswith(("NAME", "GLOBAL", "GLOBALS")):
                    self.reads.add(instruction.argval)
                    # The body of a class runs at once, that of its methods later.
                    if code is outer or not (self.is_definition and (not is_class or scope != "NAME")):
                        self.runs.add(instruction.argval)
                elif action in ("STORE", "DELETE") and scope in ("NAME", "GLOBAL"):
                    if code is outer:
                        self.binds.add(instruction.argval)
                    elif scope == "GLOBAL":
                        self.changes.add(instruction.argval)

    @property
    def sets_process(self) -> bool:
        """Whether it sets something for the process, such as the recursion limit, or imports all names."""
        if isinstance(self.node, ast.ImportFrom):
            return self.node.module == "__future__" or self.node.names[0].name == "*"
        return not self.is_definition and bool(self.attributes & _SETTINGS)

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
        calls = any(isinstance(inner, ast.Call) for inner in ast.walk(self.node))
        is_value = isinstance(self.node, ast.Assign | ast.AnnAssign | ast.Expr)
        return not isinstance(self.node, _Definition | ast.Import | ast.ImportFrom) and (
            calls or not is_value
        )

    def defines(self, name: str) -> int:
        """Return how well it defines a name: 3 whole, 2 by a value, 1 by an import, 0 as a stub, -1 not."""
        node = self.node
        if isinstance(node, ast.ClassDef) and node.name == "Solution" != name:
            methods = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == name]
            return max(map(_wholeness, methods), default=-1)
        if name not in self.binds:
            return -1
        if isinstance(node, _Definition):
            return _wholeness(node)
        value = getattr(node, "value", None)
        if isinstance(node, ast.Import | ast.ImportFrom) or (
            isinstance(value, ast.Constant) and name not in self.reads
        ):
            return 1
        return -1 if name in self.reads else 2


def _wholeness(node: _Definition) -> int:
    expressions = (inner.value for inner in node.body if isinstance(inner, ast.Expr))
    is_cut = any(isinstance(one, ast.Constant) and one.value is ... for one in expressions)
    does_something_else = (does_something(inner) for inner in node.body if not isinstance(inner, ast.Pass))
    return 3 if not is_cut and any(does_something_else) else 0


def does_something(node: ast.stmt) -> bool:
    """Whether a statement is more than a bare name, number or annotation, which are valid Python."""
    if isinstance(node, ast.AnnAssign) and node.value is None:
        return False
    return not isinstance(node, ast.Expr) or any(
        isinstance(part, ast.Call | ast.Yield | ast.Await) for part in ast.walk(node)
    )


def read_statements(tree: ast.Module, block: int = 0) -> list[Statement]:
    """Return the statements of a block of code that compiles."""
    return [Statement(node, block) for node in tree.body]


def find_needed(statements: list[Statement], main: int, names: Sequence[str]) -> list[Statement]:
    """Return the statements that the names need, in the order in which they must run.

    A name has the value that the block `main` gives it; else that of the last block that defines it, else of
    the last block before. A later block of nothing but definitions of names in `main` corrects these. What
    else stands in `main` is kept, too, unless it uses the program: it calls one of the names, asserts, reads
    the input, prints, or needs a package that nothing else needs. Without names all of `main` is needed.
    """
    functions = {one.node.name: one for one in statements if isinstance(one.node, _Definition)}
    own = _union(one.binds for one in statements if one.block == main)
    known = _union(one.binds for one in statements) | set(dir(builtins))
    outer = _union(one.binds for one in statements if one.is_foreign) | _OUTER | set(names)
    others = {s.block for s in statements if not (s.is_definition and s.binds <= own - set(names[:1]))}
    corrections = {one.block for one in statements if one.block > main} - others
    for one in statements:
        ahead = one.runs
        while ahead:
            one.reached |= ahead
            ahead = _union(functions[name].reads for name in ahead & functions.keys()) - one.reached

    def is_affected(one: Statement, places: Mapping[str, int]) -> bool:
        """Whether a statement gives one of the names its value, in its block, or changes it."""
        affected = one.binds if one.is_definition else one.binds | one.changes
        affected |= _union(functions[name].changes for name in one.reached & functions.keys())
        if isinstance(one.node, ast.Assert) or one.reached.intersection(functions, names):
            affected = one.binds
        return any(places.get(name) == one.block for name in affected)

    def is_use(one: Statement) -> bool:
        called = [functions[name] for name in one.reached & functions.keys()]
        attributes = _union(other.attributes for other in (called if one.is_definition else [one, *called]))
        is_other = isinstance(one.node, ast.Assert | ast.Raise | ast.Import | ast.ImportFrom)
        return is_other or bool((attributes | one.reached) & outer) or not one.runs <= known

    def place(name: str) -> int:
        """Return the block that gives a name its value."""
        binding = [one for one in statements if name in one.binds]
        defining = [one.block for one in binding if one.is_definition]
        if name in own:
            return max([main, *(block for block in defining if block in corrections)])
        before = [one.block for one in binding if one.block < main]
        return max(defining or before or [one.block for one in binding], default=main)

    places: dict[str, int] = {}

    def close(kept: set[Statement], beside: set[Statement]) -> set[Statement]:
        """Add to `kept` what it needs, and what those `beside` need when they are loaded."""
        while ahead := (
            _union(one.reads for one in kept).union(names, *(one.runs for one in beside)) - places.keys()
        ):
            places.update({name: place(name) for name in ahead})
            is_dynamic = bool(ahead & _DYNAMIC)
            kept |= {
                one for one in statements if is_affected(one, places) or (is_dynamic and one.block == main)
            }
        return kept

    first = {
        one
        for one in statements
        if (one.block == main and (not names or one.defines(names[0]) >= 0))
        or (one.block <= main and one.sets_process)
    }
    kept = close(first, set())
    beside = {one for one in statements if one.block == main and one not in kept and not is_use(one)}
    kept = close(kept, beside) | beside
    # What other blocks define stands before `main`, which may need it at once; corrections stand behind.
    found = [one for one in statements if one in kept]
    return sorted(found, key=lambda one: 2 if one.block in corrections else int(one.block == main))


def _union(sets: Iterable[set[str]]) -> set[str]:
    return set[str]().union(*sets)
