"""Finding programs in replies: the forms of `forms/extraction.jsonl`, and what no text may do."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.tasks.code.extraction import MAX_CODE_CHARS, extract_python, join_code, parse
from strop.tasks.code.runner import load_program
from tests.tasks.code.test_humaneval import SQUARES

F = "```"
FORMS = [
    json.loads(line)
    for line in (Path(__file__).parent / "forms/extraction.jsonl").read_text("utf-8").splitlines()
]
TESTS = {
    "double": "assert (double(1), double(0), double(-3)) == (2, 0, -6)",
    "swap": "assert list(swap(1, 2)) == [2, 1]",
    "squares": "assert squares(3) == [0, 1, 4]",
}


def find_program(reply: str, name: str) -> str | None:
    """Return the program that the tasks would judge."""
    head = SQUARES["prompt"] if name == "squares" else ""
    code = extract_python(reply, (name,) if name else (), head)
    return None if code is None else join_code(head, code)


def run(program: str, name: str, stdin: str = "") -> str | None:
    """Return what one of the forms, which are harmless, prints; None if it fails."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as output:
        patch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        patch.setattr("builtins.open", lambda *_: io.StringIO(stdin))
        patch.setattr("sys.setrecursionlimit", lambda _: None)
        patch.setattr("sys.argv", ["program.py"])
        patch.setitem(sys.modules, "candidate", None)
        try:
            if name:
                exec(TESTS[name], load_program(program, (name,), has_methods=name == "swap"))
            else:
                exec(program, {"__name__": "__main__"})
        except (Exception, SystemExit):
            return None
    return output.getvalue()


@pytest.mark.filterwarnings("ignore:invalid escape")
@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form['name']}: {form['why']}")
def test_the_program_of_a_reply_has_the_right_verdict(form: dict[str, Any]) -> None:
    name = form["name"]
    program = find_program(form["reply"], name)
    if name or program is None:
        is_right = program is not None and run(program, name) is not None
    else:
        printed = [run(program, "", stdin) for stdin in ("1 2\n", "3 -3\n")]
        is_right = [(text or "").split() for text in printed] == [["3"], ["0"]]
    assert is_right is form["right"]


@pytest.mark.parametrize("text", ["asdf", "0", "a", "{}", "123!!!", " \n", "'text'", "</s>", "x: int"])
def test_a_word_is_no_code(text: str) -> None:
    assert extract_python(text) is None


def test_comments_stay_and_a_text_longer_than_any_reply_is_no_code() -> None:
    code = "# Twice.\ndef f(x):\n    return 2 * x  # fast"
    assert extract_python(f"{F}\n{code}\n{F}\n{F}\nprint(f(2))\n{F}", ("f",)) == code
    assert extract_python(code + "\n" + "#" * MAX_CODE_CHARS, ("f",)) is None


_PIECES = st.sampled_from(
    (
        *(F, f"{F}python\n", f"\n{F}\n", "````\n", "~~~\n", "[DONE]", "[BEGIN]", "<think>", "</think>"),
        *("def f(x):\n", "  return x\n", "x = 1\n", "f(x)\n", "text ", "'''", '"', "\\\n", "#", "(", "\0"),
        *("\t", "\r\n", "\r", "\n", "\x0c", "  ", "<answer>", ">>> ", "+", "@", "`"),
    )
)


@given(st.one_of(st.text(), st.lists(_PIECES, max_size=12).map("".join)))
def test_extraction_never_raises_and_is_done_once(text: str) -> None:
    for names in ((), ("f",)):
        code = extract_python(text, names)
        if code is not None and parse(code):
            assert extract_python(code, names) == code
    extract_python(text, ("squares",), SQUARES["prompt"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "unit",
    [
        f"{F}\n",
        f"{F}python\n(\n",
        "x = (\n",
        "<answer>",
        "It's (so\n",
        "> `",
        "@x(",
        "`",
        "x = 1\n",
        "~~~md\n",
    ],
)
def test_hostile_replies_take_no_minutes(unit: str) -> None:
    started = time.process_time()
    extract_python(("It is so:\n-" + unit * MAX_CODE_CHARS)[: MAX_CODE_CHARS - 1] + "x", ("f",))
    assert time.process_time() - started < 10.0


@pytest.mark.parametrize(
    "code", ["(" * 5000, "-" * 200_000 + "1", "x" * 10**6 + "(", "\0", "\ud800", "9" * 5000]
)
def test_hostile_source_does_not_compile_or_does(code: str) -> None:
    parse(code)


@pytest.mark.parametrize(
    ("code", "is_defined"),
    [
        ("def f(): pass", True),
        ("from m import g as f", True),
        ("class f: pass", True),
        ("try:\n    def f(): pass\nexcept E: pass", True),
        ("class Solution:\n    def f(self): pass", True),
        ("class Other:\n    def f(self): pass", False),
        ("def g():\n    def f(): pass", False),
        ("g(f)", False),
        ("def f(", False),
    ],
)
def test_a_program_defines_the_tested_name(code: str, is_defined: bool) -> None:
    assert extract_python(code, ("f",)) == (code if is_defined else None)
