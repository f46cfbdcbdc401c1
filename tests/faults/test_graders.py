"""A grader of mathematics takes another value for the answer, or refuses another spelling of it."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from strop.rollout import Example
from strop.tasks import Task, build_task
from strop.tasks.rows.judged_rows import PresetSpec
from tests.fixtures.judging import verdict

# Each a task, a gold answer, a form in which models end their replies, and whether it says the gold answer.
LINES = Path(__file__).with_name("graders.jsonl").read_text("utf-8").splitlines()
VERDICTS = [json.loads(line) for line in LINES]


def judged(task: Task, gold: str, reply: str) -> bool | None:
    example = Example(task=task.name, example_id="0", fields={"solution": f"#### {gold}"}, answer=gold)
    return verdict(task, example, reply).is_correct


def test_a_calculation_is_no_number_and_its_result_is() -> None:
    task = build_task(PresetSpec(name="gsm8k", source="unused.jsonl"))
    verdicts = [(gold, reply, is_right) for name, gold, reply, is_right in VERDICTS if name == "gsm8k"]
    assert [(gold, reply, judged(task, gold, reply)) for gold, reply, _ in verdicts] == verdicts


def test_formulas_are_equal_by_their_value_and_not_by_their_spelling() -> None:
    pytest.importorskip("math_verify", reason="the extra 'tasks' is not installed")
    task = build_task(PresetSpec(name="math", source="unused.jsonl"))
    judged(task, "x+1", r"\boxed{1+x}")
    started_at = time.process_time()
    wrong = [
        (gold, reply)
        for name, gold, reply, is_right in VERDICTS
        if name == "math" and judged(task, gold, f"It is $\\boxed{{{reply}}}$.") is not is_right
    ]
    assert wrong == []
    # One of them took eleven seconds.
    assert time.process_time() - started_at < 10
