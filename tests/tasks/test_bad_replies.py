"""Replies that mean harm or nothing: what each task makes of them, as docs/tasks.md says."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from strop.rollout import Split
from strop.tasks import Task, build_task
from tests.fixtures.every_task import section_of
from tests.fixtures.judging import verdict
from tests.fixtures.row_files import write_rows
from tests.tasks.instructions.instruction_cases import MULTI_ARGUMENTS
from tests.tasks.instructions.test_tasks import TWO_PARTS, multi_row

MEGABYTE = 1_000_000


CHANGES: dict[str, dict[str, Any]] = {
    "arithmetic": {},
    "gsm8k": {},
    "math": {"reward": ("math",)},
    "mbpp": {},
    "if-multi": {},
    "reasoning-gym": {"dataset": "chain_sum"},
}


def task_of(name: str, folder: Path) -> Task:
    for package in {"math": ["math_verify"], "reasoning-gym": ["reasoning_gym"]}.get(name, []):
        pytest.importorskip(package)
    section = section_of(name, folder).model_copy(update=CHANGES[name])
    if name == "if-multi":
        two_parts = {id_: MULTI_ARGUMENTS[id_] or None for id_ in TWO_PARTS}
        write_rows(folder / "train.jsonl", [multi_row(two_parts, number) for number in range(2)])
    return build_task(section)


PIECES = [
    *("x", "1, ", "( ", "\\boxed{", "#### ", "<answer>", "```python\n", "* a\n", "\u00e9\u4e2d", "\n", "{"),
    *("9", "1,234", "-", ".", "$", "1.", "H2O", "\\boxed", "\\(", "answer", "answer is the ", "<think>", " "),
]


@pytest.mark.parametrize("name", CHANGES)
def test_a_completion_of_a_megabyte_is_a_wrong_answer_in_bounded_time(name: str, tmp_path: Path) -> None:
    """Every task judges it within 10 s of processor time for all pieces, and pays next to nothing."""
    task = task_of(name, tmp_path)
    example = task.examples(Split.HELD_OUT)[0]
    for piece in PIECES:
        # One number of so many digits is read in the square of its length.
        size = MEGABYTE // 10 if piece == "9" else MEGABYTE
        started_at = time.process_time()
        outcome = verdict(task, example, piece * (size // len(piece)))
        assert time.process_time() - started_at < 10.0, piece
        assert outcome.is_correct is False, piece
        assert outcome.reward is not None
        # It may avoid commas, which is one instruction of two.
        assert outcome.reward <= (0.5 if name == "if-multi" else 0.1), piece


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize(
    "text", ["", " \n", "\0", "\ud800", "\\boxed{", "####", "```python", "<answer>", "1/0"]
)
def test_a_reply_without_anything_to_read_is_wrong_and_scored(name: str, text: str, tmp_path: Path) -> None:
    """Unparsable is the model's doing: a score of 0, never an exception and never unscored."""
    task = task_of(name, tmp_path)
    outcome = verdict(task, task.examples(Split.HELD_OUT)[0], text)
    assert (outcome.is_correct, outcome.failure, outcome.reward) == (False, None, 0.0)
