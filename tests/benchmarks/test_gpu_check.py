"""The check of GPUs, run as it is on a machine without one, and its arithmetic by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_check
from benchmarks.gpu.device import PEAKS, DevicePeaks
from benchmarks.gpu.parts import run_parts
from benchmarks.gpu.roofline import decode_seconds, prefill_seconds, train_seconds
from strop.policy.footprint import ModelSize

ROOT = Path(__file__).parents[2]
SIZE = ModelSize(
    num_layers=1,
    hidden_width=10,
    mlp_width=20,
    num_heads=2,
    num_kv_heads=1,
    head_width=5,
    vocab_size=100,
    max_positions=64,
    is_tied=True,
)
"""Matrices: 2 * 10 * 10 + 2 * 10 * 5 + 3 * 10 * 20 = 900 parameters; the head has 1,000."""


def peaks(*, flop_per_s: float, bytes_per_s: float) -> DevicePeaks:
    return DevicePeaks(
        name="by hand",
        flop_per_s=flop_per_s,
        bytes_per_s=bytes_per_s,
        measured_flop_per_s=1.0,
        measured_bytes_per_s=1.0,
        source="datasheet",
        memory_bytes=0,
    )


def test_the_roofline_of_decoding_by_hand() -> None:
    # Replies of 3 and 2 tokens, of which the first comes from the prefill: steps of 2 rows and of 1.
    # A step reads 2 * 1,900 bytes of weights and 2 * 1 * 1 * 5 * 2 = 20 bytes per stored token:
    # 4 + 1 and 6 + 1 of them, then 4 + 2. Its FLOP: 3,800 per row and 4 * 1 * 2 * 5 = 40 per stored token.
    read = [3800 + 20 * 12, 3800 + 20 * 6]
    flop = [2 * 3800 + 40 * 12, 3800 + 40 * 6]
    slow_memory = peaks(flop_per_s=1e12, bytes_per_s=1.0)
    slow_products = peaks(flop_per_s=1.0, bytes_per_s=1e12)
    assert decode_seconds(SIZE, slow_memory, [4, 6], [3, 2]) == pytest.approx(sum(read))
    assert decode_seconds(SIZE, slow_products, [4, 6], [3, 2]) == pytest.approx(sum(flop))


def test_the_rooflines_of_training_and_prefill_by_hand() -> None:
    one = peaks(flop_per_s=1.0, bytes_per_s=1.0)
    # 6 * (900 * 10 + 1,000 * 4) and, for attention, 12 * 1 * 2 * 5 * (6 * 6 / 2 + 8 * 8 / 2).
    assert train_seconds(SIZE, one, 10, 4, [6, 8]) == pytest.approx(6 * 13_000 + 120 * 50)
    assert prefill_seconds(SIZE, one, 7) == pytest.approx(2 * 900 * 7)


def test_devices_are_found_by_their_longest_name() -> None:
    for index, (name, _, _) in enumerate(PEAKS):
        assert not [other for other, _, _ in PEAKS[:index] if other in name], name


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
    shares = [
        measure["value"]
        for measure in document["parts"]["grpo-0.5b"]["result"]["measures"]
        if measure["name"] == "share of the combined roofline"
    ]
    assert 0.0 < shares[0] < 100.0
