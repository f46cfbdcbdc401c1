"""Tests of finding code in replies. F stands for a fence in the comments of the reference's vectors."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.tasks.code.extraction import (
    MAX_CODE_CHARS,
    compiles,
    defines,
    extract_body,
    extract_python,
)

F = "```"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("def f(x):\n  return x\n[DONE]\ngarbage", "def f(x):\n  return x"),
        (f"Sure!\n{F}python\ndef f(x): return x\n{F}\nExplanation", "def f(x): return x"),
        (f"def f(x): return x\n{F}\nThis code..", "def f(x): return x"),
        (f"{F}python\ndef f(x): return x", "def f(x): return x"),
        ("[BEGIN]\ndef f(x): return x\n[DONE]\n[BEGIN]\ndef g..", "def f(x): return x"),
        (f"{F}python\nhelper\n{F} text {F}python\ndef f..\n{F}", "helper\n\ndef f.."),
        ("", None),
        ("I think that the sum is four.", None),
    ],
)
def test_vectors_of_the_reference(text: str, code: str | None) -> None:
    assert extract_python(text, entry_point="f") == code


@pytest.mark.parametrize(
    ("text", "code"),
    [
        # Rule 1: what was thought is not what was answered.
        (
            f"<think>{F}python\ndef f(): return 1\n{F}</think>\n{F}py\ndef f(): return 2\n{F}",
            "def f(): return 2",
        ),
        (f"<think>no end\n{F}python\ndef f(): return 1\n{F}", None),
        ("<think>a</think><think>\ndef f(): return 1", None),
        # Rule 2: the first [DONE], then the last [BEGIN] before it.
        ("[BEGIN]\nold\n[BEGIN]\ndef f(): return 1\n[DONE]", "def f(): return 1"),
        # Rule 3: a tag of Python wins over none, other tags are no code.
        (f"{F}\ndef f(): return 1\n{F}\n{F}Python3\ndef f(): return 2\n{F}", "def f(): return 2"),
        (f"{F}\ndef f(): return 1\n{F}", "def f(): return 1"),
        (f"{F}json\n[1]\n{F}\nno code", None),
        # Rule 3: a join that does not compile gives way to the last block that defines the name.
        (
            f"{F}python\ndef f(): return 1\n{F}\n{F}python\ndef f(): return 2\n{F}\n{F}python\n>>> f()\n{F}",
            "def f(): return 2",
        ),
        (f"{F}python\nn = 1\n{F}\n{F}python\ndef f(): return n\n{F}", "n = 1\n\ndef f(): return n"),
        # Rule 4, beside a closed block that is no answer.
        (f"{F}\n$ run it\n{F}\n{F}python\ndef f(): return 1", "def f(): return 1"),
        # Rule 5: the first fence closes what the prompt opened, whatever follows.
        (f"def f(): return 1\n{F}\nUse:\n{F}python\nf()\n{F}", "def f(): return 1"),
        # Rule 6: prose in front goes line by line.
        ("Here you are:\nit is short.\n\ndef f(): return 1", "def f(): return 1"),
        ("no!\n" * 20 + "def f(): return 1", "def f(): return 1"),
        ("no!\n" * 21 + "def f(): return 1", None),
        # Rule 7.
        ("def f():\r\n\treturn 1\r\n", "def f():\n    return 1"),
        (f"def f(): return 1\n{F}", "def f(): return 1"),
        # A fence in a list has its indentation in common with the code.
        (f"1. So:\n   {F}python\n   def f():\n     return 1\n   {F}", "def f():\n  return 1"),
        # Inline code is no fence.
        (f"Call {F}f(){F} here\n{F}python\ndef f(): return 1\n{F}", "def f(): return 1"),
        # A fence inside of a string is the string's.
        (
            f'def f():\n    """\n    {F}\n    x\n    {F}\n    """\n    return 1',
            f'def f():\n    """\n    {F}\n    x\n    {F}\n    """\n    return 1',
        ),
        # Longer than any reply.
        ("def f(): return 1\n" + "#" * MAX_CODE_CHARS, None),
    ],
)
def test_rules(text: str, code: str | None) -> None:
    assert extract_python(text, entry_point="f") == code


@pytest.mark.parametrize("text", ["asdf", "0", "a", "{}", "123!!!", " \n", "'text'", "</s>"])
def test_a_word_is_no_code(text: str) -> None:
    assert extract_python(text) is None


_PIECES = st.sampled_from(
    (
        *(F, f"{F}python\n", f"\n{F}\n", "````\n", "[DONE]", "[BEGIN]", "<think>", "</think>"),
        *("def f(x):\n", "  return x\n", "x = 1\n", "text ", "'''", '"', "\\\n", "#", "(", "\0"),
        *("\t", "\r\n", "\r", "\n", "\x0c", "  "),
    )
)


@given(st.one_of(st.text(), st.lists(_PIECES, max_size=12).map("".join)))
def test_extraction_never_raises_and_is_done_once(text: str) -> None:
    for name in (None, "f"):
        code = extract_python(text, entry_point=name)
        if code is not None and compiles(code):
            assert extract_python(code, entry_point=name) == code


@pytest.mark.parametrize(
    "code", ["(" * 5000, "-" * 200_000 + "1", "x" * 10**6 + "(", "\0", "\ud800", "9" * 5000]
)
def test_hostile_source_does_not_compile_or_does(code: str) -> None:
    assert isinstance(compiles(code), bool)


@pytest.mark.parametrize(
    ("code", "is_defined"),
    [
        ("def f(): pass", True),
        ("f = lambda: 1", True),
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
def test_defines(code: str, is_defined: bool) -> None:
    assert defines(code, "f") is is_defined


HEAD = 'def f(x):\n    """Add one."""\n'


@pytest.mark.parametrize(
    ("text", "body"),
    [
        ("    return x + 1\n", "    return x + 1"),
        ("return x + 1", "    return x + 1"),
        (f"{F}python\n    return x + 1\n{F}", "    return x + 1"),
        (f"    return x + 1\n{F}\nIt adds.", "    return x + 1"),
        ("\n\treturn x", "\n    return x"),
        ("", None),
        ("    ", None),
        ("asdf", None),
        ("It adds one.", None),
    ],
)
def test_a_body_is_found_with_its_indentation(text: str, body: str | None) -> None:
    assert extract_body(text, HEAD, "f") == body
