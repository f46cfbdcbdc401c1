"""Audits were green where they judged nothing, and where code that exits in its grader earns full marks."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from strop.audit import AuditReport, AuditSettings, ProbeStatus, Verdict, run_audit
from strop.spec import load_spec
from strop.tasks import build_task

TESTS = ["assert double(2) == 4", "assert double(-1) == -2"]
GOLD = "```python\ndef double(x):\n    return x + x\n```"
GRADERS = {
    "values": "result.stdout.split() == [b'5']",
    "the exit": "result.exit_code == 0 and b'3' not in result.stdout",
}
WORKSPACE = """
from strop.environments import Workspace

class Repair(Workspace):
    max_turns = 4
    carried = ("total.py",)

    def examples(self, split):
        return [{"split": split, "number": number} for number in range(2)]

    def opening(self, example, seed):
        return "Repair total.py, then submit."

    async def prepare(self, example, seed):
        await self.sandbox.write("total.py", b"def total(numbers):\\n    return max(numbers)\\n")

    async def grade(self, sandbox):
        code = "import sys; sys.path.insert(0, '.'); from total import total; print(total([2, 3]))"
        result = await sandbox.exec([*sandbox.python_argv, "-c", code], wall_limit_s=10)
        return GRADER
"""


def audit(folder: Path, table: str, *probes: str) -> AuditReport:
    """Audit what the table of a run file names, with these probes."""
    (folder / "run.toml").write_text(
        f'name = "audited"\n[model]\nuri = "toy"\n{table}\nsandbox = "process"\nmin_isolation = "rlimit"\n'
    )
    spec = load_spec(folder / "run.toml").spec.task
    settings = AuditSettings(num_examples=1, probes=probes)
    return asyncio.run(run_audit(build_task(spec), settings))


ROWS = (
    '[task]\nname = "rows"\nsource = "rows/"\nprompt = "question"\nanswer = "tests"\nreward = "python-tests"'
)


def test_an_audit_is_green_only_where_a_right_reply_was_judged(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    for name in ("train", "test"):
        row = {"question": f"{name}?", "tests": TESTS, "code": GOLD}
        (tmp_path / "rows" / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    report = audit(tmp_path, ROWS, "empty", "gold", "near_miss", "label_leak", "forgeries")
    found = {result.probe: (result.status, result.num) for result in report.probes}
    assert found["gold"] == (ProbeStatus.WARN, 0)
    # Replies leave no files.
    assert found["forgeries"][0] is ProbeStatus.NOT_APPLICABLE
    assert report.verdict is Verdict.AMBER
    assert set(report.to_json()["unjudged"]) == {"gold", "near_miss", "forgeries"}
    report = audit(tmp_path, ROWS + '\ngold = "{code}"', "empty", "gold")
    assert (report.verdict, report.unjudged) == (Verdict.GREEN, ())
    report = audit(tmp_path, ROWS + '\ngold = "{question}"', "empty", "gold")
    assert report.verdict is Verdict.RED


@pytest.mark.slow
@pytest.mark.parametrize("grader", GRADERS)
def test_a_workspace_that_believes_an_exit_code_is_red(tmp_path: Path, grader: str) -> None:
    (tmp_path / "repair.py").write_text(WORKSPACE.replace("GRADER", GRADERS[grader]))
    report = audit(tmp_path, '[environment]\nname = "repair.py:Repair"', "forgeries")
    assert report.verdict is (Verdict.RED if grader == "the exit" else Verdict.GREEN), report.probes
