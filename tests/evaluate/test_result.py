"""Stored scores: complete or unreadable, compared only under one protocol."""

from __future__ import annotations

import json
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest

from strop.errors import CheckRefused, CorruptRecord, StoreError
from strop.evaluate import Summary, dump_result
from strop.evaluate.result import (
    PROTOCOL_FIELDS,
    PartScores,
    PassAtK,
    Validity,
    read_result,
    refuse_invalid,
    result_name,
    write_result,
)
from strop.rollout import Sampling, Split
from tests.evaluate.stored_results import make_result, make_score


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a folder with ; and 'quotes'" / "r.json"
    path.parent.mkdir()
    estimate = PassAtK(value=0.75, low=0.5, high=0.9, num_examples=2, num_left_out=0)
    result = make_result(
        sampled=make_score(
            {"a": 0.5, "b": None},
        ),
        num_samples=4,
        pass_at_k={4: estimate},
    )
    write_result(result, path)
    assert read_result(path) == result
    stored = json.loads(path.read_text())
    assert stored["split"] == "held_out"
    assert stored["sampling"] == {"temperature": 1.0, "top_p": 1.0, "top_k": None}
    assert stored["protocol_digest"] == result.protocol_digest
    assert stored["pass_at_k"]["4"]["value"] == 0.75


def test_the_file_name_says_task_and_step() -> None:
    assert result_name(make_result()) == "arithmetic-step-000020.json"
    gym = make_result(task="reasoning-gym", variant="chain_sum")
    assert (result_name(gym), gym.full_name) == (
        "reasoning-gym-chain_sum-step-000020.json",
        "reasoning-gym/chain_sum",
    )
    assert result_name(make_result(task="a/b c", split=Split.TRAIN)) == "a-b-c-train-step-000020.json"


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "null", '{"task": 3}', "NaN"),
        *({"num_examples": 3}, {"max_reply_tokens": 64}, {"surprise": 1}, {"step": "20"}, {"split": "test"}),
    ],
)
def test_a_file_of_another_form_and_an_edited_one_are_refused(tmp_path: Path, text: Any) -> None:
    path = tmp_path / "r.json"
    with pytest.raises(StoreError, match=r"r\.json"):
        read_result(path)
    write_result(make_result(), path)
    written = path.read_text()
    assert dump_result(read_result(path)) == json.loads(written)
    if isinstance(text, dict):
        text = json.dumps(json.loads(written) | text)
    elif text == "NaN":
        text = written.replace('"reply_tokens_mean": 9.5', '"reply_tokens_mean": NaN')
    path.write_text(text)
    with pytest.raises(CorruptRecord):
        read_result(path)


@pytest.mark.parametrize(
    ("place", "value", "named"),
    [
        *((f"{kind}.accuracy", 0.95, "changed") for kind in ("greedy", "parts.sums.greedy")),
        ("greedy.by_example.a.reward_mean", 0.123, "changed"),
        ("content_digest", "0" * 64, "changed"),
    ],
)
def test_an_edited_result_is_refused(tmp_path: Path, place: str, value: object, named: str) -> None:
    """Incident: an edited file was shown as "0.0 % 95.0 % +0.0 %": the change alone knew the examples."""
    path = tmp_path / "r.json"
    summary = Summary(**make_score({"a": 1.0}).model_dump(exclude={"by_example"}))
    part = PartScores(task="arithmetic", example_ids=["a"], greedy=summary, sampled=None, pass_at_k={})
    sampled = make_score({"a": 0.5, "b": 0.25})
    write_result(make_result(sampled=sampled, num_samples=4, parts={"sums": part}), path)
    stored = json.loads(path.read_text())
    # Other white space is no edit.
    path.write_text(json.dumps(stored))
    assert read_result(path).parts["sums"].greedy.accuracy == 1.0
    *folders, last = place.split(".")
    reduce(getitem, folders, stored)[last] = value
    path.write_text(json.dumps(stored))
    with pytest.raises(CorruptRecord, match=named):
        read_result(path)


def test_every_protocol_field_changes_the_digest() -> None:
    others: dict[str, Any] = {
        "task": "x",
        "task_version": "x",
        "replies_version": "x",
        "split": Split.TRAIN,
        "examples_digest": "x",
        "tokenizer_digest": "x",
        "prompt_format": "base",
        "max_reply_tokens": 16,
        "sampling": Sampling(top_k=50),
        "num_samples": 2,
    }
    digests = {make_result(**{name: value}).protocol_digest for name, value in others.items()}
    three = make_result({"a": 1.0, "b": 0.0, "c": 1.0}, examples_digest=make_result().examples_digest)
    digests |= {three.protocol_digest, make_result().protocol_digest}
    assert len(digests) == len(PROTOCOL_FIELDS) + 1
    assert make_result(step=1, model_digest="x", run_seed=9).protocol_digest == make_result().protocol_digest


def test_many_cut_replies_make_a_result_suspect() -> None:
    for truncated_frac, is_suspect in ((0.02, False), (0.021, True)):
        score = make_score({"a": 1.0, "b": 0.0}, truncated_frac=truncated_frac)
        assert make_result(greedy=score).truncation_suspect is is_suspect
        assert make_result(sampled=score, num_samples=1).truncation_suspect is is_suspect
        assert make_result(greedy=score).is_valid


def test_an_unscored_result_is_refused_by_its_cause() -> None:
    result = make_result({"a": 1.0, "b": None}, validity=Validity.UNSCORED)
    with pytest.raises(CheckRefused, match=r"unscored: .* 1 of 2"):
        refuse_invalid(result)
