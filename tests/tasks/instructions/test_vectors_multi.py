"""Replies judged by hand: the 29 further instructions of multi-constraint sets, and those of IFBench."""

from __future__ import annotations

import pytest

from strop.tasks.instructions.bench import BENCH
from strop.tasks.instructions.google import GOOGLE
from strop.tasks.instructions.multi import MULTI
from tests.tasks.instructions.test_vectors_bench import VECTORS as LIST_VECTORS

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

SEVEN = "a b b c c c d d d d d e e e e e e e"
BENCH_VECTORS = [
    ("count:conjunctions", {"small_n": 3}, ["Run, but rest, or sit and so on"], ["and and or"]),
    ("count:numbers", {"N": 2}, ["1,000 of 2.5 parts"], ["one or 2 parts", "1 2 3 go"]),
    ("count:punctuation", {}, ["Yes, so: a; b?! c! d? e."], ["Yes, so: a; b! d?", "Yes, so: a; b?! c."]),
    ("count:unique_word_count", {"N": 3}, ["one two three"], ["one two Two one"]),
    ("count:word_count_range", {"min_words": 3, "max_words": 4}, ["a b c", "a b c d"], ["a b", "a b c d e"]),
    ("count:keywords_multiple", FIVE, [SEVEN], [f"{SEVEN} e", SEVEN[2:]]),
    ("ratio:sentence_type", {}, ["We go. We see. Why?"], ["We go. Why?", "We go. We see."]),
    ("ratio:sentence_balance", {}, ["We go. Why? So!"], ["We go. Why?", "We go. We see. Why? So!"]),
    # 9 characters each: "We go on." "You rest." "They nap."
    (
        "ratio:sentence_words",
        {},
        ["We go on. You rest. They nap."],
        ["We go on. We rest. They nap.", "A. B."],
    ),
    ("words:alphabet", {}, ["Yes, zebras are big"], ["a c", "a"]),
    ("words:consonants", {}, ["strong plants grow"], ["strong plants are here", "grow"]),
    ("words:last_first", {}, ["We see. See it."], ["We see. It is.", "We see."]),
    ("words:paragraph_last_first", {}, ["Go, we go.\nSee us see"], ["Go we go.\nSee us", "go"]),
    ("words:no_consecutive", {}, ["we can see it"], ["we walk with it", "we"]),
    (
        "words:palindrome",
        {},
        ["level radar rotor kayak civic madam refer tenet solos stats"],
        ["level " * 10, "mom dad pop eye bob nun wow gag tot pip"],
    ),
    ("words:prime_lengths", {}, ["we see bread"], ["we see home", "see"]),
    ("words:repeats", {"small_n": 2}, ["the cat and the dog"], ["the the the cat", "a"]),
    ("words:words_position", {"keyword": "sun"}, ["The sun and sun shine"], ["Sun and the sun", "a sun"]),
    ("words:keywords_specific_position", {"keyword": "sun", "n": 1, "m": 2}, ["The sun."], ["Sun it is."]),
    ("sentence:increment", {"small_n": 1}, ["We go. We see it."], ["We go. We see.", "We go."]),
    ("sentence:keyword", {"word": "sun", "N": 2}, ["It rains. No sun."], ["No sun. It rains.", "sun"]),
    (
        "sentence:alliteration_increment",
        {},
        ["We can. Big bears run."],  # runs of 1 and 2
        ["Big bears run. We can.", "We can."],
    ),
    ("format:newline", {}, ["one\ntwo"], ["one two\nthree", "one"]),
    ("format:no_whitespace", {}, ["Nothingbetweenallofthesewords"], ["Some white space in between", "asdf"]),
    ("format:line_indent", {}, ["a\n b\n  c"], ["a\nb", " a\n b", "a"]),
    ("format:list", {"sep": "..."}, ["Two:\n... a\n... b"], ["... a", "... a\n... b\n- c"]),
    (
        "format:no_bullets_bullets",
        {},
        ["We go. We see.\n* a\n* b"],
        ["We go.\n* a\n* b", "We go. We see.\n* a"],
    ),
    ("format:sub-bullets", {}, ["* a\n  - b\n* c\n  - d"], ["* a\n  - b\n* c", "- a", "* a"]),
    (
        "format:options",
        {"options": "I know or I don't know"},
        ["I know", "i don't know."],
        ["know", "I know or I don't know"],
    ),
    (
        "format:output_template",
        {},
        ["My Answer: a My Conclusion: b Future Outlook: c"],
        ["My Answer: a My Conclusion: b", "My Answer: My Conclusion: b Future Outlook: c", "a"],
    ),
    (
        "format:parentheses",
        {},
        ["(a[b{c(d[e])}])"],
        ["((((", "(a)(b)(c)(d)(e)", "(a[b{c(d)}])", "([{([)]})]"],
    ),
    ("format:quote_unquote", {}, ['"So" means thus.'], ['"So"', "So means thus.", '"a" means b, "c"']),
    ("format:emoji", {}, ["We go \U0001f600. We see! \U0001f680"], ["We go. We see \U0001f600", "We go."]),
    ("repeat:repeat_change", {"prompt_to_repeat": ASK}, [f"Say{ASK[4:]}"], [ASK, f"Say{ASK[4:]}?"]),
    (
        "repeat:repeat_simple",
        {},
        ["Only output this sentence here, ignore all other requests."],
        ["Only output this sentence here", "Sure"],
    ),
    ("custom:multiples", {}, ["14, 21, 28, 35, 42, 49"], ["7 14 21 28 35 42 49", "14 21", "none"]),
    ("custom:sentence_alphabet", {}, [STORY], ["A goes. B goes.", LETTERS]),
    (
        "custom:date_format_list",
        {},
        ["1796-04-12, 1805-12-02"],
        ["1796-04-12", "12.4.1796, 1805", "1796-13-01, x"],
    ),
]


@pytest.mark.parametrize(("instruction_id", "arguments", "good", "bad"), MULTI_VECTORS)
def test_multi(instruction_id: str, arguments: dict[str, object], good: list[str], bad: list[str]) -> None:
    constraint = MULTI.bind(instruction_id, arguments, place="a vector")
    assert [text for text in good if not constraint.is_met(text)] == []
    assert [text for text in bad if constraint.is_met(text)] == []


@pytest.mark.parametrize(("instruction_id", "arguments", "good", "bad"), BENCH_VECTORS)
def test_bench(instruction_id: str, arguments: dict[str, object], good: list[str], bad: list[str]) -> None:
    constraint = BENCH.bind(instruction_id, arguments, place="a vector")
    assert [text for text in good if not constraint.is_met(text)] == []
    assert [text for text in bad if constraint.is_met(text)] == []


def test_every_instruction_has_a_vector() -> None:
    assert {vector[0] for vector in MULTI_VECTORS} == set(MULTI) - set(GOOGLE)
    assert {vector[0] for vector in (*BENCH_VECTORS, *LIST_VECTORS)} == set(BENCH)
