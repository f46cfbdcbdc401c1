"""The order file: one line per example, the easiest first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from strop.errors import CheckRefused
from strop.evaluate import Validity, write_order
from tests.evaluate.stored_results import make_example_score, make_result, make_score


def test_examples_are_sorted_by_how_often_they_were_solved(tmp_path: Path) -> None:
    shares = {"d": None, "a": 0.25, "c": 1.0, "b": 0.25}
    sampled = make_score(
        {name: make_example_score(share, num_judged=4 if share else 0) for name, share in shares.items()}
    )
    result = make_result(shares, sampled=sampled, num_samples=4)
    write_order(result, tmp_path / "order.jsonl")
    header, *rows = [json.loads(line) for line in (tmp_path / "order.jsonl").read_text().splitlines()]
    assert header == {
        "task": "arithmetic",
        "task_version": "v1",
        "split": "held_out",
        "model_digest": "m1",
        "num_examples": 4,
    }
    assert [(row["example_id"], row["solved_frac"], row["num_samples"]) for row in rows] == [
        ("c", 1.0, 4),
        ("a", 0.25, 4),
        ("b", 0.25, 4),
        ("d", None, 0),
    ]


def test_without_samples_the_greedy_reply_counts(tmp_path: Path) -> None:
    write_order(make_result({"a": 0.0, "b": 1.0}), tmp_path / "order.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "order.jsonl").read_text().splitlines()][1:]
    assert rows == [
        {"example_id": "b", "solved_frac": 1.0, "num_samples": 1},
        {"example_id": "a", "solved_frac": 0.0, "num_samples": 1},
    ]


def test_no_curriculum_comes_from_an_invalid_result(tmp_path: Path) -> None:
    with pytest.raises(CheckRefused, match="invalid: truncation"):
        write_order(make_result(validity=Validity.TRUNCATION), tmp_path / "order.jsonl")
    assert not (tmp_path / "order.jsonl").exists()
