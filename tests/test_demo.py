"""The command that the README shows first, run as it shows it but for a few steps only.

The numbers that the demo reaches are measured by `make bench`; here it has to work, end to end.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.conftest import require_system_part

ROOT = Path(__file__).parents[1]
FEW = ["train.steps=2", "train.prompts_per_step=2", "eval.num_examples=8", "train.checkpoint_every=2"]


def run_command(*words: str) -> str:
    ended = subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, timeout=1800, check=False, stdin=subprocess.DEVNULL
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    return ended.stdout + ended.stderr


@pytest.mark.slow
def test_make_demo_trains_evaluates_and_says_where_its_report_is(tmp_path: Path) -> None:
    # Without it, make would make the whole environment anew inside this test.
    require_system_part("the environment of make", (ROOT / ".venv" / ".ready").is_file())
    printed = run_command("make", "demo", f"DEMO={' '.join([*FEW, f'output.root={tmp_path}'])}")
    (run_dir,) = (path.parent for path in tmp_path.glob("*/run.json"))
    assert json.loads((run_dir / "run.json").read_text())["finished_at"] is not None
    assert len((run_dir / "metrics.jsonl").read_text().splitlines()) == 2
    assert [path.name for path in sorted((run_dir / "eval").iterdir())] == [
        "arithmetic-step-000000.json",
        "arithmetic-step-000002.json",
    ]
    assert (run_dir / "report.html").is_file()
    assert str(run_dir / "report.html") in printed
