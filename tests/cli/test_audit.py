"""`strop audit`: a table, JSON, and 76 for a task that pays without work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fixtures.commands import Run


def test_a_green_task_ends_with_0_and_leaves_its_report(run: Run, tmp_path: Path) -> None:
    ended = run("audit", "arithmetic", "max_value=50", "num=8", "--out", str(tmp_path / "audit.json"))
    assert (ended.code, ended.err) == (0, "")
    assert "arithmetic green in " in ended.out
    report = json.loads((tmp_path / "audit.json").read_text())
    assert (report["verdict"], report["num_examples"]) == ("green", 8)


def test_a_red_task_ends_with_76_and_names_its_probes(run: Run) -> None:
    ended = run("audit", "reasoning-gym", "dataset=boxnet", "num_train=8", "num_held_out=1", "--json")
    assert ended.code == 76
    assert "task reasoning-gym is red: gold" in ended.err
    assert json.loads(ended.out)["verdict"] == "red"


def test_what_no_audit_can_do_is_refused(run: Run) -> None:
    for words, said in (
        ((), "Missing argument 'task'"),
        (("all", "--out", "x.json"), "--out takes the report of one task"),
        (("all", "max_value=3"), "does not say for which task it is"),
        (("arithmetic", "seed=x"), "seed='x'"),
    ):
        ended = run("audit", *words)
        assert ended.code == 2
        assert said in ended.err


@pytest.mark.slow
@pytest.mark.usefixtures("bubblewrap")
def test_a_task_with_files_is_audited_with_its_files(run: Run, tmp_path: Path) -> None:
    for stem, numbers in (("train", (2, 3, 4)), ("test", (5,))):
        rows = [
            {
                "text": f"Write a function to add {n}.",
                "code": f"def plus{n}(x):\n    return x + {n}",
                "test_list": [f"assert plus{n}(1) == {n + 1}", f"assert plus{n}(-9) == {n - 9}"],
            }
            for n in numbers
        ]
        (tmp_path / f"{stem}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    ended = run("audit", "mbpp", f"source={tmp_path}", "num=2", "--json")
    report = json.loads(ended.out)
    assert (ended.code, report["task"], report["num_examples"]) == (0, "mbpp", 2)
    broken = [probe["probe"] for probe in report["probes"] if probe["status"] in {"fail", "error"}]
    # Every test stands in the prompt.
    assert broken == ["constant"]
