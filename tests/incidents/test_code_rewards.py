"""Incidents of the group on rewards that code tasks can meet, by id."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from strop.rollout import Split
from strop.tasks.code.apps import Apps, AppsSpec
from strop.tasks.code.python_judge import JudgeJob, JudgeMode, judge_python
from tests.fixtures.judging import run_self_test
from tests.fixtures.sandboxed import best_level


def test_rew_2_a_dropped_function_name_shows_in_the_self_test(tmp_path: Path) -> None:
    """Incident: a loader dropped `fn_name`, so tests of functions ran as programs and nothing ever passed."""
    tests = {"fn_name": "inc", "inputs": [[1], [2]], "outputs": [2, 3]}
    item = {"question": "Add 1.", "solutions": json.dumps(["def inc(x): return x + 1"]), "starter_code": ""}
    findings = []
    for folder, kept in (("whole", tests), ("dropped", {k: v for k, v in tests.items() if k != "fn_name"})):
        (tmp_path / folder).mkdir()
        for stem, question in (("train", "Add 1."), ("test", "Add one.")):
            line = json.dumps({**item, "question": question, "input_output": json.dumps(kept)})
            (tmp_path / folder / f"{stem}.jsonl").write_text(line, "utf-8")
        task = Apps(AppsSpec(name="apps", source=str(tmp_path / folder), min_isolation=best_level()))
        findings.append([found.probe for found in run_self_test(task, task.examples(Split.TRAIN))])
    assert findings == [[], ["gold"]]


@pytest.mark.slow
def test_rew_8_all_tests_of_a_reply_share_one_sandbox() -> None:
    """Incident: with a container for each test, a problem of 1,440 tests took 10 to 40 minutes."""
    numbers = range(1440)
    job = JudgeJob(
        source="print(int(input()) + 1)",
        mode=JudgeMode.PROGRAMS,
        input_output=json.dumps(
            {"inputs": [f"{n}\n" for n in numbers], "outputs": [f"{n + 1}\n" for n in numbers]}
        ),
        num_tests=len(numbers),
        wall_s=600.0,
        test_s=60.0,
    )
    started_at = time.monotonic()
    verdict = judge_python(job, min_isolation=best_level())
    assert (verdict.num_passed, verdict.is_right) == (1440, True)
    # Far from ten minutes; how fast it is where nothing else runs is a benchmark's business.
    assert time.monotonic() - started_at < 300.0


def test_rew_5_the_order_of_tests_does_not_decide() -> None:
    """Incident: an early end after some failures made the score depend on the order of the tests."""
    tests = [f"assert f({n}) == {n}" for n in range(6)]
    passed = []
    for ordered in (tests, tests[::-1]):
        job = JudgeJob(
            # It dies on every odd number, and the tests behind it still run.
            source="import os\ndef f(n): return os._exit(0) if n % 2 else n",
            mode=JudgeMode.STATEMENTS,
            names=("f",),
            tests=tuple(ordered),
            num_tests=6,
        )
        verdict = judge_python(job, min_isolation=best_level())
        passed.append((verdict.num_passed, verdict.num_errored))
    assert passed == [(3, 3), (3, 3)]
