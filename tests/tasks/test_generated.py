"""The tasks that need no data: sums."""

from __future__ import annotations

import pytest

from strop.rollout import Example, Split, make_example
from strop.tasks import build_task
from strop.tasks.generated import ArithmeticSpec
from tests.fixtures.judging import verdict

TASK = build_task(ArithmeticSpec())


def sum_of(a: int, b: int) -> Example:
    return make_example("arithmetic", {"a": a, "b": b}, str(a + b))


def test_more_held_out_keeps_the_earlier_ones() -> None:
    fewer = build_task(ArithmeticSpec(num_held_out=50)).examples(Split.HELD_OUT)
    kept = {example.example_id for example in TASK.examples(Split.HELD_OUT)}
    assert {example.example_id for example in fewer} < kept


@pytest.mark.parametrize("num_values", [3, 5, 6])
@pytest.mark.parametrize("num_held_out", [1, 2, 3])
def test_both_orders_of_two_numbers_are_in_one_split(num_values: int, num_held_out: int) -> None:
    """Incident: for 72 of 94 held-out sums of different numbers the mirrored one was trained on."""
    spec = ArithmeticSpec(min_value=3, max_value=2 + num_values, num_held_out=num_held_out)
    task = build_task(spec)
    held_out, train = (
        {(example.fields["a"], example.fields["b"]) for example in task.examples(split)}
        for split in reversed(Split)
    )
    assert (len(held_out), len(train)) == (num_held_out, spec.num_train)
    assert not train & {(b, a) for a, b in held_out}
    # Beside an odd number, one pair is in neither split: the mirror of one that is held out.
    assert len(held_out | train) == num_values**2 - num_held_out % 2


def test_the_task_says_which_pairs_are_one_problem() -> None:
    assert TASK.problem_of(sum_of(3, 4)) == TASK.problem_of(sum_of(4, 3)) == "3 + 4"
    splits = [{TASK.problem_of(example) for example in TASK.examples(split)} for split in Split]
    assert not splits[0] & splits[1]


def test_the_first_held_out_examples_pose_different_problems() -> None:
    first = TASK.examples(Split.HELD_OUT)[:50]
    assert len({TASK.problem_of(example) for example in first}) == 50
    # And neither order is the usual one.
    assert 10 < sum(example.fields["a"] < example.fields["b"] for example in first) < 40


@pytest.mark.parametrize(
    ("min_value", "max_value", "num_held_out", "num_train"),
    [(3, 4, 2, 2), (3, 4, 3, 0), (3, 3, 1, 0), (9, 3, 4, 0)],
)
def test_what_is_held_out_is_not_trained_on(
    min_value: int, max_value: int, num_held_out: int, num_train: int
) -> None:
    spec = ArithmeticSpec(min_value=min_value, max_value=max_value, num_held_out=num_held_out)
    assert spec.num_train == num_train
    if min_value < max_value:
        assert [len(build_task(spec).examples(split)) for split in Split] == [num_train, num_held_out]


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


def test_smp_2_the_reply_limit_is_what_the_run_says() -> None:
    limits = [build_task(ArithmeticSpec(max_reply_tokens=number)).limits for number in (None, 8, 33)]
    assert [one.max_reply_tokens for one in limits] == [32, 8, 33]
    assert {one.own_reply_tokens for one in limits} == {32}
