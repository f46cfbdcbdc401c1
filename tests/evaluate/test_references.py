"""A score beside the published one: a difference for the same protocol, else the fields that differ."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from strop.evaluate.baselines import compare_own_result, compare_with_references, find_model_name
from strop.evaluate.harness import HarnessMetric, HarnessPart, HarnessResult
from strop.rollout import Split
from tests.evaluate.stored_results import make_result as make_own_result

MODEL = "Qwen/Qwen3-1.7B-Base"


def make_result(**changes: Any) -> HarnessResult:
    fields: dict[str, Any] = {
        "harness": "lm-eval-0.4.13",
        "task": "gsm8k_cot",
        "task_version": "3.0",
        "split": Split.HELD_OUT,
        "step": 0,
        "model_digest": "m",
        "dtype": "float32",
        "num_examples": 1319,
        "data_digest": "d",
        "num_fewshot": 4,
        "max_reply_tokens": 1024,
        "stops": ("Q:",),
        "seed": 42,
        "metrics": {
            "exact_match,flexible-extract": HarnessMetric(value=0.75, stderr=0.01),
            "exact_match,strict-match": HarnessMetric(value=0.5, stderr=0.01),
        },
        "parts": {},
        "truncated_frac": 0.0,
    }
    return HarnessResult(**(fields | changes))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (MODEL, MODEL),
        (f"{MODEL}@main", MODEL),
        (f"/models/{MODEL}/", MODEL),
        ("s3://bucket/Qwen/Qwen3-1.7B-Base", MODEL),
        ("Qwen/Qwen3-1.7B", None),
        ("Qwen3-1.7B-Base", None),
        ("runs/x", None),
    ],
)
def test_a_model_is_known_by_its_name(text: str, name: str | None) -> None:
    assert find_model_name(text) == name


def test_equal_protocols_give_a_difference() -> None:
    flexible, strict = compare_with_references(MODEL, make_result())
    # 75.00 - 73.09 and 50.00 - 54.13.
    assert flexible.delta_points == pytest.approx(1.91)
    assert strict.delta_points == pytest.approx(-4.13)
    assert flexible.describe() == (
        "gsm8k_cot flexible-extract: 75.00 %, +1.91 points to the published 73.09 % ± 1.22"
        " (2026-01-22, lm-eval 0.4.9.2, vLLM 0.11.2, bfloat16)"
    )


@pytest.mark.parametrize(
    ("changes", "differing"),
    [
        ({"num_fewshot": 8}, "num_fewshot is 8 here and 4 there"),
        ({"max_reply_tokens": 256}, "max_reply_tokens is 256 here and 1024 there"),
        ({"num_examples": 4}, "num_examples is 4 here and 1319 there"),
        ({"task_version": "4.0"}, "harness_task_version is 4.0 here and 3.0 there"),
        ({"split": Split.TRAIN}, "split is train here and test there"),
        ({"seed": 1}, "seed is 1 here and 42 there"),
    ],
)
def test_another_protocol_gives_the_fields_instead(changes: dict[str, Any], differing: str) -> None:
    for comparison in compare_with_references(MODEL, make_result(**changes)):
        assert (comparison.delta_points, comparison.differing) == (None, (differing,))
        assert (
            f"not compared with the published {comparison.baseline.value_pct:.2f} %" in comparison.describe()
        )
        assert comparison.describe().endswith(differing)


def test_instructions_are_compared_by_the_prompts_that_were_asked() -> None:
    metrics = {
        f"{name},none": HarnessMetric(value=0.5, stderr=None)
        for name in ("prompt_level_strict_acc", "inst_level_strict_acc", "prompt_level_loose_acc")
    }
    result = make_result(
        task="ifeval",
        task_version="4.0",
        num_examples=541,
        num_fewshot=0,
        max_reply_tokens=4096,
        metrics=metrics,
    )
    # 50 - 21.26 and 50 - 32.85; nothing is published for the loose ones.
    found = [comparison.delta_points for comparison in compare_with_references(MODEL, result)]
    assert found == [pytest.approx(28.74), pytest.approx(17.15)]


def test_a_task_of_a_group_is_compared_by_itself() -> None:
    metric = {"math_verify,none": HarnessMetric(value=0.5, stderr=None)}
    result = make_result(
        task="minerva_math",
        task_version="3.1",
        num_examples=871,
        max_reply_tokens=2048,
        metrics=metric,
        parts={"minerva_math_prealgebra": HarnessPart(num_examples=871, metrics=metric)},
    )
    group, part = compare_with_references(MODEL, result)
    assert "num_examples is 871 here and 5000 there" in group.differing
    assert part.baseline.harness_task == "minerva_math_prealgebra"
    assert not any(field.startswith("num_examples") for field in part.differing)


def test_another_model_has_no_references() -> None:
    assert compare_with_references("another/model", make_result()) == []


def test_a_score_of_our_own_task_is_never_compared_and_none_is_no_score() -> None:
    scored = make_own_result({"a": 1.0, "b": 0.5}, task="gsm8k", max_reply_tokens=1024)
    found = compare_own_result(MODEL, scored)
    # 100 * (1 + 0.5) / 2.
    assert {comparison.value_pct for comparison in found} == {75.0}
    assert {comparison.delta_points for comparison in found} == {None}
    assert "strop's own prompt and verifier" in found[0].differing[0]
    unscored = make_own_result({"a": None, "b": None}, task="gsm8k")
    assert compare_own_result(MODEL, unscored) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"value_pct": None, "stderr_pct": None}, "the published range: "),
        ({"stderr_pct": None}, "the published 73.09 %: "),
    ],
)
def test_what_was_not_published_is_not_made_up(changes: dict[str, Any], said: str) -> None:
    comparison = compare_with_references(MODEL, make_result(seed=1))[0]
    baseline = comparison.baseline.model_copy(update=changes)
    assert said in replace(comparison, baseline=baseline).describe()
