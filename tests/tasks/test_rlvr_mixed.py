"""Rows of three kinds in one data set, each judged as its kind is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from strop.errors import DataError
from strop.rollout import Example, Split
from strop.tasks import Task, build_task, describe_counts, limits_of
from strop.tasks.rlvr_mixed import RlvrMixedSpec
from tests.fixtures.judging import run_self_test
from tests.fixtures.row_files import write_rows

SHOT = "Question: 1 and 1?\nAnswer: It is 2. So the answer is 2.\n\n"


def row(dataset: str, number: int, ground_truth: str) -> dict[str, Any]:
    prompt = f"{SHOT}Question: {number} and {number}?\nAnswer:" if dataset != "ifeval" else f"Write {number}."
    return {
        "messages": [{"role": "user", "content": prompt}],
        "ground_truth": ground_truth,
        "dataset": dataset,
        "constraint": None,
    }


def instruction(number: int) -> dict[str, Any]:
    return row("ifeval", number, json.dumps({"func_name": "validate_no_commas", "N": None}))


def mixed(tmp_path: Path, rows: list[dict[str, Any]]) -> Task:
    path = write_rows(tmp_path / "rows.jsonl", rows)
    return build_task(
        RlvrMixedSpec(name="rlvr-mixed", source=str(path), strictness="standard", num_held_out=2)
    )


ROWS = [
    *(row("gsm8k", n, str(2 * n)) for n in range(5, 9)),
    *(row("MATH", n, f"\\frac{{{n}}}{{7}}") for n in range(15, 19)),
    *(instruction(n) for n in range(4)),
]


def all_of(task: Task) -> dict[str, list[Example]]:
    by_kind: dict[str, list[Example]] = {}
    for split in Split:
        for example in task.examples(split):
            by_kind.setdefault(example.fields["kind"], []).append(example)
    return by_kind


def test_each_row_is_judged_as_its_kind(tmp_path: Path) -> None:
    task = mixed(tmp_path, ROWS)
    by_kind = all_of(task)
    assert {kind: len(examples) for kind, examples in by_kind.items()} == {"gsm8k": 4, "math": 4, "ifeval": 4}
    assert sorted(describe_counts(task).split(", ")) == ["gsm8k: 4", "ifeval: 4", "math: 4"]
    grade, competition, told = (by_kind[kind][0] for kind in ("gsm8k", "math", "ifeval"))
    assert task.verify(grade, f"The answer is {grade.answer}.").is_correct
    assert not task.verify(grade, "The answer is 9.").is_correct  # gold answers are even
    assert task.verify(competition, f"\\boxed{{{competition.answer}}}").is_correct
    assert not task.verify(competition, "\\boxed{7}").is_correct
    assert task.verify(told, "We write this without any of them.").is_correct
    assert not task.verify(told, "We write, and write.").is_correct
    # Apart, because an answer to a problem may well be a text without commas.
    assert [run_self_test(task, examples) for examples in by_kind.values()] == [[], [], []]


def test_the_baked_in_answers_are_reworded_and_stops_are_the_kinds(tmp_path: Path) -> None:
    task = mixed(tmp_path, ROWS)
    by_kind = all_of(task)
    (message,) = task.render(by_kind["gsm8k"][0])
    assert "It is 2. The answer is 2.\n\nQuestion:" in message.text
    stops = {kind: limits_of(task, examples[0]).stops(is_base=True) for kind, examples in by_kind.items()}
    assert stops["ifeval"] == ()
    assert "Question:" in stops["gsm8k"]
    assert stops["math"] == ("Problem:", "\n\n\n")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (row("code", 1, "2"), r"row 3 is of dataset 'code'\. Allowed: gsm8k, math, ifeval"),
        (row("gsm8k", 1, "two"), r"the ground_truth in .* row 3 is 'two'\. Allowed: a number"),
    ],
)
def test_rows_of_another_kind_are_refused(tmp_path: Path, bad: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        mixed(tmp_path, [*ROWS[:2], bad]).examples(Split.TRAIN)


def test_a_question_that_is_held_out_too_is_left_out_and_counted(tmp_path: Path) -> None:
    # Rows are split by all of their content, so the two rows of one question may part.
    rows = [{**row("gsm8k", n, str(2 * n)), "constraint": other} for n in range(20) for other in ("a", "b")]
    task = mixed(tmp_path, rows)
    asked = {split: {e.fields["prompt"] for e in task.examples(split)} for split in Split}
    assert asked[Split.TRAIN] & asked[Split.HELD_OUT] == set()
    # Two rows are held out, and both parted from the other one of their question.
    assert describe_counts(task) == "gsm8k: 20, rows left out, held out too: 2"
