"""Level b: a product on each GPU, by real processes that compute on the CPU where the GPUs are not there."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from strop.errors import CheckRefused
from strop.hardware.allocation import GpuRequest, allocate_gpus
from strop.hardware.gpu_probe import CHECKSUM, SIZE
from strop.hardware.preflight import PreflightRequest, check_compute, require_ready
from tests.fixtures.devices import HANG, WRONG_PRODUCT, OnCpu, divided, spoil_probe, whole
from tests.fixtures.nvml import install_fake_nvml, use_nvml


def test_the_checksum_is_that_of_the_product() -> None:
    numbers = np.arange(SIZE, dtype=np.int64)
    left = (3 * numbers[:, None] + 5 * numbers[None, :]) % 7
    right = (2 * numbers[:, None] + 7 * numbers[None, :]) % 5
    weights = (numbers[:, None] + 2 * numbers[None, :]) % 11
    product = (left.astype(np.float64) @ right.astype(np.float64)).astype(np.int64)
    # Below 2**24 = 16,777,216 every integer is a float32.
    assert product.max() < 1 << 24
    assert int((product * weights).sum()) == CHECKSUM


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return use_nvml(tmp_path / "bin", monkeypatch)


def request(run_path: Path, inherited: str, **wanted: int) -> PreflightRequest:
    allocation = allocate_gpus(GpuRequest(wanted=wanted, inherited=inherited))
    return OnCpu(run_path=run_path, allocation=allocation, node="n7", computes=True)


@pytest.mark.slow
def test_lau_10_each_gpu_computes_and_a_wrong_one_is_named(
    tool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_fake_nvml(tool, [whole(0, 70), whole(1, 70)])
    spoilt = spoil_probe(tmp_path / "spoilt", "gpu_probe", WRONG_PRODUCT, visible="1")
    monkeypatch.setenv("PYTHONPATH", spoilt["PYTHONPATH"])
    wanted = request(tmp_path, "0,1", learner=1, engine=1)
    # The patch adds 1 to the entry in row 0 and column 1, whose weight is (0 + 2 * 1) % 11 = 2.
    expected = f"^gpu_checksum: GPU-1: a product of known numbers has the checksum {CHECKSUM + 2}\\. [^\n]*$"
    with pytest.raises(CheckRefused, match=expected):
        require_ready(wanted)
    assert {path.name for path in (tmp_path / "preflight").iterdir()} == {"n7-gpu-0.log", "n7-gpu-1.log"}
    install_fake_nvml(tool, [divided(0, "MIG-a", "MIG-b")])
    assert require_ready(request(tmp_path, "MIG-a,MIG-b", learner=1, engine=1)) == []


def test_a_gpu_that_hangs_is_named_and_its_probe_ended(
    tool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_fake_nvml(tool, [whole(0, 70)])
    spoilt = spoil_probe(tmp_path / "spoilt", "gpu_probe", HANG)
    monkeypatch.setenv("PYTHONPATH", spoilt["PYTHONPATH"])
    (finding,) = check_compute(request(tmp_path, "0", learner=1), limit_s=1.0)
    assert (finding.code, finding.where) == ("gpu_compute", "GPU-0")
    assert "did not answer within 1 s" in finding.given


@pytest.mark.slow
def test_a_gpu_that_torch_does_not_see_is_named(tmp_path: Path) -> None:
    """On a machine without GPUs."""
    wanted = request(tmp_path, "63", learner=1)
    (finding,) = check_compute(replace(wanted, device="cuda"))
    assert (finding.code, finding.where) == ("gpu_compute", "63")
    assert "sees no GPU" in finding.given


def test_a_probe_that_breaks_is_quoted(tool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_fake_nvml(tool, [whole(0, 70)])
    wanted = request(tmp_path, "0", learner=1)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "torch.py").write_text("raise OSError('libgpu.so: cannot open')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "broken"), prepend=os.pathsep)
    (finding,) = check_compute(wanted)
    assert "ended with 1: " in finding.given
    assert "OSError: libgpu.so: cannot open" in finding.given


def test_who_asks_for_a_preflight_never_loads_torch(tmp_path: Path) -> None:
    words = (
        "import sys\nfrom pathlib import Path\nfrom strop.hardware.preflight import *\n"
        "require_ready(PreflightRequest(run_path=Path(sys.argv[1]), computes=True))\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", words, str(tmp_path)], check=False).returncode == 0
