"""Tests of `strop.tasks.answers`: what reads as a number."""

from __future__ import annotations

import time
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.tasks.answers import cut_at_first, ends_with_number, last_number, parse_number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("12", "12"),
        ("3 + 4 = 7.", "7"),
        ("The answer is **7**", "7"),
        ("7.0", "7"),
        (".5", "0.5"),
        ("1,234", "1234"),
        ("12,345,678.90", "12345678.9"),
        ("1,2", "2"),
        ("1,2345", "2345"),
        ("= -5", "-5"),
        ("x=-5", "-5"),
        ("\u22125", "-5"),
        ("-$4", "-4"),
        ("$-4", "-4"),
        ("$18.00", "18"),
        ("7-5", "5"),
        ("(2)-5", "5"),
        ("7 - 5", "5"),
        ("7kg", "7"),
        ("1e3", "1000"),
        ("14/2", "2"),
        ("No.7", "7"),
        ("\\boxed{7}", "7"),
        ("1.2.3", "1.2"),
    ],
)
def test_last_number(text: str, number: str) -> None:
    assert last_number(text) == Decimal(number)


@pytest.mark.parametrize("text", ["", ".", "-", "seven", "H2O", "\u0663", ",", "$"])
def test_no_number(text: str) -> None:
    assert last_number(text) is None


@pytest.mark.parametrize(("text", "number"), [(" 18 ", "18"), ("-1,000", "-1000"), ("$5", "5")])
def test_parse_whole_text(text: str, number: str) -> None:
    assert parse_number(text) == Decimal(number)


@pytest.mark.parametrize("text", ["", "18 apples", "1 2", "= 3", "7-5"])
def test_parse_refuses_more_than_a_number(text: str) -> None:
    assert parse_number(text) is None


@pytest.mark.parametrize(
    ("text", "at_end"),
    [("7", True), ("It is 7.", True), ("**7**\n", True), ("$7$", True), ("7 apples", False), ("none", False)],
)
def test_ends_with_number(text: str, at_end: bool) -> None:
    assert ends_with_number(text) is at_end


def test_cut_at_the_earliest_marker() -> None:
    assert cut_at_first("18 Q: 2 A: 5", ("A:", "Q:")) == "18 "
    assert cut_at_first("18", ("A:", "Q:")) == "18"
    assert cut_at_first("18", ()) == "18"


@given(st.integers(-(10**12), 10**12))
def test_plain_and_grouped_integers_are_found_in_a_sentence(value: int) -> None:
    assert last_number(f"So it is {value}.") == value
    assert last_number(f"So it is {value:,}.") == value


@given(st.text(alphabet="0123456789-,.$eE+ a)", max_size=40))
def test_any_text_is_read_without_error(text: str) -> None:
    found = last_number(text)
    assert found is None or found.is_finite()
    assert ends_with_number(text) is False or found is not None


@pytest.mark.parametrize("piece", ["9", "1,234", "-", ".", "$", "1.", "1 "])
def test_time_is_linear_in_the_text(piece: str) -> None:
    # 200 kB of each; quadratic time would be minutes, linear is far below a second.
    started_at = time.process_time()
    last_number(piece * (200_000 // len(piece)))
    assert time.process_time() - started_at < 5
