"""Agreement with lm-eval 0.4.13 on 701 replies that it judged.

strop's verdicts differ where strop means to, and each difference has its reason here: one without a reason
fails, and so does a reason without a difference.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from strop.rollout import Example, Outcome
from strop.tasks import Task, build_task
from strop.tasks.rows.judged_rows import PresetSpec
from tests.fixtures.judging import verdict

Record = Mapping[str, Any]
RECORDED = json.loads(
    (Path(__file__).parents[2] / "fixtures" / "math_parity.json").read_text(encoding="utf-8")
)
needs_math_verify = pytest.mark.skipif(not find_spec("math_verify"), reason="needs the extra 'tasks'")


def records(task: str) -> list[Record]:
    return [record for record in RECORDED["records"] if record["task"] == task]


def example_of(task: Task, record: Record) -> Example:
    fields = {"solution": record["solution"], "problem": "", "question": ""}
    return Example(task=task.name, example_id="0", fields=fields, answer=record["gold"])


def judge(task: Task, record: Record) -> Outcome:
    return verdict(task, example_of(task, record), record["reply"])


def explain(
    found: list[tuple[Record, bool]], reasons: Mapping[str, Callable[[Record, bool], bool]]
) -> Counter[str]:
    """Count differences by the first reason that holds."""
    return Counter(
        next((name for name, holds in reasons.items() if holds(record, ours)), f"no reason: {record}")
        for record, ours in found
    )


def test_gsm8k_differs_from_flexible_extract_where_it_means_to() -> None:
    task = build_task(PresetSpec(name="gsm8k", source="unused.jsonl"))
    verdicts = [(record, judge(task, record).is_correct is True) for record in records("gsm8k")]
    found = [(record, ours) for record, ours in verdicts if ours != record["verdicts"]["flex"]]
    reasons: dict[str, Callable[[Record, bool], bool]] = {
        # lm-eval's last number is one of the next question.
        "cut before a follow-up problem": lambda r, ours: any(
            mark in r["reply"] for mark in ("Q:", "Question:")
        ),
        # '...' is a number to flexible-extract.
        "an ellipsis is no number": lambda r, ours: ours and r["reply"].endswith("... done"),
        # '20-5' is a calculation without its result, for both; '-5' of '20--5' is a number to theirs.
        "a minus may be an operator": lambda r, ours: r["reply"].startswith("It is 20-"),
        # '18.00' is 18, '2.50' is 2.5: numbers are compared, not texts.
        "decimals are numbers": lambda r, ours: ours and r["reply"].endswith(".00"),
    }
    assert explain(found, reasons) == {
        "cut before a follow-up problem": 20,
        "an ellipsis is no number": 10,
        "a minus may be an operator": 2,
        "decimals are numbers": 10,
    }


MINERVA_REASONS: dict[str, Callable[[Record, bool], bool]] = {
    # The recorded text runs on into a problem of the model's making; generation stops before it.
    "cut before a follow-up problem": lambda r, ours: ours and "Problem:" in r["reply"],
    # '50\%' does not parse in the harness (grammar of ANTLR 4.11); strop drops the sign.
    "percent is dropped": lambda r, ours: ours and r["gold"] == r"50\%",
    # The harness reads '12_7' as 12, so every base is right.
    "a base is part of a number": lambda r, ours: not ours and r["gold"] == "12_5",
    # The harness finds no LaTeX outside of delimiters, or a part of it only.
    "a bare formula is an answer": lambda r, ours: ours and r["reply"].startswith("Therefore it is"),
}


@needs_math_verify
def test_math_differs_from_the_metric_math_verify_where_it_means_to() -> None:
    task = build_task(PresetSpec(name="math", source="unused.jsonl"))
    verdicts = [(record, judge(task, record).is_correct is True) for record in records("minerva_math")]
    found = [(record, ours) for record, ours in verdicts if ours != record["verdicts"]["math_verify"]]
    assert explain(found, MINERVA_REASONS) == {
        "cut before a follow-up problem": 39,
        "percent is dropped": 6,
        "a base is part of a number": 5,
        "a bare formula is an answer": 16,
    }


@needs_math_verify
def test_math_differs_from_the_metric_exact_match_where_it_means_to() -> None:
    task = build_task(PresetSpec(name="math", source="unused.jsonl"))
    # The metric knows one phrase, and takes anything else for no answer.
    phrased = [record for record in records("minerva_math") if record["reply"].startswith("Final Answer:")]
    verdicts = [(record, judge(task, record).is_correct is True) for record in phrased]
    found = [(record, ours) for record, ours in verdicts if ours != record["verdicts"]["exact_match"]]
    reasons: dict[str, Callable[[Record, bool], bool]] = {
        # Their LaTeX parser stops at a comma, so '1,3' is '1,2', and '2,1' is neither.
        "a list is compared whole": lambda r, ours: r["gold"] == "1,2",
        # To it '3\frac{1}{2}' is 3 times a half: '\frac{3}{2}' is right and '\frac{7}{2}' wrong.
        "a mixed number is a sum": lambda r, ours: r["gold"] == r"3\frac{1}{2}",
        # It does not drop '\%'.
        "percent is dropped": lambda r, ours: ours and r["gold"] == r"50\%",
        # It takes spaces out of '\\ ' and compares what is left as text.
        "a matrix is compared by its entries": lambda r, ours: ours and "pmatrix" in r["gold"],
        "a base is part of a number": lambda r, ours: not ours and r["gold"] == "12_5",
    }
    assert explain(found, reasons) == {
        "a list is compared whole": 2,
        "a mixed number is a sum": 2,
        "percent is dropped": 1,
        "a matrix is compared by its entries": 1,
        "a base is part of a number": 1,
    }
    # Replies in any other form are no answers to that metric.
    others = [record for record in records("minerva_math") if not record["reply"].startswith("Final Answer:")]
    assert not any(record["verdicts"]["exact_match"] for record in others)


def test_aime_differs_from_the_harness_in_leading_zeros_and_in_prose() -> None:
    task = build_task(PresetSpec(name="aime"))
    verdicts = [(record, judge(task, record).is_correct is True) for record in records("aime")]
    found = [(record, ours) for record, ours in verdicts if ours != record["verdicts"]["exact_match"]]
    reasons: dict[str, Callable[[Record, bool], bool]] = {
        "025 is 25": lambda r, ours: ours and "025" in r["reply"],
        # The harness compares the whole reply where nothing is marked.
        "the last number of a sentence": lambda r, ours: ours and r["reply"] == "So it is 25.",
    }
    assert explain(found, reasons) == {"025 is 25": 5, "the last number of a sentence": 1}
