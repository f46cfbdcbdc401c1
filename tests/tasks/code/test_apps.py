"""Tests of the apps task on rows in its schema, written for these tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from strop.errors import DataError
from strop.rollout import FailureOwner, Split
from strop.tasks.rows.judged_rows import JudgedRows, ProgramSpec
from strop.tasks.task import describe_counts
from tests.fixtures.judging import failed, run_self_test, verdict
from tests.fixtures.row_files import write_rows
from tests.fixtures.sandboxed import best_level


def row(question: str, solution: str, tests: dict[str, Any], **more: Any) -> dict[str, Any]:
    columns = {"question": question, "solutions": json.dumps([solution]), "input_output": json.dumps(tests)}
    return {"id": 0, **columns, "difficulty": "interview", "url": "", "starter_code": "", **more}


SUM = row(
    "Add two numbers of one line.",
    "print(sum(map(int, input().split())))\nexit()",
    {"inputs": ["1 2\n", "3 -3\n"], "outputs": ["3\n", "0\n"]},
)
SWAP = row(
    "Return two values in the other order.",
    "class Solution:\n    def swap(self, a, b):\n        return b, a",
    {"fn_name": "swap", "inputs": [[1, 2], ["a", None]], "outputs": [[2, 1], [[None, "a"]]]},
    starter_code="class Solution:\n    def swap(self, a, b):",
)
ONE_TEST = row("Say 1.", "print(1)", {"inputs": [""], "outputs": ["1"]})
NO_TEST = {**row("Say 2.", "print(2)", {}), "input_output": "", "solutions": ""}
EASY = row(
    "Say 3.", "def main():\n    print(3)\n    quit(0)\nmain()", {"inputs": ["", " "], "outputs": ["3", "3"]}
)


def apps(tmp_path: Path, rows: list[dict[str, Any]] | None = None, **settings: Any) -> JudgedRows:
    rows = [SUM, SWAP, ONE_TEST, NO_TEST, EASY] if rows is None else rows
    for stem, some in (
        ("train", rows),
        ("test", [row("Say 4.", "print(4)", {"inputs": ["", ""], "outputs": [4, 4]})]),
    ):
        write_rows(tmp_path / f"{stem}.jsonl", some)
    settings = {"min_isolation": best_level(), **settings}
    return JudgedRows(ProgramSpec(name="apps", source=str(tmp_path), **settings))


def test_items_without_two_tests_are_dropped_and_counted(tmp_path: Path) -> None:
    task = apps(tmp_path)
    assert [e.fields["question"][:3] for e in task.examples(Split.TRAIN)] == ["Add", "Ret", "Say"]
    assert task.counts == {"rows left out, fewer than 2 tests": 2}
    assert describe_counts(task) == "rows left out, fewer than 2 tests: 2"


def test_held_out_items_need_one_test(tmp_path: Path) -> None:
    task = apps(tmp_path, [SUM])
    (tmp_path / "test.jsonl").write_text(json.dumps(ONE_TEST) + "\n" + json.dumps(NO_TEST) + "\n", "utf-8")
    (example,) = task.examples(Split.HELD_OUT)
    assert example.fields["question"] == "Say 1."


@pytest.mark.skipif(best_level() != "namespace", reason="only a namespace shows a package")
def test_programs_may_import_numpy_and_nothing_else_of_this_installation(tmp_path: Path) -> None:
    task = apps(tmp_path)
    add = task.examples(Split.TRAIN)[0]
    code = "import {}\nprint(sum(map(int, open(0).read().split())))"
    assert verdict(task, add, f"```python\n{code.format('numpy')}\n```").is_correct
    assert not verdict(task, add, f"```python\n{code.format('pydantic')}\n```").is_correct


@pytest.mark.parametrize("statement", ["import numpy", "import numpy.linalg as n", "from numpy import sum"])
def test_a_program_whose_package_a_sandbox_cannot_show_has_no_score(tmp_path: Path, statement: str) -> None:
    task = apps(tmp_path, sandbox="process", min_isolation="rlimit")
    add, *_ = task.examples(Split.TRAIN)
    code = "{}\nprint(sum(map(int, open(0).read().split())))"
    outcome = verdict(task, add, f"```python\n{code.format(statement)}\n```")
    assert (outcome.reward, failed(outcome)) == (None, (FailureOwner.INFRA, "SandboxRefused"))
    # What it may not import anywhere is its own mistake.
    assert verdict(task, add, f"```python\n{code.format('import pydantic')}\n```").is_correct is False
    assert verdict(task, add, f"```python\n{code.format('import math')}\n```").is_correct


def test_items_with_too_large_tests_are_dropped_and_counted(tmp_path: Path) -> None:
    large = row("Say 5.", "print(5)", {"inputs": ["", "x" * (8 << 20)], "outputs": ["5", "5"]})
    task = apps(tmp_path, [SUM, large])
    assert (len(task.examples(Split.TRAIN)), dict(task.counts)) == (1, {"rows left out, tests too large": 1})


def test_a_table_has_its_time_and_any_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strop.tasks.code.extraction.WALL_S", 0.5)
    table = f'{{"fn_name": "f", "inputs": {[[0]] * 9}, "outputs": [{", ".join(["1" + "0" * 5000] * 9)}]}}'
    task = apps(tmp_path, [{**row("Wait.", "", {}), "input_output": table, "solutions": "[]"}])
    (example,) = task.examples(Split.TRAIN)
    right = "```python\nimport time\ndef f(x):\n    time.sleep(0.3)\n    return 10**5000\n```"
    assert verdict(task, example, right).is_correct
    assert task.gold_replies(example) == ()


def test_the_self_test_finds_nothing(tmp_path: Path) -> None:
    task = apps(tmp_path)
    assert run_self_test(task, task.examples(Split.TRAIN)) == []


@pytest.mark.parametrize(
    "broken",
    [
        {**SUM, "input_output": "{"},
        {**SUM, "input_output": "[]"},
        {**SUM, "input_output": json.dumps({"inputs": ["1"], "outputs": []})},
        {**SWAP, "input_output": json.dumps({"fn_name": "swap", "inputs": [1, 2], "outputs": [1, 2]})},
        {**SUM, "solutions": "[1]"},
        {**SUM, "solutions": '{"a": 1}'},
        {**SUM, "solutions": '"print(1)"'},
        {
            **SUM,
            "input_output": json.dumps({"fn_name": "not a name", "inputs": [[1]] * 2, "outputs": [1] * 2}),
        },
        {**SUM, "starter_code": 5},
    ],
)
def test_malformed_tests_and_solutions_are_refused(tmp_path: Path, broken: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="row 2"):
        apps(tmp_path, [SWAP | {"question": "Other."}, broken]).examples(Split.TRAIN)
