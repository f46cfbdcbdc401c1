"""Stored scores: complete or unreadable, compared only under one protocol."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from strop.errors import CheckRefused, CorruptRecord, StoreError
from strop.evaluate.result import (
    PROTOCOL_FIELDS,
    EvalResult,
    Score,
    Validity,
    compare_results,
    digest_examples,
    read_result,
    refuse_invalid,
    result_name,
    write_result,
)
from strop.rollout import Sampling, Split


def make_score(shares: dict[str, float | None], **changes: Any) -> Score:
    known = [share for share in shares.values() if share is not None]
    fields: dict[str, Any] = {
        "accuracy": sum(known) / len(known) if known else None,
        "low": 0.0,
        "high": 1.0,
        "num_samples": 1,
        "num_rollouts": len(shares),
        "num_unscored": len(shares) - len(known),
        "truncated_frac": 0.25,
        "cut_unsolved_frac": 0.0,
        "format_ok_frac": None,
        "reply_tokens_mean": 9.5,
        "reward_mean": 0.5,
        "solved_frac_by_example": shares,
    }
    return Score(**(fields | changes))


def make_result(shares: dict[str, float | None] | None = None, **changes: Any) -> EvalResult:
    score = make_score({"a": 1.0, "b": 0.0} if shares is None else shares)
    fields: dict[str, Any] = {
        "task": "arithmetic",
        "task_version": "v1",
        "split": Split.HELD_OUT,
        "step": 20,
        "model_digest": "m1",
        "policy_version": 20,
        "tokenizer_digest": "t1",
        "prompt_format": "chat",
        "num_examples": len(score.solved_frac_by_example),
        "examples_digest": digest_examples(list(score.solved_frac_by_example)),
        "run_seed": 0,
        "max_reply_tokens": 32,
        "sampling": Sampling(),
        "num_samples": None,
        "greedy": score,
        "sampled": None,
        "validity": Validity.VALID,
    }
    return EvalResult(**(fields | changes))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a folder with ; and 'quotes'" / "r.json"
    path.parent.mkdir()
    result = make_result(sampled=make_score({"a": 0.5, "b": None}, num_samples=4), num_samples=4)
    write_result(result, path)
    assert read_result(path) == result
    stored = json.loads(path.read_text())
    assert stored["split"] == "held_out"
    assert stored["sampling"] == {"temperature": 1.0, "top_p": 1.0, "top_k": None}
    assert stored["protocol_digest"] == result.protocol_digest


def test_the_file_name_says_task_and_step() -> None:
    assert result_name(make_result()) == "arithmetic-step-000020.json"
    assert result_name(make_result(task="a/b c", split=Split.TRAIN)) == "a-b-c-train-step-000020.json"


def test_a_missing_result_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"r\.json cannot be read .* Allowed: .* Next: "):
        read_result(tmp_path / "r.json")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"task": 3}'])
def test_a_file_of_another_form_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(CorruptRecord, match=r"is not a complete result \(.*Allowed: .* Next: "):
        read_result(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_examples", 3), ("max_reply_tokens", 64), ("surprise", 1), ("step", "20"), ("split", "test")],
)
def test_an_edited_result_is_refused(tmp_path: Path, name: str, value: Any) -> None:
    path = tmp_path / "r.json"
    write_result(make_result(), path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    with pytest.raises(CorruptRecord, match="is not a complete result"):
        read_result(path)


def test_not_a_number_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    write_result(make_result(), path)
    path.write_text(path.read_text().replace('"reply_tokens_mean": 9.5', '"reply_tokens_mean": NaN'))
    with pytest.raises(CorruptRecord, match="reply_tokens_mean"):
        read_result(path)


def test_a_change_is_measured_on_the_same_examples() -> None:
    before = make_result({"a": 0.0, "b": 1.0, "c": None, "d": 0.0})
    after = make_result({"a": 1.0, "b": 1.0, "c": 1.0, "d": 0.0}, model_digest="m2", step=40)
    change = compare_results(before, after)
    assert change.greedy is not None
    # a, b and d were scored on both sides: +1, 0, 0
    assert change.greedy.estimate == pytest.approx(1 / 3)
    assert change.sampled is None


def test_sampled_scores_are_compared_too() -> None:
    score = make_score({"a": 0.25, "b": 0.5})
    result = make_result(sampled=score, num_samples=4)
    change = compare_results(result, result)
    assert change.sampled is not None
    assert (change.sampled.low, change.sampled.estimate, change.sampled.high) == (0, 0, 0)


def test_nothing_scored_on_both_sides_is_no_change() -> None:
    unscored = make_result({"a": None, "b": 1.0})
    other = make_result({"a": 1.0, "b": None})
    assert compare_results(unscored, other).greedy is None


def test_every_protocol_field_changes_the_digest() -> None:
    others: dict[str, Any] = {
        "task": "x",
        "task_version": "x",
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


def test_a_valid_result_passes() -> None:
    refuse_invalid(make_result())


def test_an_unscored_result_is_refused_by_its_cause() -> None:
    result = make_result({"a": 1.0, "b": None}, validity=Validity.UNSCORED)
    with pytest.raises(CheckRefused, match=r"invalid: unscored: .* 1 of 2 rollouts unscored\. .* Next: mend"):
        refuse_invalid(result)
