"""The tasks that need no data: sums, reversed texts, and the canary of one question."""

from __future__ import annotations

from itertools import combinations
from statistics import fmean
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from strop.errors import ConfigError
from strop.rollout import Example, Split, make_example
from strop.tasks import build_task
from strop.tasks.generated.arithmetic import ArithmeticSpec
from strop.tasks.generated.reverse_text import ReverseTextSpec, share_of_beginning, subsequence_ratio
from tests.fixtures.judging import run_self_test, verdict

TASK = build_task(ArithmeticSpec())


def sum_of(a: int, b: int) -> Example:
    return make_example("arithmetic", {"a": a, "b": b}, str(a + b))


def test_more_held_out_keeps_the_earlier_ones() -> None:
    fewer = build_task(ArithmeticSpec(num_held_out=50)).examples(Split.HELD_OUT)
    kept = {example.example_id for example in TASK.examples(Split.HELD_OUT)}
    assert {example.example_id for example in fewer} < kept


@pytest.mark.parametrize("operators", ["+", "-", "+-*"])
@pytest.mark.parametrize("num_values", [3, 5, 6])
@pytest.mark.parametrize("num_held_out", [1, 2, 3])
def test_both_orders_of_two_numbers_are_in_one_split(
    operators: Any, num_values: int, num_held_out: int
) -> None:
    """Incident: for 72 of 94 held-out sums of different numbers the mirrored one was trained on."""
    spec = ArithmeticSpec(
        min_value=3, max_value=2 + num_values, operators=operators, num_held_out=num_held_out
    )
    task = build_task(spec)
    held_out, train = ({read(example) for example in task.examples(split)} for split in reversed(Split))
    assert (len(held_out), len(train)) == (num_held_out, spec.num_train)
    assert not train & {(op, b, a) for op, a, b in held_out}
    # Beside an odd number of an even one, one pair is in neither split: the mirror of one that is held out.
    assert len(held_out | train) == spec.num_pairs - (num_held_out % 2 and not spec.num_pairs % 2)


def read(example: Example) -> tuple[str, int, int]:
    return example.fields.get("op", "+"), example.fields["a"], example.fields["b"]


def test_the_task_says_which_pairs_are_one_problem() -> None:
    assert TASK.problem_of(sum_of(3, 4)) == TASK.problem_of(sum_of(4, 3)) == "3 + 4"
    other = make_example("arithmetic", {"a": 3, "op": "-", "b": 4}, "-1")
    assert TASK.problem_of(other) == "3 - 4"
    splits = [{TASK.problem_of(example) for example in TASK.examples(split)} for split in Split]
    assert not splits[0] & splits[1]


def test_the_first_held_out_examples_pose_different_problems() -> None:
    first = TASK.examples(Split.HELD_OUT)[:50]
    assert len({TASK.problem_of(example) for example in first}) == 50
    # And neither order is the usual one.
    assert 10 < sum(example.fields["a"] < example.fields["b"] for example in first) < 40


def test_a_huge_range_has_many_examples_and_reaches_far() -> None:
    train = build_task(ArithmeticSpec(max_value=10**9)).examples(Split.TRAIN)
    assert len({TASK.problem_of(example) for example in train}) == len(train) == 100_000
    assert max(example.fields["a"] for example in train[:20]) > 10**8


def test_one_value_range() -> None:
    # One pair alone: 3 + 3.
    with pytest.raises(ValidationError):
        ArithmeticSpec(min_value=3, max_value=3, num_held_out=1)
    task = build_task(ArithmeticSpec(min_value=3, max_value=4, num_held_out=2))
    assert (len(task.examples(Split.HELD_OUT)), len(task.examples(Split.TRAIN))) == (2, 2)
    with pytest.raises(ValidationError):
        ArithmeticSpec(min_value=3, max_value=4, num_held_out=3)


@pytest.mark.parametrize(
    ("text", "is_correct", "format_ok"),
    [
        ("7", True, True),
        ("3 + 4 = 7.", True, True),
        ("7.0", True, True),
        ("7 is the answer", True, False),
        ("3 + 4", False, True),
        ("-7", False, True),
        ("77", False, True),
        ("", False, False),
        ("seven", False, False),
    ],
)
def test_verify(text: str, is_correct: bool, format_ok: bool) -> None:
    outcome = verdict(TASK, sum_of(3, 4), text)
    assert outcome.is_correct is is_correct
    assert outcome.reward == float(is_correct)
    assert outcome.format_ok is format_ok


def test_self_test_passes_also_where_a_question_ends_in_its_answer() -> None:
    assert run_self_test(TASK, TASK.examples(Split.TRAIN)[:32]) == []
    with_zero = build_task(ArithmeticSpec(min_value=0, max_value=30))
    examples = with_zero.examples(Split.TRAIN)[:160]
    # As "What is 0 + 7?" does, which is one question of 31.
    assert any(example.fields["a"] == 0 for example in examples)
    assert run_self_test(with_zero, examples) == []


def test_smp_2_reply_limit_may_shrink_but_not_grow() -> None:
    assert TASK.limits.max_reply_tokens == 32
    assert build_task(ArithmeticSpec(max_reply_tokens=8)).limits.max_reply_tokens == 8
    with pytest.raises(ConfigError, match=r"task\.max_reply_tokens=33\. Allowed: 1 to 32"):
        build_task(ArithmeticSpec(max_reply_tokens=33))


REVERSE = build_task(ReverseTextSpec(name="reverse-text"))
FOX = make_example("reverse-text", {"text": "fox"}, "xof")


@pytest.mark.parametrize(
    ("reply", "gold", "share"),
    [
        ("xof", "xof", 1.0),
        ("", "", 1.0),
        ("", "xof", 0.0),
        ("xo", "xof", 2 / 3),
        ("xofxof", "xof", 1 / 2),  # three letters of six
        ("xf", "xof", 1 / 3),  # the second letter is wrong, and what follows does not count
        ("of", "xof", 0.0),
        ("x-o-f.", "xof", 1 / 2),  # what stands between letters breaks off nothing, and is paid nothing
        ("of lex", "o flex", 5 / 6),
    ],
)
def test_letters_count_from_the_beginning(reply: str, gold: str, share: float) -> None:
    assert share_of_beginning(reply, gold) == pytest.approx(share)


@given(st.text("ab", max_size=6), st.text("ab", max_size=6))
def test_full_marks_are_for_the_answer_alone(reply: str, gold: str) -> None:
    assert (share_of_beginning(reply, gold) == 1.0) == (reply == gold)


@pytest.mark.parametrize(("partial_marks", "is_paid"), [("beginning", False), ("any-order", True)])
def test_one_word_for_every_text_is_paid_for_letters_in_any_order_alone(
    partial_marks: Literal["beginning", "any-order"], *, is_paid: bool
) -> None:
    """What a run collapsed on: short words share letters with most answers."""
    spec = ReverseTextSpec(name="reverse-text", max_words=3, partial_marks=partial_marks)
    task = build_task(spec)
    examples = task.examples(Split.TRAIN)[:200]
    for word in ("text", "letter", "retnel", "nretnal"):
        mean = fmean(verdict(task, example, word).reward or 0.0 for example in examples)
        assert 0.17 < mean < 0.4 if is_paid else mean < 0.05


def longest_common_slow(left: str, right: str) -> int:
    subsequences = {
        "".join(left[i] for i in chosen)
        for size in range(len(left) + 1)
        for chosen in combinations(range(len(left)), size)
    }

    def holds(text: str) -> bool:
        rest = iter(right)
        return all(char in rest for char in text)

    return max(len(text) for text in subsequences if holds(text))


@given(st.text("abc", min_size=1, max_size=7), st.text("abc", min_size=2, max_size=7))
def test_subsequence_ratio_equals_trying_all(reply: str, gold: str) -> None:
    expected = 2 * longest_common_slow(reply[: 4 * len(gold)], gold) / (len(reply) + len(gold))
    assert subsequence_ratio(reply, gold) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("reply", "reward", "is_correct", "format_ok"),
    [
        ("  xof\n", 1.0, True, True),
        ("Here:\nxof", 1.0, True, False),
        ("XOF", 1.0, True, True),
        ("x-o-f", 3 / 5, False, True),
        ("xo", 2 / 3, False, True),
        ("", 0.0, False, False),
    ],
)
def test_reversed_texts(reply: str, reward: float, *, is_correct: bool, format_ok: bool) -> None:
    outcome = verdict(REVERSE, FOX, reply)
    assert outcome.reward == pytest.approx(reward)
    assert (outcome.is_correct, outcome.format_ok) == (is_correct, format_ok)


def test_texts_are_disjoint_and_stable() -> None:
    held_out, train = REVERSE.examples(Split.HELD_OUT), REVERSE.examples(Split.TRAIN)
    assert (len(held_out), len(train)) == (100, 500)
    assert len({example.fields["text"] for example in [*held_out, *train]}) == 600
    larger = build_task(ReverseTextSpec(name="reverse-text", num_train=700))
    assert larger.examples(Split.HELD_OUT) == held_out


def test_the_same_words_in_another_order_are_in_one_split() -> None:
    # 153 words in pairs: of 2000 texts many have the words of another one.
    task = build_task(ReverseTextSpec(name="reverse-text", min_words=2, max_words=2, num_train=2000))
    held_out, train = (
        [example.fields["text"] for example in task.examples(split)] for split in reversed(Split)
    )
    assert (len(held_out), len(train)) == (100, 2000)
    assert not {tuple(sorted(text.split())) for text in held_out} & {
        tuple(sorted(text.split())) for text in train
    }
    one, other = (make_example("reverse-text", {"text": text}, None) for text in ("fox ink", "ink fox"))
    assert task.problem_of(one) == task.problem_of(other)


def test_too_few_different_texts_are_refused() -> None:
    task = build_task(ReverseTextSpec(name="reverse-text", max_words=1))
    with pytest.raises(ConfigError, match=r"600 different texts of 1 to 1 words.*Next: raise task"):
        task.examples(Split.TRAIN)
