"""Tests of the published baselines: complete, consistent in themselves, and found with their conditions."""

from __future__ import annotations

import math

import pytest

from strop.evaluate.baselines import BaselineStatus, all_baselines, find_baselines, find_reference

MODEL = "Qwen/Qwen3-1.7B-Base"
REFERENCES = [
    ("gsm8k_cot", 4, "flexible-extract", 73.09, 1024),
    ("gsm8k_cot", 4, "strict-match", 54.13, 1024),
    ("minerva_math", 4, "exact_match", 30.58, 2048),
    ("minerva_math", 4, "math_verify", 41.58, 2048),
    ("hendrycks_math", 4, "exact_match", 17.94, 2048),
    ("ifeval", 0, "prompt_level_strict", 21.26, 4096),
    ("ifeval", 0, "inst_level_strict", 32.85, 4096),
]


@pytest.mark.parametrize(("harness_task", "shots", "metric", "value", "budget"), REFERENCES)
def test_references_are_found_with_their_conditions(
    harness_task: str, shots: int, metric: str, value: float, budget: int
) -> None:
    found = find_reference(MODEL, harness_task, shots, metric)
    assert found is not None
    assert (found.value_pct, found.max_reply_tokens, found.tensor_parallel) == (value, budget, 1)
    assert (found.harness_version, found.engine, found.dtype) == ("0.4.9.2", "vLLM 0.11.2", "bfloat16")
    assert (found.temperature, found.seed, found.split) == (0.0, 42, "test")


def test_nothing_but_references_is_quoted() -> None:
    assert find_reference(MODEL, "gsm8k", 4, "flexible-extract") is None
    assert find_reference(MODEL, "gsm8k_cot", 0, "flexible-extract") is None
    assert find_reference("another/model", "gsm8k_cot", 4, "flexible-extract") is None


def test_a_task_of_strop_has_all_its_rows() -> None:
    values = {row.value_pct for row in find_baselines(MODEL, "gsm8k")}
    # At least five published 'base' values between 14 and 75.
    assert {14.33, 14.71, 62.77, 68.61, 73.09, 74.95} <= values
    cut = find_baselines(MODEL, "gsm8k_cot", num_fewshot=4, metric="flexible-extract")
    assert [(row.value_pct, row.status.value) for row in cut] == [(73.09, "reference"), (69.83, "superseded")]
    assert cut[0].protocol != cut[1].protocol
    assert cut[0].supersedes == cut[1].published


def test_standard_errors_are_binomial() -> None:
    for row in all_baselines():
        if row.stderr_pct is not None:
            assert row.value_pct is not None
            assert row.num_examples is not None
            share = row.value_pct / 100
            # sqrt(p (1 - p) / n), rounded to two digits.
            wanted = 100 * math.sqrt(share * (1 - share) / row.num_examples)
            assert row.stderr_pct == pytest.approx(wanted, abs=0.006)


@pytest.mark.parametrize("metric", ["exact_match", "math_verify"])
def test_the_subjects_of_minerva_math_give_its_score(metric: str) -> None:
    subjects = [
        row
        for row in all_baselines()
        if (row.harness_task or "").startswith("minerva_math_") and row.metric == metric
    ]
    total = sum(row.num_examples or 0 for row in subjects)
    mean = sum((row.value_pct or 0) * (row.num_examples or 0) for row in subjects) / total
    reference = find_reference(MODEL, "minerva_math", 4, metric)
    assert (len(subjects), total) == (7, 5000)
    assert reference is not None
    assert mean == pytest.approx(reference.value_pct, abs=0.01)


def test_no_reference_was_measured_over_several_gpus() -> None:
    references = [row for row in all_baselines() if row.status is BaselineStatus.REFERENCE]
    assert len(references) == len(REFERENCES) + 14  # seven subjects, two metrics
    assert {row.tensor_parallel for row in references} == {1}
    assert all(row.note for row in all_baselines() if row.status is not BaselineStatus.REFERENCE)
    protocols = [(row.model, row.protocol) for row in references]
    assert len(set(protocols)) == len(protocols)
