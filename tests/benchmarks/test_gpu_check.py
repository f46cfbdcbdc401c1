"""The check of GPUs, run as it is on a machine without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_check
from benchmarks.gpu.parts import run_parts

ROOT = Path(__file__).parents[2]


def test_a_python_without_the_needed_modules_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "NEEDED", ("json", "no_such_module"))
    assert gpu_check.main(["--device", "cpu"]) == 2
    assert "lacks no_such_module. Allowed: a Python with json, no_such_module. Next: " in (
        capsys.readouterr().err
    )


def test_unknown_parts_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_check.main(["speed"])
    assert "unknown speed. Allowed: device, parity" in capsys.readouterr().err


def collect(parts: dict[str, tuple[str, str, float]]) -> dict[str, Any]:
    return dict(run_parts(parts, device="cpu", model_dir=None, is_quick=True))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_part_that_fails_or_hangs_costs_no_other_its_result() -> None:
    here = "tests.benchmarks.gpu_parts"
    outcomes = collect(
        {
            "device": (here, "find_device", 300.0),
            "broken": (here, "break_down", 300.0),
            "killed": (here, "kill_itself", 300.0),
            "hung": (here, "hang", 0.5),
            "after": (here, "tell_peaks", 300.0),
        }
    )
    assert outcomes["broken"]["error"] == "ended with code 1"
    assert "ValueError: broken on purpose" in outcomes["broken"]["log"][-1]
    assert outcomes["killed"]["error"] == "ended with code -9"
    assert outcomes["hung"]["error"] == "stopped after its limit of 0 s"
    assert outcomes["after"]["result"]["measures"][0]["value"] == 3.0
    assert not gpu_check.is_passed(outcomes["broken"])
    assert gpu_check.is_passed(outcomes["after"])


@pytest.mark.slow
def test_without_a_gpu_the_same_code_runs_tiny_models_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--device", "cpu", "--quick", "--out", str(path)]
    command += ["parity", "engine", "grpo-0.5b", "memory"]  # On a CPU the 1.5B part is the 0.5B part again.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no GPU is used: tiny models on the CPU" in done.stdout
    assert "every check passed" in done.stdout
    document = json.loads(path.read_text())
    assert {"device", "parity", "engine", "grpo-0.5b", "memory"} == document["parts"].keys()
    (share,) = (
        measure["value"]
        for measure in document["parts"]["grpo-0.5b"]["result"]["measures"]
        if measure["name"] == "share of the peak's products, learning"
    )
    assert 0.0 < share < 100.0
