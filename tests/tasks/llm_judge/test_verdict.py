"""What of a judge's answer counts."""

from __future__ import annotations

import pytest

from strop.rollout import Failure, FailureOwner
from strop.tasks.llm_judge.verdict import Judgement, read_judgement


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
    found = read_judgement(answer)
    assert isinstance(found, Judgement)
    assert found.score == score


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "I give it 0.9.",
        "Score: 1",
        "I cannot help with that.",
        '{"score": 1, "reason": "x"} That is my grade.',
        '{"score": "1", "reason": "x"}',
        '{"score": true, "reason": "x"}',
        '{"score": null, "reason": "x"}',
        '{"grade": 1}',
        '[{"score": 1}]',
        '{"outer": {"score": 1}}',
        '{"score": 1, "reason": "cut in the mid',
        '<think>still at it {"score": 1, "reason": "x"}',
        "{" * 5000 + "}",
    ],
)
def test_anything_else_has_no_score(answer: str) -> None:
    found = read_judgement(answer)
    assert isinstance(found, Failure)
    assert (found.owner, found.kind) == (FailureOwner.ENGINE, "judge_unparsable")


@pytest.mark.parametrize("score", ["1.5", "-0.1", "10", "NaN", "Infinity", "1e400"])
def test_a_score_out_of_bounds_is_no_score(score: str) -> None:
    found = read_judgement('{"score": ' + score + ', "reason": "x"}')
    assert isinstance(found, Failure)
    assert (found.owner, found.kind) == (FailureOwner.ENGINE, "judge_out_of_bounds")
