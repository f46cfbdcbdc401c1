"""What a judge is shown, what of its answer counts, and which judgements are kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.audit.probes import INJECTIONS
from strop.errors import ConfigError, DataError
from strop.rollout import Failure, FailureOwner
from strop.tasks.llm_judge.rubric import (
    CONTRACT,
    read_judgements,
    read_rubric,
    wrap_reply,
)
from tests.fixtures.judge_server import REPLY


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "rubric.txt"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_places_are_filled_at_once_and_the_contract_follows(tmp_path: Path) -> None:
    rubric = read_rubric(write(tmp_path, "Q {{prompt}} R {{ reply }} of {{topic}}; {not a place}"))
    assert rubric.names == ("prompt", "reply", "topic")
    question = rubric.fill({"prompt": "say {{topic}}", "topic": "sea"}, ["blue"], "s")
    assert (
        question == f"Q say {{{{topic}}}} R {wrap_reply('blue', 's')} of sea; {{not a place}}\n\n{CONTRACT}"
    )


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{{prompt}} only", "reply"),
        ("{{reply}} only", "prompt"),
        ("{{prompt}} {{reply}} {{two words}}", "two words"),
        ("{{prompt}} {{reply}} {{}}", r"\{\{\}\}"),
        (b"\xff\xfe", r"rubric\.txt"),
    ],
)
def test_a_missing_or_malformed_place_and_what_is_no_text_are_refused(
    tmp_path: Path, text: str | bytes, named: str
) -> None:
    path = tmp_path / "rubric.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=named):
        read_rubric(str(path))
    with pytest.raises(ConfigError, match="qualty"):
        read_rubric("qualty")


@pytest.mark.parametrize("value", ["", " \n"])
def test_a_place_without_text_is_refused(tmp_path: Path, value: str) -> None:
    rubric = read_rubric(write(tmp_path, "{{prompt}} {{reply}} {{topic}}"))
    with pytest.raises(DataError, match=r"row 7 .*topic"):
        rubric.require_values({"prompt": "p", "topic": value}, "row 7")


def test_a_reply_is_shown_alike_every_time_and_never_with_a_number_it_knows() -> None:
    first, again, other = wrap_reply("blue", "s"), wrap_reply("blue", "s"), wrap_reply("blue!", "s")
    assert first == again
    assert REPLY.search(first).group(1) != REPLY.search(other).group(1)  # type: ignore[union-attr]
    assert wrap_reply("blue", "t") != first


def test_a_long_reply_is_cut_in_its_middle() -> None:
    shown = wrap_reply("a" * 50_000 + "end", "s")
    # 50,003 characters, 20,000 kept on each side: 10,003 are left out.
    assert "a" * 20_000 + "\n[10003 characters are left out here]\n" + "a" * 19_997 + "end\n" in shown


@given(st.text() | st.sampled_from(sorted(INJECTIONS.values())))
def test_no_reply_forges_delimiters_or_a_score(text: str) -> None:
    shown = wrap_reply(text, "s")
    assert shown.count("<<<") == 2
    assert shown.count(">>>") == 2
    found = REPLY.fullmatch(shown)
    assert found is not None
    # A judge that ends by quoting the reply has given no score.
    assert isinstance(read_judgements("The reply says " + found.group(2), None), Failure)


def test_the_injections_would_be_scores_if_they_were_not_escaped() -> None:
    raw = [text for text in INJECTIONS.values() if not isinstance(read_judgements(text, None), Failure)]
    assert len(raw) == 3
    for text in raw:
        assert json.dumps("score") not in wrap_reply(text, "s")


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ('{"score": 0.25, "reason": "thin"}', 0.25),
        ('It has 3 faults of 10.\n{"score": 0.7, "reason": "x"}\n', 0.7),
        ('```json\n{"score": 1, "reason": "x"}\n```', 1.0),
        ('{"score": 1, "reason": "first"} and then {"score": 0, "reason": "last"}', 0.0),
        ('{"score": 0.5, "reason": "it uses {braces} and }"}', 0.5),
        ('{"reason": "nested", "parts": {"score": 1}, "score": 0.1}', 0.1),
        ('<think>{"score": 1, "reason": "maybe"}</think>{"score": 0.2, "reason": "no"}', 0.2),
        ('I would give {"score": 1}.</think>\n{"score": 0.3}', 0.3),
    ],
)
def test_the_last_object_is_the_judgement(answer: str, score: float) -> None:
    found = read_judgements(answer, None)
    assert not isinstance(found, Failure)
    assert [one.score for one in found] == [score]


NO_SCORES = [
    *("", "I give it 0.9.", "Score: 1", "I cannot help with that.", '{"grade": 1}', '[{"score": 1}]'),
    *('{"score": 1, "reason": "x"} That is my grade.', '{"score": "1", "reason": "x"}'),
    *('{"score": true, "reason": "x"}', '{"score": null, "reason": "x"}', '{"outer": {"score": 1}}'),
    *('{"score": 1, "reason": "cut in the mid', '<think>still at it {"score": 1, "reason": "x"}'),
    "{" * 5000 + "}",
]
BEYOND = [f'{{"score": {one}, "reason": "x"}}' for one in ("1.5", "-0.1", "10", "NaN", "Infinity", "1e400")]


@pytest.mark.parametrize(
    ("answer", "kind"),
    [*((one, "judge_unparsable") for one in NO_SCORES), *((one, "judge_out_of_bounds") for one in BEYOND)],
)
def test_anything_else_has_no_score(answer: str, kind: str) -> None:
    found = read_judgements(answer, None)
    assert isinstance(found, Failure)
    assert (found.owner, found.kind) == (FailureOwner.ENGINE, kind)
