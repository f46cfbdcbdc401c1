"""Every rule of instructions: what satisfies it, what must not, and what no text may do to it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.errors import DataError
from strop.tasks.instructions.rules import RULES, bind
from strop.tasks.rows.row_task import read_preset
from tests.tasks.instructions.instruction_cases import (
    GOOGLE_ARGUMENTS,
    MULTI_ARGUMENTS,
    RLVR_ARGUMENTS,
    VECTORS,
    as_instruction,
)

pytest.importorskip("langdetect")

CASES = {**MULTI_ARGUMENTS, **dict(as_instruction(name, case) for name, case in RLVR_ARGUMENTS.items())}
FORMS = [
    json.loads(line)
    for line in (Path(__file__).parent / "forms/ifeval.jsonl").read_text("utf-8").splitlines()
]
NONSENSE = ["", " \n", "\t", "a", "asdf", "0", "1", "{}", "123!!!", "yes!", "\u200b\u202e", "..."]


@pytest.mark.parametrize("vector", VECTORS, ids=lambda one: f"{one['family']} {one['id']}")
def test_replies_that_follow_are_told_from_those_that_do_not(vector: Mapping[str, Any]) -> None:
    instruction, arguments = vector["id"], vector["arguments"]
    if vector["family"] == "rlvr":
        instruction, arguments = as_instruction(instruction, arguments)
    constraint = bind(instruction, arguments, place="a vector")
    assert [text for text in vector["good"] if not constraint(text)] == []
    assert [text for text in [*vector["bad"], "[" * 99_999] if constraint(text)] == []


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form['id']}: {form['why']}")
def test_a_real_form_has_the_verdict_of_its_plain_meaning(form: Mapping[str, Any]) -> None:
    constraint = bind(form["id"], form["arguments"], place="a form")
    assert constraint(form["reply"]) is form["right"]


def test_all_instructions_have_a_case() -> None:
    assert (len(GOOGLE_ARGUMENTS), len(RULES)) == (25, 55)
    assert RULES.keys() == CASES.keys()
    assert set(read_preset("rlvr-ifeval").functions) == set(RLVR_ARGUMENTS)


@pytest.mark.parametrize("instruction_id", CASES)
def test_nonsense_does_not_follow(instruction_id: str) -> None:
    constraint = bind(instruction_id, CASES[instruction_id], place="a test")
    assert [text for text in NONSENSE if constraint(text)] == []


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=300) | st.text(alphabet=" \n*-.[]<>\"',?!#`{}()aA1é漢", max_size=300))
def test_no_text_makes_a_rule_raise(text: str) -> None:
    for instruction_id, arguments in CASES.items():
        constraint = bind(instruction_id, arguments, place="a test")
        assert constraint(text) is constraint(text)


def seconds_of(constraint: Callable[[str], bool], text: str) -> float:
    started = time.process_time()
    constraint(text)
    return time.process_time() - started


@pytest.mark.slow
@pytest.mark.parametrize(
    "unit", ["a", "[", "*", " ", "\n", ".", "<<", "(", '"', "* * *", "word ", "A's. ", "\n- ", "1."]
)
def test_the_time_of_a_very_long_reply_grows_with_its_length(unit: str) -> None:
    """On any machine: growing with the square, four times the length would take sixteen times as long."""
    long = unit * (200_000 // len(unit))
    for instruction_id, arguments in CASES.items():
        constraint = bind(instruction_id, arguments, place="a test")
        # A second time where the first one paid for something else, such as a collection of garbage.
        shares = (long[: len(long) // 4], long)
        found = ([seconds_of(constraint, text) for text in shares] for _ in range(2))
        assert any(whole_s < 10.0 * part_s + 1.0 for part_s, whole_s in found), instruction_id


@pytest.mark.parametrize(
    ("instruction_id", "arguments", "fault"),
    [
        ("keywords:existance", {}, "'keywords:existance', which has no rule"),
        (None, {}, "None, which has no rule"),
        ("keywords:existence", {}, "keywords: Field required"),
        ("keywords:existence", {"keywords": []}, "keywords: "),
        ("keywords:existence", {"keywords": ["a"], "word": "b"}, "word: Extra"),
        ("length_constraints:number_paragraphs", {"num_paragraphs": "many"}, "num_paragraphs: "),
        ("length_constraints:number_words", {"num_words": 9, "relation": "about"}, "relation: "),
        ("language:response_language", {"language": "xx"}, "language: "),
    ],
)
def test_rew_6_what_cannot_be_judged_is_refused(
    instruction_id: object, arguments: dict[str, object], fault: str
) -> None:
    with pytest.raises(DataError, match=f"^file, row 7 .*{fault}.*Next: .*remove the row"):
        bind(instruction_id, arguments, place="file, row 7")
