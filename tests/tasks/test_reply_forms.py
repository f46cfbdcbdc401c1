"""Real forms of replies, each with the value that a careful reader takes: `forms/*.jsonl`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from strop.rollout import Example
from strop.tasks import build_task
from strop.tasks.generated import answer_of
from strop.tasks.graders import GRADERS, find_letter
from strop.tasks.rows.judged_rows import PresetSpec
from tests.fixtures.judging import verdict

Form = Mapping[str, Any]
TASKS = {
    "gsm8k": build_task(PresetSpec(name="gsm8k", source="unused.jsonl")),
    "math": build_task(PresetSpec(name="math", source="unused.jsonl")),
    "aime": build_task(PresetSpec(name="aime", source="unused.jsonl")),
    "mmlu": build_task(PresetSpec(name="mmlu", source="unused.jsonl")),
}


def forms(reader: str) -> list[Any]:
    lines = (Path(__file__).parent / "forms" / f"{reader}.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) >= 50
    return [
        pytest.param(form, id=f"{number} {form['why']}")
        for number, form in enumerate(map(json.loads, lines), 1)
    ]


def is_right(task: str, gold: str, form: Form) -> bool | None:
    fields = {"question": form.get("question", "?"), "problem": "?", "solution": ""} | form.get("fields", {})
    example = Example(task=task, example_id="0", fields=fields, answer=gold)
    outcome = verdict(TASKS[task], example, form["input"])
    assert form.get("format") in (None, outcome.format_ok)
    return outcome.is_correct


@pytest.mark.parametrize("form", forms("gsm8k"))
def test_gsm8k(form: Form) -> None:
    right = form["right"]
    golds = {right or "18", "18", "17", "19", "7", "3", "1", "9"}
    assert {gold for gold in golds if is_right("gsm8k", gold, form)} == ({right} if right else set())


@pytest.mark.parametrize("form", forms("boxed"))
def test_boxed_mathematics(form: Form) -> None:
    pytest.importorskip("math_verify", reason="the extra 'tasks' is not installed")
    assert is_right(form["task"], form["gold"], form) is form["right"]


@pytest.mark.parametrize("form", forms("mmlu"))
def test_mmlu(form: Form) -> None:
    assert [gold for gold in "ABCD" if is_right("mmlu", gold, form)] == list(form["right"] or "")


def test_no_letter_is_read_more_readily_than_another() -> None:
    """Incident: A was taken for an article where B was a choice, which training amplified."""
    letter = re.compile(r"(?<![A-Za-z0-9_])[A-D](?![A-Za-z0-9_])")
    texts = [form.values[0]["input"].strip() for form in forms("mmlu")]
    for text in (text for text in texts if len(set(letter.findall(text))) == 1):
        found = [find_letter(letter.sub(other, text), []) for other in "ABCD"]
        assert found in (list("ABCD"), [None] * 4), text


@pytest.mark.parametrize("form", forms("reasoning_gym"))
def test_reasoning_gym(form: Form) -> None:
    assert answer_of(form["input"])[0] == (form["right"] or "")


@pytest.mark.parametrize("form", forms("rows"))
def test_rewards_of_rows(form: Form) -> None:
    reward, gold = form["reward"], form["gold"]
    example = Example(task="rows", example_id="0", fields={"answer": gold}, answer=gold)
    assert GRADERS[reward][2](example, form["input"], "").is_correct == form["right"]
