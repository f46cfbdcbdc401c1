"""Instructions with arguments, and replies that follow them or do not, judged by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strop.tasks.rows.row_task import read_preset

Arguments = Mapping[str, Any]

REQUEST = "Tell me why the sea is blue and who found it out"
_LINES = Path(__file__).with_name("vectors.jsonl").read_text("utf-8").splitlines()
VECTORS: list[dict[str, Any]] = [json.loads(line) for line in _LINES]
"""Of each: `family`, `id` (of RLVR the function), `arguments`, and replies, `good` and `bad`."""


def as_instruction(function: str, arguments: Arguments) -> tuple[str, dict[str, Any]]:
    """Return a function of RLVR-IFeval as an instruction."""
    names = read_preset("rlvr-ifeval").functions[function]
    return names["id"], {names.get(name, name): value for name, value in arguments.items()}


def first_arguments(family: str) -> dict[str, Arguments]:
    """Return valid arguments of each instruction: those of its first vector."""
    return {one["id"]: one["arguments"] for one in reversed(VECTORS) if one["family"] == family}


GOOGLE_ARGUMENTS = first_arguments("google")
RLVR_ARGUMENTS = first_arguments("rlvr")
MULTI_ARGUMENTS = {**GOOGLE_ARGUMENTS, **first_arguments("multi")}
WITHOUT_ARGUMENTS = """
count:punctuation ratio:sentence_type ratio:sentence_balance ratio:sentence_words words:alphabet
words:consonants words:last_first words:paragraph_last_first words:no_consecutive
words:palindrome words:prime_lengths sentence:alliteration_increment format:newline
format:no_whitespace format:line_indent format:no_bullets_bullets format:sub-bullets
format:output_template format:parentheses format:quote_unquote format:emoji repeat:repeat_simple
custom:multiples custom:sentence_alphabet custom:date_format_list words:odd_even_syllables
words:start_verb words:vowel format:thesis format:title_case format:quotes
custom:mcq_count_length custom:reverse_newline custom:word_reverse custom:character_reverse
custom:european_capitals_sort custom:csv_city custom:csv_special_character custom:csv_quotes
"""
BENCH_ARGUMENTS: dict[str, Arguments] = {
    **{name: {} for name in WITHOUT_ARGUMENTS.split()},
    "count:conjunctions": {"small_n": 4},
    "count:numbers": {"N": 3},
    "count:unique_word_count": {"N": 30},
    "count:word_count_range": {"min_words": 20, "max_words": 30},
    "count:keywords_multiple": {
        f"keyword{n}": word for n, word in enumerate(("harbor", "ship", "sail", "wind", "rope"), 1)
    },
    "words:repeats": {"small_n": 1},
    "words:words_position": {"keyword": "harbor"},
    "words:keywords_specific_position": {"keyword": "harbor", "n": 2, "m": 3},
    "sentence:increment": {"small_n": 2},
    "sentence:keyword": {"word": "harbor", "N": 2},
    "format:list": {"sep": "!?"},
    "format:options": {"options": "yes/no/maybe"},
    "repeat:repeat_change": {"prompt_to_repeat": REQUEST},
    "count:person_names": {"N": 3},
    "count:pronouns": {"N": 5},
    "count:words_japanese": {"N": 4},
    "ratio:stop_words": {"percentage": 10},
    "ratio:overlap": {"reference_text": REQUEST, "percentage": 40},
    "repeat:repeat_span": {"prompt_to_repeat": REQUEST, "n_start": 2, "n_end": 6},
}
