"""Texts that are the same, or nearly: found whatever their form, and not where only the form is the same."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.tasks.overlap import MAX_SHARERS, MIN_PIECES, PIECE_WORDS, Overlap, find_overlap, normal_text

STORY = (
    "A farmer keeps 12 brown hens in the barn behind her house, and every hen lays 3 eggs in a week; after a"
    " month she drives to the market in town, where a dozen eggs costs 4 coins. How much does she earn there?"
)


def overlap(held_out: Sequence[str], learned: Sequence[str]) -> Overlap:
    return find_overlap(held_out, learned, str)


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("What is 3 + 4?", "what is  3+4 ?", True),
        ("What is 3 \u2212 4?", "What is 3 - 4?", True),
        ("The \u201cred\u201d fox's den.", "the red foxs den", True),
        ("\uff37\uff48\uff41\uff54 is \uff13?", "what is 3", True),
        ("caf\u00e9 No\u00ebl", "cafe\u0301 noe\u0308l", True),
        ("STRASSE", "stra\u00dfe", True),
        ("{1,2, 3}", "{1, 2, 3}", True),
        ("Line\none\t", "line one", True),
        ("What is 3 + 4?", "What is 3 - 4?", False),
        ("What is 3 * 4?", "What is 3 + 4?", False),
        ("Round 3.5", "Round 3 5", False),
        ("At 3:45", "At 3 45", False),
        ("2^3", "2*3", False),
        ("5!", "5", False),
        ("3 4", "34", False),
        ("f(x) < 1", "f(x) > 1", False),
    ],
)
def test_form_is_evened_out_and_what_carries_meaning_stays(one: str, other: str, *, is_same: bool) -> None:
    assert (normal_text(one) == normal_text(other)) is is_same


@given(st.text())
def test_evening_out_twice_changes_nothing_more(text: str) -> None:
    once = normal_text(text)
    assert normal_text(once) == once


def test_equal_texts_are_found_by_their_first_place() -> None:
    found = overlap(["b", "What?", "what"], ["a", "WHAT", "what?"])
    assert (found.equal, found.similar) == ({1: 1, 2: 1}, {})


def edit(text: str, *places: int) -> str:
    words = text.split()
    return " ".join("other" if place in places else word for place, word in enumerate(words))


def others(number: int) -> list[str]:
    draw = random.Random(number)
    return [" ".join(name(draw.randrange(5000)) for _ in range(40)) for _ in range(number)]


def name(number: int) -> str:
    """A word without a digit: digits make it a number."""
    return "w" + "".join(chr(ord("a") + int(digit)) for digit in str(number))


@pytest.mark.parametrize(
    ("learned", "similar"),
    [
        # Few words changed or added; of several, the one that has most.
        ([edit(STORY, 8)], {3: 30}),
        ([f"Once more. {STORY} Tell me."], {3: 30}),
        ([edit(STORY, 0, 1, 38)], {3: 30}),
        ([edit(STORY, 5), edit(STORY, 0), edit(STORY, 12)], {3: 31}),
        # Many words changed, or other numbers, are another text; more numbers around are no difference.
        ([edit(STORY, 5, 15, 25, 35)], {}),
        ([STORY.replace("12", "15")], {}),
        ([f"7. {STORY}"], {3: 30}),
    ],
)
def test_what_is_similar(learned: list[str], similar: dict[int, int]) -> None:
    found = overlap([*others(3), STORY], [*others(30), *learned])
    assert (found.equal, found.similar) == ({}, similar)


def test_a_short_text_is_compared_as_a_whole_only() -> None:
    words = [name(number) for number in range(PIECE_WORDS + MIN_PIECES - 1)]
    for num_words, is_found in ((len(words), True), (len(words) - 1, False)):
        text = " ".join(words[:num_words])
        assert (overlap([text], [*others(30), f"{text} and on"]).similar == {0: 30}) is is_found


def test_wording_that_many_texts_share_says_nothing() -> None:
    rule = " ".join(f"rule-{name(number)}" for number in range(100))
    texts = [f"{rule} {other}" for other in others(MAX_SHARERS + 2)]
    assert overlap(texts[:1], texts[1:]).similar == {}
    # Of few texts, half of them.
    assert overlap(texts[:1], texts[1:4]).similar == {}
    assert overlap(texts[:1], [texts[1], *others(10)]).similar == {0: 0}


def test_a_closed_world_of_problems_is_no_overlap() -> None:
    draw = random.Random(1)
    form = (
        "Tom has {} red apples in his basket and {} green ones at home, and he buys {} more of them from the"
        " old man at the corner before {} of his friends come. How many apples has he got in the end?"
    )
    asked = list({form.format(*(draw.randint(1, 9) for _ in range(4))) for _ in range(600)})
    found = overlap(asked[:100], asked[100:])
    assert (found.equal, found.similar) == ({}, {})


@pytest.mark.slow
def test_the_answer_is_that_of_counting_one_by_one() -> None:
    draw = random.Random(2)
    vocabulary = list(map(name, range(12)))
    base = [" ".join(draw.choices(vocabulary, k=40)) for _ in range(20)]

    def vary(text: str) -> str:
        words = text.split()
        for _ in range(draw.randrange(4)):
            words[draw.randrange(len(words))] = draw.choice(vocabulary)
        return " ".join(words)

    learned = [vary(draw.choice(base)) for _ in range(60)]
    held_out = [vary(draw.choice(base)) for _ in range(60)]
    pieces = [{tuple(text.split()[i : i + 8]) for i in range(33)} for text in (*held_out, *learned)]
    asked, known = pieces[:60], pieces[60:]
    found = overlap(held_out, learned)
    for index, own in enumerate(asked):
        kept = {piece for piece in own if sum(piece in one for one in known) <= MAX_SHARERS}
        best = max((len(kept & one) for one in known), default=0)
        is_similar = len(kept) >= MIN_PIECES and best >= 0.7 * len(kept)
        if index not in found.equal:
            assert (index in found.similar) is is_similar
            if is_similar:
                assert len(kept & known[found.similar[index]]) == best
