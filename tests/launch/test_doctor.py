from __future__ import annotations

from pathlib import Path

import pytest

from strop.hardware import read_calibration
from strop.kernels import kernel_status
from strop.launch.doctor import EXTRAS, diagnose


@pytest.mark.slow
def test_the_doctor_measures_keeps_it_and_looks_around(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    found = diagnose(tmp_path / "runs", cache_dir=tmp_path / "cache", time_limit_s=0.01)
    assert read_calibration(tmp_path / "cache") == found.calibration
    checks = {check.name: check for check in found.checks}
    assert not checks["default model"].is_ok
    assert "strop model get" in checks["default model"].detail
    assert checks["compiled kernels"].is_ok == (kernel_status().path is not None)
    assert kernel_status().note in checks["compiled kernels"].detail
    assert {f"extra {name}" for name in EXTRAS} <= set(checks)
    # Looking made no folder for runs.
    assert not (tmp_path / "runs").exists()
