"""Tests of equality of final answers: normal forms, numbers and symbols."""

from __future__ import annotations

import logging
import re
import time
from fractions import Fraction
from importlib.util import find_spec

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.errors import ConfigError
from strop.tasks import mathematics
from strop.tasks.mathematics import (
    answers_equal,
    equal_by_symbols,
    normal_form,
    warm_up,
)

needs_math_verify = pytest.mark.skipif(not find_spec("math_verify"), reason="needs the extra 'tasks'")


@pytest.mark.parametrize(
    ("answer", "form"),
    [
        ("\u22125\u03c0", "-5\u03c0"),
        (r"\left( 1,\, 2 \right)", "(1,2)"),
        (r" \[$5$\]. ", "5"),
        ("5!", "5!"),
        (r"\,", ""),
        ("3 1/2", r"3\frac{1}{2}"),
        ("\u00bd x", r"\frac12x"),
        (r"1 \text{ and } 2", "1,2"),
        ("1 or 2", "1,2"),
        (r"90^{\circ}", "90"),
        ("90 degrees", "90"),
        (r"50\%", "50"),
        (r"\$18.90", "18.90"),
        (r"5\mathrm{cm}^2", "5"),
        ("5 square inches", "5"),
        (r"5\text{ million}", "5million"),
        ("3 halves", "3halves"),
        ("5 x", "5x"),
        (r"\text{Evelyn}", "evelyn"),
        (r"\text{(A)}", "(A)"),
        (r"1{,}234", "1234"),
        (r"12\,345", "12345"),
        ("-1 234 567", "-1234567"),
        ("(1,234)", "(1,234)"),
        ("100, 200", "100,200"),
        (r"2 \pi r", r"2\pi r"),
        ("3 4", "3 4"),
        ("x^{2}+y_{1}", "x^2+y_1"),
        ("X", "X"),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    ],
)
def test_normal_form(answer: str, form: str) -> None:
    assert normal_form(answer) == form


@given(st.text(alphabet="\\frac{}12 ,.-+$%xtexand^_()", max_size=60))
def test_rew_2_a_normal_form_never_loses_or_gains_a_sign(answer: str) -> None:
    assert normal_form(answer).count("-") == answer.count("-")


@pytest.mark.parametrize(
    ("gold", "reply"),
    [
        *(("x=5", "5"), ("f(x)=2x", "2x"), (r"x \in [1,2]", "[1, 2]"), ("+5.", "5"), ("5", "--5")),
        *((r"\frac12", "0.5"), (r"\frac1{72}", r"\frac{1}{72}"), (r"\sqrt3", r"\sqrt{3}"), ("0.5", ".5")),
        *((r"\frac{1}{3}", "0.333333"), ("0.5", "1.5/3"), (r"-\frac{1}{4}", r"-\frac{0.5}{2}")),
        *(("18", "18.00"), ("18", "(18)"), ("0.5", r"\frac{-1}{-2}"), ("-3.5", r"-3\frac{1}{2}")),
        *(("6000", r"6.0\times10^{3}"), ("1024", "2^10"), ("0.01", "10^{-2}"), (r"50\%", r"2^{-1}")),
        *(("(1,0.5)", r"(1,\frac{1}{2})"), ("1,2", "2 and 1"), ("1,2", r"\{2,1\}"), ("(2,3)", "(x,y)=(2,3)")),
        *(("x+1", "1+x"), ("x^2-1", "(x-1)(x+1)"), ("x^2y^3", "y^3x^2"), (r"\sqrt{16}", "4.0")),
        *((r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"), (r"\frac{3\pi}{2}", r"3\pi/2")),
        *((r"1\le x\le 2", "[1,2]"), ("[1,2)", r"1\le x<2"), (r"\dfrac{1}{2} \leq x", r"x\ge\frac{1}{2}")),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 2/2 \\ 2 \end{pmatrix}"),
    ],
)
@needs_math_verify
def test_equal_answers(gold: str, reply: str) -> None:
    assert answers_equal(gold, reply)
    assert answers_equal(reply, gold)
    assert not answers_equal(gold, reply, is_strict=True)


@pytest.mark.parametrize(
    ("gold", "reply"),
    [
        # Near misses: sign, factor, off by one, neighbours in spelling.
        ("5", "-5"),
        ("-5", "5"),
        ("5", "50"),
        ("5", "6"),
        ("100", "101"),
        (r"\frac{1}{2}", r"\frac{1}{3}"),
        (r"\frac{1}{2}", r"-\frac{1}{2}"),
        ("x-1", "1-x"),
        ("x+1", "x-1"),
        ("2x", "x"),
        ("x=2", "y=2"),
        (r"\sqrt{2}", "2"),
        (r"2\pi", r"\pi"),
        ("(1,2)", "(2,1)"),
        ("(1,2)", "[1,2]"),
        ("12_5", "12_7"),
        ("12_5", "12"),
        ("10^{-7}", "0"),
        ("11/2", "1 1/2"),
        ("5", r"5\text{ million}"),
        (r"\frac{1}{3}", "0.3333"),
        ("18", "18.000001"),
        ("1000000", "1000001.0"),  # within 1e-6, and whole
        (r"\{1,1\}", r"\{1,2\}"),
        *(("1,2", "1"), ("1,2", "1,x"), ("x", "1"), ("0", r"\frac{1}{0}"), ("0", "0^{-1}")),
        # Texts: no anagram, no part, no letter.
        ("Evelyn", "nylevE"),
        ("Evelyn", "E"),
        ("Evelyn", "a"),
        ("Evelyn", ""),
        ("x", "X"),
        # Letters that may be units.
        *(("5", "5t"), ("3t", "3s")),
        # Several answers where one is right.
        ("6", "6,-6"),
        ("3", "3, 5"),
    ],
)
@needs_math_verify
def test_rew_4_near_misses_are_wrong(gold: str, reply: str) -> None:
    assert not answers_equal(gold, reply)
    assert not answers_equal(gold, reply, is_strict=True)


TEXTS = st.one_of(st.text(max_size=30), st.text(alphabet="\\frac{}12,.-+$xsqrt^()= ", max_size=30))


@given(TEXTS)
def test_every_text_is_spelled_like_itself(gold: str) -> None:
    assert answers_equal(gold, gold, is_strict=True) is bool(normal_form(gold))


NUMBERS = st.builds(
    lambda sign, spelled: sign + spelled,
    st.sampled_from(["", "-"]),
    st.one_of(
        st.integers(0, 99).map(str),
        st.builds("{}.{}".format, st.integers(0, 9), st.integers(0, 99)),
        st.builds("\\frac{{{}}}{{{}}}".format, st.integers(0, 9), st.integers(1, 9)),
        st.builds("{}/{}".format, st.integers(0, 9), st.integers(1, 9)),
    ),
)


@settings(deadline=None)
@given(NUMBERS, NUMBERS)
@needs_math_verify
def test_numbers_are_equal_when_their_values_are(first: str, second: str) -> None:
    values = [Fraction(re.sub(r"\\frac{(.)}{(.)}", r"\1/\2", text)) for text in (first, second)]
    # No two of these differ by less than 1/(9 * 100), so the tolerance plays no part.
    assert answers_equal(first, second) is (values[0] == values[1])


# Loading the grammar takes seconds, once.
@settings(deadline=None)
@given(TEXTS)
@needs_math_verify
def test_symbols_raise_on_no_reply(reply: str) -> None:
    assert answers_equal(r"x^2+\frac{1}{3}", reply) in (True, False)


@settings(deadline=None)
@given(st.sampled_from(["x+1", r"\frac{x}{2}", r"2\sqrt{3}", r"3\pi", "x^2-1"]), st.integers(1, 9))
@needs_math_verify
def test_formulas_are_equal_to_themselves_written_otherwise_both_ways(formula: str, number: int) -> None:
    other = f"{formula}+{number}-{number}"
    assert answers_equal(formula, other)
    assert answers_equal(other, formula)
    assert not answers_equal(formula, f"{formula}+{number}")


HOSTILE = {
    "tower": "9^{9^{9}}",
    "chain": "9^9^9",
    "exponent": "2^{1000000}",
    "fractions": r"\frac{1}{" * 200 + "1" + "}" * 200,
    "roots": r"\sqrt{" * 50 + "2" + "}" * 50,
    "brackets": "(" * 100 + "1" + ")" * 100,
    "digits": "9" * 1_000_000,
    "factorial": "x+100000!",
    "sum": r"\sum_{n=1}^{100000}\frac{1}{n^2}",
    "binomial": r"\binom{100000}{50000}",
    "regex bomb": "5 " + "abc" * 600 + "1",
    "commas": "1," * 900,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_answers_never_reach_sympy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mathematics, "equal_by_symbols", None)
    started_at = time.process_time()
    assert not answers_equal("x+1", HOSTILE[name][:2000])
    assert time.process_time() - started_at < 1


@pytest.mark.parametrize(
    "form", [r"\frac{a+b}{c}", r"(-\infty,2]\cup[3,4)", r"\sin^2x", r"2^{10}x", r"e^{2\pi i}"]
)
def test_formulas_of_the_data_reach_sympy(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mathematics, "equal_by_symbols", lambda gold, reply: True)
    assert answers_equal(form, form + "+0")


@needs_math_verify
def test_the_library_is_silent_about_its_time_limits(caplog: pytest.LogCaptureFixture) -> None:
    equal_by_symbols.cache_clear()
    with caplog.at_level(logging.WARNING):
        warm_up()
    assert caplog.records == []


@needs_math_verify
def test_a_gold_answer_that_the_library_chokes_on_is_no_wrong_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    def choke(text: str, *args: object, raise_on_error: bool, **kwargs: object) -> list[object]:
        if raise_on_error:
            raise RecursionError(text)
        return []

    monkeypatch.setattr("math_verify.parse", choke)
    with pytest.raises(RecursionError):
        answers_equal("x+111", "x+112")


def test_without_the_library_symbols_are_refused_and_numbers_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "math_verify", None)
    assert answers_equal("1/2", "0.5")
    with pytest.raises(ConfigError, match=r"math_verify"):
        answers_equal("x+113", "113+x")
