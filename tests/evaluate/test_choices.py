"""Evaluations of a task whose replies are chosen: one attempt each, from the engine to the stored result."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from strop.errors import ConfigError
from strop.evaluate import EvalResult, EvalSettings, read_result, write_result
from strop.evaluate.accuracy import evaluate_task
from strop.rollout import Split
from strop.tasks import Task, build_task
from strop.tasks.mmlu import MmluChoiceSpec
from strop.tokenizer import Tokenizer
from tests.fixtures.dummy_engine import DummyEngine
from tests.fixtures.tiny_tokenizer import tiny_tokenizer


@pytest.fixture
def task(tmp_path: Path) -> Task:
    rows = [
        {"question": f"Which is {n}?", "subject": "law", "choices": ["w", "x", "y", "z"], "answer": n % 4}
        for n in range(8)
    ]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return build_task(MmluChoiceSpec(name="mmlu-choice", source=str(tmp_path)))


def evaluate(task: Task, folder: Path, **changes: Any) -> EvalResult:
    tokenizer = Tokenizer.load(tiny_tokenizer(folder / "tokenizer"))
    # Always finds 'B' the likeliest.
    engine = DummyEngine(
        tokenizer, [], likelihood=lambda prompt, reply: -1.0 if reply.strip() == "B" else -3.0
    )
    engine.policy_version = 4
    settings = EvalSettings(run_seed=0, step=0, split=Split.HELD_OUT, **changes)
    return asyncio.run(
        evaluate_task(task=task, engine=engine, tokenizer=tokenizer, settings=settings, model_digest="m")
    )


def test_a_result_is_like_that_of_any_task(task: Task, tmp_path: Path) -> None:
    result = evaluate(task, tmp_path)
    # Two of eight answers are 'B'.
    assert (result.greedy.accuracy, result.greedy.num_rollouts, result.policy_version) == (0.25, 8, 4)
    assert (result.greedy.truncated_frac, result.greedy.format_ok_frac, result.greedy.num_unscored) == (
        0,
        1,
        0,
    )
    assert (result.is_valid, result.sampled, result.truncation_suspect) == (True, None, False)
    write_result(result, tmp_path / "result.json")
    assert read_result(tmp_path / "result.json") == result


@pytest.mark.parametrize("changes", [{"num_samples": 4}, {"num_samples": 8, "pass_at": (1, 8)}])
def test_samples_and_pass_at_k_are_refused(task: Task, tmp_path: Path, changes: dict[str, Any]) -> None:
    message = (
        r"sampled rollouts per example of task mmlu-choice, whose .* all would be equal\. Allowed: .* Next: "
    )
    with pytest.raises(ConfigError, match=message):
        evaluate(task, tmp_path, **changes)
