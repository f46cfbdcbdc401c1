"""The harness's rules against verdicts recorded from lm-eval 0.4.13, and what separates strop's own.

`ifeval_parity.jsonl` has texts of strop's own, judged by the harness's code in an environment of its own.
Every disagreement would be listed here; there is none.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from strop.errors import ConfigError, DataError
from strop.evaluate.harness import LM_EVAL
from strop.tasks.instructions.google import GOOGLE
from strop.tasks.instructions.harness import (
    HARNESS,
    SENTENCES_ID,
    count_capital_tokens,
    is_drawn,
    load_punkt,
)
from strop.tasks.instructions.replies import judge_instructions
from tests.conftest import require_system_part

pytest.importorskip("langdetect")

RECORDED: Sequence[Mapping[str, Any]] = [
    json.loads(line)
    for line in (Path(__file__).parent / "ifeval_parity.jsonl").read_text(encoding="utf-8").splitlines()
]

# On the recorded texts strop's own rules and the harness's disagree this often, and only here.
OWN_DISAGREEMENTS = {
    "keywords:existence": 4,  # keywords are texts, not patterns: 'h.rb' does not find 'harb'
    "keywords:frequency": 1,  # '...' says nothing, so the bread that it leaves out earns nothing
    "keywords:forbidden_words": 2,  # '{}' and '"' say nothing
    "keywords:letter_frequency": 1,  # 'asdf' says nothing
    "language:response_language": 3,  # '...' and '"' are in no language; the harness counts them as English
    "length_constraints:number_sentences": 3,  # a blank line and a mark before the quote end a sentence
    "length_constraints:number_words": 3,  # two words or none are no answer of less than 30 words
    "change_case:capital_word_frequency": 2,  # '{}' and '"' say nothing
    "punctuation:no_comma": 2,  # 'asdf' and '"' say nothing
}


def verdicts(record: Mapping[str, Any], family: Any) -> tuple[bool, bool]:
    constraint = family.bind(record["id"], record["arguments"], place="a record")
    verdict = judge_instructions([constraint], record["text"], with_loose=True)
    return verdict.strict[0], verdict.loose[0]


def test_the_record_covers_all_instructions_with_both_verdicts() -> None:
    assert len(RECORDED) >= 300
    assert {record["id"] for record in RECORDED} == set(HARNESS)
    for verdict in (True, False):
        assert {record["id"] for record in RECORDED if record["strict"] is verdict} == set(HARNESS)
    assert any(record["loose"] and not record["strict"] for record in RECORDED)


@pytest.mark.parametrize("instruction_id", sorted(set(HARNESS) - {SENTENCES_ID}))
def test_verdicts_are_those_of_the_harness(instruction_id: str) -> None:
    records = [record for record in RECORDED if record["id"] == instruction_id]
    differing = [
        record for record in records if verdicts(record, HARNESS) != (record["strict"], record["loose"])
    ]
    assert differing == []


def test_verdicts_on_sentences_are_those_of_the_harness() -> None:
    require_system_part("punkt_tab of nltk (make harness-deps)", LM_EVAL.is_ready())
    records = [record for record in RECORDED if record["id"] == SENTENCES_ID]
    assert [verdicts(record, HARNESS) for record in records] == [
        (record["strict"], record["loose"]) for record in records
    ]


def test_own_rules_differ_where_they_mean_to() -> None:
    differing = [
        record for record in RECORDED if verdicts(record, GOOGLE) != (record["strict"], record["loose"])
    ]
    assert Counter(record["id"] for record in differing) == OWN_DISAGREEMENTS


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("NASA and ESA", 2),
        ("NASA's", 1),  # NASA + 's
        ("IT'S", 2),  # IT + 'S
        ("CANNOT. GIMME", 4),  # CAN NOT . GIM ME
        ("DON'T", 2),  # DO N'T
        ("A:B, 1:2", 2),  # A : B , and 1:2 without letters
        ("X-RAY U.S. a.m.", 2),
        ("none at all", 0),
    ],
)
def test_capital_tokens_are_cut_like_treebank(text: str, count: int) -> None:
    assert count_capital_tokens(text) == count


@pytest.mark.parametrize(
    ("instruction_id", "arguments", "drawn"),
    [
        ("detectable_format:number_bullet_lists", {"num_bullets": 0}, True),
        ("detectable_format:number_bullet_lists", {"num_bullets": 1}, False),
        ("keywords:letter_frequency", {"letter": "#", "let_frequency": 2, "let_relation": "at least"}, True),
        ("keywords:letter_frequency", {"letter": "b", "let_frequency": 2, "let_relation": "at least"}, False),
        (
            "length_constraints:nth_paragraph_first_word",
            {"num_paragraphs": 2, "nth_paragraph": 3, "first_word": "a"},
            True,
        ),
    ],
)
def test_arguments_that_the_harness_draws_are_told(
    instruction_id: str, arguments: dict[str, Any], drawn: bool
) -> None:
    assert is_drawn(HARNESS.bind(instruction_id, arguments, place="a row")) is drawn


def test_a_keyword_that_is_no_pattern_is_refused() -> None:
    with pytest.raises(DataError, match=r"row 3 gives keywords:existence .* as a pattern it cannot be read"):
        HARNESS.bind("keywords:existence", {"keywords": ["c++ (new"]}, place="row 3")


def test_missing_sentence_splitter_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    load_punkt.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "nltk.tokenize", None)
    with pytest.raises(
        ConfigError, match=r"task\.rules=lm-eval judges .*Next: install both, or set task\.rules"
    ):
        load_punkt()
    load_punkt.cache_clear()
