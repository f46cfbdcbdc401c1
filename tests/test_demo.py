"""The command that the README shows first, run as it shows it, for a few large steps: the real model learns.

How far the demo gets is measured by `make bench`; here it has to work, end to end, and to get better by more
than chance. Sampled replies to held-out sums were right in 3 % before, in 47 % after five steps (bfloat16).
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.conftest import require_system_part

ROOT = Path(__file__).parents[1]
FEW = ["train.steps=4", "optimizer.lr=1e-4", "eval.num_examples=8", "train.checkpoint_every=4"]
FEW += ["optimizer.schedule=constant"]
MIN_GAIN = 0.15
"""Of accuracy in 32 sampled replies to 8 examples: two standard errors without any learning."""


@pytest.mark.slow
def test_make_demo_trains_evaluates_and_says_where_its_report_is(tmp_path: Path) -> None:
    # Without it, make would make the whole environment anew inside this test.
    require_system_part("the environment of make", (ROOT / ".venv" / ".ready").is_file())
    command = ["make", "demo", f"DEMO={' '.join([*FEW, f'output.root={tmp_path}'])}"]
    ended = subprocess.run(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=1800
    )
    printed = (ended.stdout + ended.stderr).decode()
    assert ended.returncode == 0, printed[-5000:]
    (run_dir,) = (path.parent for path in tmp_path.glob("*/run.json"))
    assert json.loads((run_dir / "run.json").read_text())["finished_at"] is not None
    before, after = (
        json.loads((run_dir / "eval" / f"arithmetic-step-{step:06d}.json").read_bytes()) for step in (0, 4)
    )
    assert after["sampled"]["accuracy"] > before["sampled"]["accuracy"] + MIN_GAIN
    assert (run_dir / "report.html").is_file()
    assert str(run_dir / "report.html") in printed
    # A newcomer sees sums that it came to solve, and what to type next.
    gained = printed.partition("\ngained ")[2]
    assert "of 8 examples, wrong before and right now" in gained
    assert 1 <= gained.count("  before: ") == gained.count("  now:    ") <= 3
    assert f"strop view {run_dir}" in gained.partition("\nnext")[2]
