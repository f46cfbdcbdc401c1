"""The tasks that need no data: sums, reversed texts, and the canary of one question."""

from __future__ import annotations

from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.errors import ConfigError
from strop.rollout import Example, Split, make_example
from strop.tasks import build_task
from strop.tasks.generated import ArithmeticSpec, ReverseTextSpec, share_of_beginning
from tests.fixtures.judging import run_self_test, verdict

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


def test_self_test_passes() -> None:
    assert run_self_test(TASK, TASK.examples(Split.TRAIN)[:32]) == []


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


def test_one_word_for_every_text_earns_next_to_nothing() -> None:
    """What a run collapsed on: short words share letters with most answers."""
    task = build_task(ReverseTextSpec(name="reverse-text", max_words=3))
    examples = task.examples(Split.TRAIN)[:200]
    for word in ("text", "letter", "retnel", "nretnal"):
        assert fmean(verdict(task, example, word).reward or 0.0 for example in examples) < 0.05


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
    # 153 words, alone or in pairs: of 2000 texts many have the words of another one.
    task = build_task(ReverseTextSpec(name="reverse-text", max_words=2, num_train=2000))
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
    with pytest.raises(ConfigError, match=r"600 different problems.*about 1[0-9][0-9] in all"):
        task.examples(Split.TRAIN)
