"""Tests of `math_answers`: which part of a reply is its final answer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.tasks.mathematics import find_answer, find_boxes


@pytest.mark.parametrize(
    ("text", "answer", "is_boxed", "num_marks"),
    [
        # The last balanced box counts, however it is nested and whatever follows it.
        (r"so \boxed{5}.", "5", True, 1),
        (r"\boxed{\frac{1}{2}} is it", r"\frac{1}{2}", True, 1),
        (r"\boxed{3} no, \boxed{5}", "5", True, 2),
        (r"\boxed{\frac{1}{2}} and \boxed{5", r"\frac{1}{2}", True, 1),
        (r"\boxed{x=\boxed{5}}", "5", True, 1),
        (r"\boxed{ \{1, 2\} }", r"\{1, 2\}", True, 1),
        (r"} \boxed {7}", "7", True, 1),
        (r"\fbox{7}", "7", True, 1),
        (r"thus $\boxed 12$.", "12", True, 1),
        (r"The answer is 4, so \boxed{5}", "5", True, 1),
        # Then a sentence.
        ("The answer is 5.", "5", False, 1),
        ("The answer is 3.5. Done", "3.5", False, 1),
        ("**Answer:** 5", "5", False, 1),
        ("The answer is -3, because it fell", "-3", False, 1),
        ("The answer is $5.", "$5", False, 1),
        ("The answer is $5, not $6.", "5, not", False, 1),
        ("Final Answer: The final answer is $24$. I hope it is correct.", "24", False, 1),
        (r"The final answer is $\$1,234.50$.", r"\$1,234.50", False, 1),
        ("The answer is 4. No, the answer is 5.", "5", False, 2),
        ("The answer is\n\n5", "5", False, 1),
        # Then a formula, then an expression that ends the last line.
        ("so $x=2$ and $y = 3$ hold", "y = 3", False, 0),
        (r"\[ x + 1 \] as wanted", "x + 1", False, 0),
        ("$$7$$", "7", False, 0),
        ("Thus x = 7.", "7", False, 0),
        ("The value is 42", "42", False, 0),
        ("well\n\n-1/2\n", "-1/2", False, 0),
        ("so $x+y$ is thus 25.", "25", False, 0),
        # Then a number.
        ("There are 7 cats", "7", False, 0),
    ],
)
def test_find_answer(text: str, answer: str, is_boxed: bool, num_marks: int) -> None:
    assert find_answer(text) == (answer, is_boxed, num_marks)


@pytest.mark.parametrize(
    "text",
    ["", " \n", "asdf", "a", "\\boxed{}", "so give \\boxed{ }", "\\boxed{5", "Answer:"],
)
def test_no_answer(text: str) -> None:
    assert find_answer(text) is None


def test_formulas_are_told_from_money() -> None:
    assert find_answer(r"costs \$5 and $x$") == ("x", False, 0)
    assert find_answer("costs $5") == ("$5", False, 0)
    assert find_answer("$ $ and $$") is None


@given(st.text(alphabet="\\boxed{}$5 ().=answeri:\n", max_size=80))
def test_any_text_is_searched_without_error(text: str) -> None:
    found = find_answer(text)
    assert found is None or (found.text and found.text == found.text.strip())
    assert all(box in text for box in find_boxes(text))
