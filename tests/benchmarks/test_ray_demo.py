"""What of a step on Ray is work, read from a run's own records."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.ray_demo import split_steps


def test_work_is_taken_away_from_each_step_that_is_only_its_own(tmp_path: Path) -> None:
    lines = [
        {"step": 1, "policy_version": 1, "seconds_step": 20.0, "seconds_compute": 5.0},
        {"step": 2, "policy_version": 2, "seconds_step": 10.0, "seconds_compute": 5.0},
        {"step": 3, "policy_version": 3, "seconds_step": 8.0, "seconds_compute": 4.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    role = tmp_path / "attempts" / "1" / "roles" / "engine-0"
    role.mkdir(parents=True)
    role.with_suffix(".log").write_text("role engine-0 on node 0, process 7\n")
    log = role / "engine.log"
    said = "serving version {}, digest 0a1b; sampled for {:.3f} s since the update before\n"
    log.write_text("INFO loading\n" + "".join(said.format(version, 1.0 + version) for version in range(4)))
    (tmp_path / "eval").mkdir()
    for step in (0, 3):
        (tmp_path / "eval" / f"arithmetic-step-{step:06d}.json").write_text("{}")
    steps = split_steps(tmp_path)
    # Step 1 stands behind the evaluation at 0, which the engine's clock holds too.
    assert steps["whole_s"] == [10.0, 8.0]
    assert steps["sample_s"] == [3.0, 4.0]
    # 1 - (3 + 5) / 10 and 1 - (4 + 4) / 8.
    assert steps["overhead_frac"] == pytest.approx([0.2, 0.0])
