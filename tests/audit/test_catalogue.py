"""The built-in tasks that read files, audited on rows of our own in their published columns."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from strop.audit import AuditReport, AuditSettings, ProbeStatus, run_audit
from strop.spec import TaskSpec
from strop.tasks import build_task
from strop.tasks.instructions.tasks import InstructionSpec
from strop.tasks.rows.judged_rows import PresetSpec
from tests.fixtures.row_files import write_rows
from tests.tasks.instructions.test_tasks import ALL_ROWS
from tests.tasks.mathematics.test_tasks import math_row

pytest.importorskip("langdetect", reason="the extra 'tasks' is not installed")

Row = dict[str, Any]
NUMBERS = range(24)


def problem(n: int) -> str:
    return f"A train of {n + 3} cars takes {17 * n + 5} people, and {n} stay. How many leave?"


def answer(n: int) -> int:
    return 16 * n + 305


def solved(n: int, **columns: Any) -> Row:
    return {"problem": problem(n), "answer": str(answer(n)), **columns}


TASKS: dict[str, tuple[type[Any], list[Row]]] = {
    "gsm8k": (
        PresetSpec,
        [{"question": problem(n), "answer": f"We count.\n#### {answer(n):,}"} for n in NUMBERS],
    ),
    "math": (PresetSpec, [math_row(problem(n), f"\\frac{{{answer(n)}}}{{7}}") for n in NUMBERS]),
    "math500": (
        PresetSpec,
        [solved(n, solution=f"\\boxed{{{answer(n)}}}", subject="Algebra", level=2) for n in NUMBERS],
    ),
    "deepscaler": (PresetSpec, [solved(n, solution="...") for n in NUMBERS]),
    "aime": (PresetSpec, [solved(n) for n in NUMBERS]),
    "mmlu": (
        PresetSpec,
        [
            {"question": problem(n), "subject": "art", "choices": list("pqrs"), "answer": (n * 7 // 3) % 4}
            for n in NUMBERS
        ],
    ),
    "rlvr-ifeval": (InstructionSpec, ALL_ROWS["rlvr-ifeval"]),
    "if-multi": (InstructionSpec, ALL_ROWS["if-multi"]),
}


def audit(name: str, tmp_path: Path) -> AuditReport:
    make, rows = TASKS[name]
    settings = {"reward": "strict-math"} if name in {"math", "math500", "deepscaler"} else {}
    spec: TaskSpec = make(name=name, source=str(write_rows(tmp_path / "rows.jsonl", rows)), **settings)
    return asyncio.run(run_audit(build_task(spec), AuditSettings()))


EASY = {"empty", "garbage", "echo", "near_miss", "constant"}
"""Of tasks of instructions: 'no commas' and 'less than 50 words' are followed by a reply of nothing at all,
and a reply that follows them still does when it is cut."""
KNOWN = {
    **dict.fromkeys(["rlvr-ifeval", "if-multi"], EASY),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_no_built_in_task_pays_for_more_than_is_known(name: str, tmp_path: Path) -> None:
    report = audit(name, tmp_path)
    broken = {
        result.probe: result.describe()
        for result in report.probes
        if result.status in {ProbeStatus.FAIL, ProbeStatus.ERROR}
    }
    assert {probe: text for probe, text in broken.items() if probe not in KNOWN.get(name, set())} == {}
    # Each is judged so that what lacks its answer or its instructions has no score.
    (failure_paths,) = [result for result in report.probes if result.probe == "failure_paths"]
    assert failure_paths.num > 2 or name in KNOWN
