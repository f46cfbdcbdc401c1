"""Tests of `math_answers`: which part of a reply is its final answer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.tasks.mathematics.answers import AnswerForm, find_answer, find_boxes, last_formula


@pytest.mark.parametrize(
    ("text", "answer", "form", "is_marked_once"),
    [
        # The last balanced box counts, however it is nested and whatever follows it.
        (r"so \boxed{5}.", "5", AnswerForm.BOX, True),
        (r"\boxed{\frac{1}{2}} is it", r"\frac{1}{2}", AnswerForm.BOX, True),
        (r"\boxed{3} no, \boxed{5}", "5", AnswerForm.BOX, False),
        (r"\boxed{\frac{1}{2}} and \boxed{5", r"\frac{1}{2}", AnswerForm.BOX, True),
        (r"\boxed{\boxed{5}}", r"\boxed{5}", AnswerForm.BOX, True),
        (r"\boxed{ \{1, 2\} }", r"\{1, 2\}", AnswerForm.BOX, True),
        (r"} \boxed {7}", "7", AnswerForm.BOX, True),
        (r"\fbox{7}", "7", AnswerForm.BOX, True),
        (r"thus $\boxed 12$.", "12", AnswerForm.BOX, True),
        (r"The answer is 4, so \boxed{5}", "5", AnswerForm.BOX, True),
        # Then a sentence.
        ("The answer is 5.", "5", AnswerForm.SENTENCE, True),
        ("The answer is 3.5. Done", "3.5", AnswerForm.SENTENCE, True),
        ("**Answer:** 5", "5", AnswerForm.SENTENCE, True),
        ("The answer is -3, because it fell", "-3", AnswerForm.SENTENCE, True),
        ("The answer is $5.", "$5", AnswerForm.SENTENCE, True),
        ("The answer is $5, not $6.", "5, not", AnswerForm.SENTENCE, True),
        ("Final Answer: The final answer is $24$. I hope it is correct.", "24", AnswerForm.SENTENCE, True),
        (r"The final answer is $\$1,234.50$.", r"\$1,234.50", AnswerForm.SENTENCE, True),
        ("The answer is 4. No, the answer is 5.", "5", AnswerForm.SENTENCE, False),
        ("The answer is\n\n5", "5", AnswerForm.SENTENCE, True),
        # Then a formula, then an expression that ends the last line.
        ("so $x=2$ and $y = 3$ hold", "y = 3", AnswerForm.FORMULA, False),
        (r"\[ x + 1 \] as wanted", "x + 1", AnswerForm.FORMULA, False),
        ("$$7$$", "7", AnswerForm.FORMULA, False),
        ("Thus x = 7.", "7", AnswerForm.EXPRESSION, False),
        ("The value is 42", "42", AnswerForm.EXPRESSION, False),
        ("well\n\n-1/2\n", "-1/2", AnswerForm.EXPRESSION, False),
    ],
)
def test_find_answer(text: str, answer: str, form: AnswerForm, is_marked_once: bool) -> None:
    found = find_answer(text)
    assert found is not None
    assert (found.text, found.form, found.is_marked_once) == (answer, form, is_marked_once)


@pytest.mark.parametrize(
    "text",
    ["", " \n", "asdf", "a", "There are 7 cats", "\\boxed{}", "so give \\boxed{ }", "\\boxed{5", "Answer:"],
)
def test_no_answer(text: str) -> None:
    assert find_answer(text) is None


def test_formulas_are_told_from_money() -> None:
    assert last_formula(r"costs \$5 and $x$") == "x"
    assert last_formula("costs $5") is None
    assert last_formula("$ $ and $$") is None


@given(st.text(alphabet="\\boxed{}$5 ().=answeri:\n", max_size=80))
def test_any_text_is_searched_without_error(text: str) -> None:
    found = find_answer(text)
    assert found is None or (found.text and found.text == found.text.strip())
    assert all(box in text for box in find_boxes(text))
