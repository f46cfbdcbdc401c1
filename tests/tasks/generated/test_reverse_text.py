"""Tests of the reverse-text task."""

from __future__ import annotations

from itertools import combinations
from statistics import fmean
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.errors import ConfigError
from strop.rollout import Split, make_example
from strop.tasks import build_task
from strop.tasks.generated.reverse_text import WORDS, ReverseTextSpec, share_of_beginning, subsequence_ratio
from strop.tasks.traits import problem_of
from tests.fixtures.judging import run_self_test

TASK = build_task(ReverseTextSpec(name="reverse-text"))
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
        mean = fmean(task.verify(example, word).reward or 0.0 for example in examples)
        assert 0.17 < mean < 0.4 if is_paid else mean < 0.05


@pytest.mark.parametrize(
    ("reply", "gold", "ratio"),
    [
        ("xof", "xof", 1.0),
        ("", "", 1.0),
        ("", "xof", 0.0),
        ("fox", "xof", 1 / 3),  # longest common subsequence "o": 2 * 1 / (3 + 3)
        ("xo", "xof", 0.8),  # "xo": 2 * 2 / (2 + 3)
        ("x o f", "xof", 0.75),  # "xof": 2 * 3 / (5 + 3)
        ("abc", "xyz", 0.0),
    ],
)
def test_subsequence_ratio_by_hand(reply: str, gold: str, ratio: float) -> None:
    assert subsequence_ratio(reply, gold) == pytest.approx(ratio)


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


def test_verify() -> None:
    exact = TASK.verify(FOX, "  xof\n")
    assert (exact.reward, exact.is_correct, exact.format_ok) == (1.0, True, True)
    below = TASK.verify(FOX, "Here:\nxof")
    assert (below.reward, below.is_correct, below.format_ok) == (1.0, True, False)
    loud = TASK.verify(FOX, "XOF")
    assert (loud.reward, loud.is_correct) == (1.0, True)
    spelled = TASK.verify(FOX, "x-o-f")
    assert spelled.reward == pytest.approx(3 / 5)
    assert spelled.is_correct is False
    close = TASK.verify(FOX, "xo")
    assert close.reward == pytest.approx(2 / 3)
    assert close.is_correct is False
    assert TASK.verify(FOX, "").reward == 0.0


def test_splits_are_disjoint_and_stable() -> None:
    held_out, train = TASK.examples(Split.HELD_OUT), TASK.examples(Split.TRAIN)
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
    assert problem_of(task, one) == problem_of(task, other)


def test_no_text_is_another_one_written_backwards() -> None:
    assert not {word[::-1] for word in WORDS} & set(WORDS)


def test_no_word_reads_the_same_backwards() -> None:
    assert not [word for word in WORDS if word == word[::-1]]


def test_self_test_passes() -> None:
    assert run_self_test(TASK, TASK.examples(Split.TRAIN)[:32]) == []


def test_reply_limit_holds_the_longest_text() -> None:
    # 32 tokens of preamble + 4 words of at most 8 letters and a space, a token a letter: 32 + 4 * 9.
    assert TASK.limits.max_reply_tokens == 68


def test_too_few_different_texts_are_refused() -> None:
    task = build_task(ReverseTextSpec(name="reverse-text", max_words=1))
    with pytest.raises(ConfigError, match=r"600 different texts of 1 to 1 words.*Next: raise task"):
        task.examples(Split.TRAIN)
