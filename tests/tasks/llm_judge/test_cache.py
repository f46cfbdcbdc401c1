"""Judgements on this disk: what was kept is found, and what cannot be one is asked for again."""

from __future__ import annotations

from pathlib import Path

import pytest

from strop.tasks.llm_judge.cache import find_judgement, keep_judgement
from strop.tasks.llm_judge.verdict import Judgement


def test_what_was_kept_is_found(tmp_path: Path) -> None:
    path = tmp_path / "ab" / "entry.json"
    assert find_judgement(path) is None
    keep_judgement(path, Judgement(score=0.25, reason="thin"))
    assert find_judgement(path) == Judgement(score=0.25, reason="thin")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"score": 0.5}',
        '{"score": null, "reason": ""}',
        '{"score": 1.5, "reason": ""}',
        '{"score": NaN, "reason": ""}',
    ],
)
def test_what_is_no_judgement_counts_as_absent(text: str, tmp_path: Path) -> None:
    (tmp_path / "entry.json").write_text(text)
    assert find_judgement(tmp_path / "entry.json") is None
