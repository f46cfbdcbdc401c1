"""Replies judged by hand: the 29 further instructions of multi-constraint sets."""

from __future__ import annotations

import pytest

from strop.tasks.instructions.google import GOOGLE
from strop.tasks.instructions.multi import MULTI

ASK = "Tell me why the sea is blue"
ASK_SMALL = ASK.lower()
LETTERS = "abcdefghijklmnopqrstuvwxyz"
STORY = " ".join(f"{letter.upper()}a goes." for letter in LETTERS)
FIVE = {f"keyword{number}": letter for number, letter in enumerate("abcde", 1)}

# Instruction, arguments, replies that follow it, replies that do not.
MULTI_VECTORS = [
    (
        "copy:repeat_phrase",
        {"phrase": "a cat sat down", "small_n": 2},
        ["a dog sat down, a cat lay down"],
        ["a cat sat down a cat lay down", "a dog sat down", "a dog lay down a cat lay down"],
    ),
    ("copy:copy", {"prompt_to_repeat": ASK}, [ASK, f" {ASK_SMALL}\n"], [f"{ASK}!", "Tell me why"]),
    ("copy:copying_simple", {"prompt_to_repeat": ASK}, [ASK], [f"{ASK} Because of light."]),
    (
        "copy:copying_multiple",
        {"prompt_to_repeat": ASK, "N": 2},
        [f"{ASK}\n******\n{ASK}"],
        [ASK, f"{ASK} {ASK}", f"{ASK}******{ASK}******{ASK}"],
    ),
    # ASK[5:11] is "me why", and so is ASK[5:10] with its last character, number 10.
    ("new:copy_span_idx", {"prompt_to_repeat": ASK, "n_start": 5, "n_end": 10}, ["me why"], [ASK, "why"]),
    (
        "detectable_format:sentence_hyphens",
        {},
        ["It is.-So it is.-Bye."],
        ["It is. So it is.", "It is. -So it is.", "It is.", "well-known"],
    ),
    ("keywords:no_adjacent_consecutive", {}, ["we sail by boat"], ["a boat is here", "Sea to us"]),
    (
        "detectable_format:square_brackets",
        {},
        ["[all] [of] [it] [here]"],
        ["[all of it here]", "[all] of it"],
    ),
    (
        "detectable_format:bigram_wrapping",
        {},
        ["<<I am>> <<at home>>", "<<I am>> <<here>>"],
        ["<<I am at home>>", "<<I am>> at home", "<<I>> <<am>>"],
    ),
    ("keywords:word_once", {"keyword": "sun"}, ["The Sun."], ["sunny"]),
    (
        "keywords:word_count_different_numbers",
        {"keyword": "sun", "frequency": 2},
        ["sun, Sun and sunny"],
        ["one sun and sunny", "sun sun sun"],
    ),
    ("keywords:exclude_word_harder", {"keyword": "sun"}, ["a sunny day"], ["The Sun shines here", "a"]),
    ("keywords:palindrome", {}, ["a Level ground"], ["a cat", "aaa bbb", "1221"]),
    (
        "keywords:keyword_specific_position",
        {"keyword": "sun", "n": 2, "m": 2},
        ["It rains. The Sun, at last."],
        ["The sun shines.", "It rains. At last the sun."],
    ),
    (
        "keywords:start_end",
        {"keyword": "sun"},
        ["Sun is what we call sun"],
        ["Sun is sun.", "sun", "The sun"],
    ),
    ("paragraphs:paragraphs", {}, ["one\n* * *\ntwo"], ["one\n\ntwo", "a***b***c"]),
    ("paragraphs:paragraphs2", {}, ["one\n\ntwo"], ["one\ntwo", "one\n\ntwo\n\nthree"]),
    ("first_word:first_word_sent", {"first_word": "we"}, ["We go. We see!"], ["We go. You see."]),
    ("first_word:first_word_answer", {"first_word": "We"}, ["we, then you"], ["You then we", "went"]),
    ("last_word:last_word_sent", {"last_word": "now"}, ["Go now. See it NOW!"], ["Go now. See now it."]),
    ("last_word:last_word_answer", {"last_word": "now"}, ["Go. Now!"], ["Now go", "Go known"]),
    ("punctuation:punctuation_dot", {}, ["no dots in here!"], ["no dots in here.", "a"]),
    ("punctuation:punctuation_exclamation", {}, ["so calm in here."], ["so calm in here!", "a"]),
    ("count:lowercase_counting", {"N": 1}, ["ONE is Two"], ["one is Two", "A"]),
    (
        "count:counting_composition",
        {"n_sent": 2, "n_words": 2},
        ["We go. We see.\n* * *\nYou go. You see.\n* * *\nAll go. All see."],
        [
            "We go. We see.",
            "We go.\n* * *\nWe go.\n* * *\nWe go.",
            "a b. c d\n* * *\na b. c\n* * *\na b. c d.",
        ],
    ),
    ("count:count_unique", {}, ["each word once"], ["The cat and the dog", "a"]),
    (
        "count:count_increment_word",
        {"keyword1": "sun", "keyword2": "sea"},
        ["sun, sea and sea"],
        ["sun and sea", "sun sun sea sea"],
    ),
    ("letters:letter_counting", {"N": 10, "relation": "at least"}, ["ten letters 1"], ["9 letters, no"]),
    ("letters:letter_counting", {"N": 10, "relation": "less than"}, ["few of it"], ["ten letters 1", "asdf"]),
    (
        "letters:letter_counting2",
        {"letter": "e", "let_frequency": 2, "let_relation": "less than"},
        ["one of all"],
        ["one else all", "a"],
    ),
]


@pytest.mark.parametrize(("instruction_id", "arguments", "good", "bad"), MULTI_VECTORS)
def test_multi(instruction_id: str, arguments: dict[str, object], good: list[str], bad: list[str]) -> None:
    constraint = MULTI.bind(instruction_id, arguments, place="a vector")
    assert [text for text in good if not constraint.is_met(text)] == []
    assert [text for text in bad if constraint.is_met(text)] == []


def test_every_instruction_has_a_vector() -> None:
    assert {vector[0] for vector in MULTI_VECTORS} == set(MULTI) - set(GOOGLE)
