"""Replies judged by hand: the 25 instructions of IFEval and the 25 functions of RLVR-IFeval."""

from __future__ import annotations

import pytest

from strop.tasks.instructions.google import GOOGLE
from strop.tasks.instructions.rlvr import FUNCTIONS, RLVR, as_instruction

pytest.importorskip("langdetect")

ENGLISH = "we walk to the market in the morning and buy fresh bread"
GERMAN = "Wir gehen am Morgen auf den Markt und kaufen frisches Brot."
ENGLISH_CAPITALS, GERMAN_CAPITALS, GERMAN_SMALL = ENGLISH.upper(), GERMAN.upper(), GERMAN.lower()

# Instruction, arguments, replies that follow it, replies that do not.
GOOGLE_VECTORS = [
    ("keywords:existence", {"keywords": ["Sun", "c.t"]}, ["sunny c.t"], ["sun cat", "c.t"]),
    (
        "keywords:frequency",
        {"keyword": "sun", "frequency": 2, "relation": "at least"},
        ["sun and sun again", "sunny Sundays are good"],
        ["one sun only here"],
    ),
    (
        "keywords:frequency",
        {"keyword": "sun", "frequency": 2, "relation": "less than"},
        ["one sun only", "none of it here"],
        ["sun and sun again", "sun"],
    ),
    (
        "keywords:forbidden_words",
        {"forbidden_words": ["sun"]},
        ["Sunny days are here"],
        ["The Sun is here", "moon"],
    ),
    (
        "keywords:letter_frequency",
        {"letter": "S", "let_frequency": 3, "let_relation": "at least"},
        ["sun Sea sky"],  # s S s
        ["sun sea and air"],
    ),
    (
        "keywords:letter_frequency",
        {"letter": "#", "let_frequency": 1, "let_relation": "at least"},
        ["this is #one"],
        ["this is one"],
    ),
    ("language:response_language", {"language": "de"}, [GERMAN], [ENGLISH, "12345", "..."]),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 2, "relation": "at least"},
        ["One. Two.", "Dr. Who came! Why?"],
        ["Only Dr. Who came.", "One"],
    ),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 2, "relation": "less than"},
        ["Only one."],
        ["One. Two.", "!!!"],
    ),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 2},
        ["one\n***\ntwo", "***\none\n***\ntwo\n***"],
        ["one", "one\n***\n\n***\ntwo", "one\n***\ntwo\n***\nthree"],
    ),
    (
        "length_constraints:number_words",
        {"num_words": 5, "relation": "less than"},
        ["just four words here"],
        ["this one has five words", "two words"],
    ),
    (
        "length_constraints:number_words",
        {"num_words": 5, "relation": "at least"},
        ["this one has five words"],
        ["just four words here"],
    ),
    ("length_constraints:number_words", {"num_words": 2, "relation": "less than"}, ["Yes"], ["Yes indeed"]),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Then"},
        ["First it rained.\n\nthen, sun.", 'It.\n\n"Then" sun.'],
        ["First.\n\nAfter then.", "Then it rained.", "One.\n\nThen.\n\nThree."],
    ),
    (
        "detectable_content:number_placeholders",
        {"num_placeholders": 2},
        ["[name] of [place]"],
        ["[name] only", "[a\nb] [c]", "]["],
    ),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, ["Hi.\np. s. bye"], ["Hi.\nPS bye"]),
    (
        "detectable_format:number_bullet_lists",
        {"num_bullets": 2},
        ["Two:\n* one\n  - two"],
        ["* one", "* a\n* b\n* c", "**bold**\n* one"],
    ),
    (
        "detectable_format:constrained_response",
        {},
        ["My answer is no.", "Well. My answer is maybe."],
        ["no", "My answer is sure."],
    ),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        ["*one* and **two**"],
        ["*one* and two", "* * *", "*one\ntwo* *three*"],
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "PART", "num_sections": 2},
        ["PART 1 x PART2 y"],
        ["PART 1 x Part 2 y", "PART one PART two"],
    ),
    (
        "detectable_format:json_format",
        {},
        ['{"a": 1}', '```json\n["x"]\n```'],
        ["{}", "a", "1", '"text"', "{'a': 1}", '{"a": 1} done', "[" * 99_999],
    ),
    ("detectable_format:title", {}, ["<<joy>>\nText"], ["<joy>", "<< >>", "<<a\nb>>"]),
    ("combination:two_responses", {}, ["one\n******\ntwo"], ["one ****** one", "one", "a******b******c"]),
    (
        "combination:repeat_prompt",
        {"prompt_to_repeat": "Say it."},
        ["say it.\nIt."],
        ["Say it.", "Well: Say it. It."],
    ),
    (
        "startend:end_checker",
        {"end_phrase": "That is all."},
        ["Yes. that is ALL.", '"Yes. That is all."'],
        ["That is all. Bye", "That is a"],
    ),
    ("startend:quotation", {}, ['"Well said"'], ['"', '""', '"Well" said', "'Well said'"]),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        ["NASA and ESA fly"],
        ["NASA and Esa fly", "NASA ESA"],
    ),
    ("change_case:english_capital", {}, [ENGLISH_CAPITALS], [ENGLISH, GERMAN_CAPITALS, "123 456 789"]),
    ("change_case:english_lowercase", {}, [ENGLISH], [ENGLISH_CAPITALS, GERMAN_SMALL, "asdf"]),
    ("punctuation:no_comma", {}, ["no commas are here"], ["one, two and three", "", "asdf"]),
]

RLVR_VECTORS = [
    ("verify_keywords", {"keyword_list": ["sun", "sea"]}, ["Sun and seaside"], ["sun only"]),
    (
        "verify_keyword_frequency",
        {"word": "sun", "N": 2},
        ["Sun, sun, sunny"],
        ["sun sunny day", "sun sun sun"],
    ),
    (
        "validate_forbidden_words",
        {"forbidden_words": ["sun"]},
        ["the moon shines", "a sunny day here"],
        ["the sun shines", "moon"],
    ),
    ("verify_letter_frequency", {"letter": "a", "N": 2}, ["a cat, no end"], ["a cat, Ann No", "cat"]),
    ("validate_response_language", {"language": "en"}, [ENGLISH], [GERMAN, "42"]),
    ("verify_paragraph_count", {"N": 2}, ["one\n* * *\ntwo", "a***b"], ["one", "a * * * * * * b"]),
    (
        "validate_word_constraint",
        {"N": 20, "quantifier": "around"},  # a tenth: 18 to 22
        ["word " * 18, "word " * 22],
        ["word " * 17, "word " * 23],
    ),
    ("validate_word_constraint", {"N": 4, "quantifier": "at most"}, ["three words here"], ["a", "a b c d e"]),
    (
        "validate_word_constraint",
        {"N": 2, "quantifier": "at most"},
        ["two words"],
        ["now three words", "one"],
    ),
    (
        "verify_sentence_constraint",
        {"N": 3, "quantifier": "around"},  # 2 to 4
        ["We see. You go.", "One. Two.", "A b. C d. E f. G h."],
        ["We go home.", "A. B. C. D. E. F g h i."],
    ),
    (
        "validate_paragraphs",
        {"N": 2, "first_word": "Then", "i": 2},
        ["One.\n\nthen, two."],
        ["One.\n\nThenceforth two.", "Then.", "Then.\n\nTwo."],
    ),
    ("verify_postscript", {"postscript_marker": "P.P.S"}, ["Hi P.P.S I left", "Hi p. p.s"], ["P.S. I left"]),
    ("validate_placeholders", {"N": 2}, ["Dear [a], at [b] street"], ["Dear [a] b c"]),
    (
        "verify_bullet_points",
        {"N": 1},
        ["Listed below:\n- one thing", "* a"],
        ["- a one\n- b two", "no list at all"],
    ),
    ("validate_title", {}, ["<<One>> text", "<<One>> <<Two>>"], ["One"]),
    (
        "validate_choice",
        {"options": ["My answer is yes.", "Maybe"]},
        ["my answer  is yes.", "MAYBE"],
        ["a", "Maybe not", "My answer is yes. Maybe", ""],
    ),
    ("validate_choice", {"options": "red / blue"}, ["Red"], ["red / blue", "re"]),
    ("validate_choice", {"options": "['red', 'blue']"}, ["blue"], ["['red', 'blue']"]),
    ("validate_highlighted_sections", {"N": 1}, ["a *good* idea"], ["a good idea here"]),
    (
        "validate_sections",
        {"N": 2, "section_splitter": "Section"},
        ["Section 1 a Section 2 b"],
        ["Section 1 a b c", "SECTION 1 a SECTION 2 b"],
    ),
    ("validate_json_format", {}, ['{"a": [1]}'], ["[]", "yes"]),
    ("validate_repeat_prompt", {"original_prompt": "Say it."}, ["Say it. It.", "say it. It."], ["Say it."]),
    ("validate_two_responses", {}, ["a\n******\nb"], ["a ****** a", "a****** b ****** c", "a b"]),
    ("validate_uppercase", {}, [ENGLISH_CAPITALS], [GERMAN_CAPITALS, ENGLISH, "1 2 3", "A"]),
    ("validate_lowercase", {}, [ENGLISH], [GERMAN_SMALL, ENGLISH_CAPITALS, "1 2 3", "a"]),
    (
        "validate_frequency_capital_words",
        {"N": 1, "quantifier": "at most"},
        ["only NASA flies", "no one flies"],
        ["NASA and ESA fly", "fly"],
    ),
    ("validate_end", {"end_phrase": "the end"}, ["It is The End"], ["the end."]),
    ("validate_quotation", {}, ['"said"'], ["said", '"', "'said'"]),
    ("validate_no_commas", {}, ["not one of them"], ["one, two or three", "", "a"]),
]


@pytest.mark.parametrize(("instruction_id", "arguments", "good", "bad"), GOOGLE_VECTORS)
def test_ifeval(instruction_id: str, arguments: dict[str, object], good: list[str], bad: list[str]) -> None:
    constraint = GOOGLE.bind(instruction_id, arguments, place="a vector")
    assert [text for text in good if not constraint.is_met(text)] == []
    assert [text for text in bad if constraint.is_met(text)] == []


@pytest.mark.parametrize(("function", "arguments", "good", "bad"), RLVR_VECTORS)
def test_rlvr(function: str, arguments: dict[str, object], good: list[str], bad: list[str]) -> None:
    constraint = RLVR.bind(*as_instruction(function, arguments), place="a vector")
    assert [text for text in good if not constraint.is_met(text)] == []
    assert [text for text in bad if constraint.is_met(text)] == []


def test_every_instruction_has_a_vector() -> None:
    assert {vector[0] for vector in GOOGLE_VECTORS} == set(GOOGLE)
    assert {vector[0] for vector in RLVR_VECTORS} == set(FUNCTIONS)
