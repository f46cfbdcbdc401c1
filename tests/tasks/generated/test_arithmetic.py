"""Tests of the arithmetic task."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from strop.errors import ConfigError
from strop.rollout import Example, Split, make_example
from strop.tasks import build_task
from strop.tasks.generated.arithmetic import ArithmeticSpec
from strop.tasks.traits import problem_of
from tests.fixtures.judging import run_self_test

TASK = build_task(ArithmeticSpec())


def sum_of(a: int, b: int) -> Example:
    return make_example("arithmetic", {"a": a, "b": b}, str(a + b))


def test_prompt_is_the_question() -> None:
    (message,) = TASK.render(sum_of(3, 4))
    assert (message.role, message.text) == ("user", "What is 3 + 4?")


def test_splits_cover_all_pairs_once() -> None:
    # 20 * 20 = 400 ordered pairs, 100 of them held out.
    held_out, train = TASK.examples(Split.HELD_OUT), TASK.examples(Split.TRAIN)
    assert (len(held_out), len(train)) == (100, 300)
    pairs = {(example.fields["a"], example.fields["b"]) for example in [*held_out, *train]}
    assert pairs == {(a, b) for a in range(1, 21) for b in range(1, 21)}
    assert not {e.example_id for e in held_out} & {e.example_id for e in train}


def test_examples_are_the_same_every_time() -> None:
    again = build_task(ArithmeticSpec())
    assert list(again.examples(Split.TRAIN)) == list(TASK.examples(Split.TRAIN))


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
    assert problem_of(TASK, sum_of(3, 4)) == problem_of(TASK, sum_of(4, 3)) == "3 + 4"
    other = make_example("arithmetic", {"a": 3, "op": "-", "b": 4}, "-1")
    assert problem_of(TASK, other) == "3 - 4"
    splits = [{problem_of(TASK, example) for example in TASK.examples(split)} for split in Split]
    assert not splits[0] & splits[1]


def test_the_first_held_out_examples_pose_different_problems() -> None:
    first = TASK.examples(Split.HELD_OUT)[:50]
    assert len({problem_of(TASK, example) for example in first}) == 50
    # And neither order is the usual one.
    assert 10 < sum(example.fields["a"] < example.fields["b"] for example in first) < 40


def test_a_huge_range_costs_nothing_and_reaches_far() -> None:
    train = build_task(ArithmeticSpec(max_value=10**9)).examples(Split.TRAIN)
    assert len(train) == 10**18 - 100
    assert max(example.fields["a"] for example in train[:20]) > 10**8
    assert train[-1].answer is not None


def test_one_value_range() -> None:
    # One pair alone: 3 + 3.
    with pytest.raises(ValidationError, match=r"at most 0 held-out pairs of the 1 .*neither is"):
        ArithmeticSpec(min_value=3, max_value=3, num_held_out=1)
    task = build_task(ArithmeticSpec(min_value=3, max_value=4, num_held_out=2))
    assert (len(task.examples(Split.HELD_OUT)), len(task.examples(Split.TRAIN))) == (2, 2)
    with pytest.raises(ValidationError, match=r"at most 2 held-out pairs of the 4 .*neither is"):
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
    outcome = TASK.verify(sum_of(3, 4), text)
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


def test_version_follows_what_changes_scores() -> None:
    assert build_task(ArithmeticSpec()).version == TASK.version
    assert build_task(ArithmeticSpec(max_value=21)).version != TASK.version
    assert build_task(ArithmeticSpec(max_reply_tokens=16)).version != TASK.version


def test_reply_limit_may_shrink_but_not_grow() -> None:
    assert TASK.limits.max_reply_tokens == 32
    assert build_task(ArithmeticSpec(max_reply_tokens=8)).limits.max_reply_tokens == 8
    with pytest.raises(ConfigError, match=r"task\.max_reply_tokens=33\. Allowed: 1 to 32"):
        build_task(ArithmeticSpec(max_reply_tokens=33))
