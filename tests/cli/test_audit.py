"""`strop audit`: a table, JSON, and 76 for a task that pays without work."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Run


def test_a_green_task_ends_with_0_and_leaves_its_report(run: Run, tmp_path: Path) -> None:
    ended = run("audit", "arithmetic", "max_value=50", "--num", "8", "--out", str(tmp_path / "audit.json"))
    assert (ended.code, ended.err) == (0, "")
    assert "arithmetic green in " in ended.out
    report = json.loads((tmp_path / "audit.json").read_text())
    assert (report["verdict"], report["num_examples"]) == ("green", 8)


def test_a_red_task_ends_with_76_and_names_its_probes(run: Run) -> None:
    ended = run("audit", "reasoning-gym", "dataset=boxnet", "num_train=8", "num_held_out=1", "--json")
    assert ended.code == 76
    assert "task reasoning-gym is red: gold" in ended.err
    assert json.loads(ended.out)["verdict"] == "red"


def test_a_task_and_all_tasks_are_not_asked_for_at_once(run: Run) -> None:
    for words in (
        (),
        ("arithmetic", "--all"),
        ("--all", "--out", "x.json"),
        ("--all", "a.b=c", "arithmetic"),
    ):
        ended = run("audit", *words)
        assert ended.code == 2
        assert "either TASK with its settings, or --all with" in ended.err
