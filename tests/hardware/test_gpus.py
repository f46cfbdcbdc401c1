"""GPUs, slices and their users, by a module of NVML's name; and what is known of the real one."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from strop.hardware import describe_machine, gpus, read_gpus
from strop.hardware.gpus import (
    GpuReport,
    TorchBuild,
    explain_misfit,
    match_devices,
    read_torch_build,
    report_gpus,
)
from tests.fixtures.devices import GIB, divided, whole
from tests.fixtures.nvml import NVML_ERROR_LIBRARY_NOT_FOUND, NVML_ERROR_UNKNOWN, install_fake_nvml, use_nvml


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in front of the path of modules."""
    return use_nvml(tmp_path / "nvml", monkeypatch)


def test_the_module_that_stands_in_has_no_name_that_nvidias_lacks(nvml: Path) -> None:
    import pynvml as real

    install_fake_nvml(nvml, [])
    import pynvml as fake

    names = {name for name in vars(fake) if name.startswith(("nvml", "NVML"))}
    assert real is not fake
    assert {name for name in names if not hasattr(real, name)} == set()
    assert names >= {"nvmlInit", "NVMLError", "nvmlDeviceGetMigMode"}
    assert fake.NVML_ERROR_LIBRARY_NOT_FOUND == real.NVML_ERROR_LIBRARY_NOT_FOUND


def test_prc_7_what_the_driver_tells_is_read_with_ids_as_names(nvml: Path) -> None:
    """Incident: UUIDs parsed as integers, MIG ids replaced by a hard-coded 0."""
    machine = (replace(whole(0, 79), compute_capability=9.0), divided(1, "MIG-c6d4", "MIG-77aa"))
    install_fake_nvml(nvml, machine)
    assert read_gpus() == machine == describe_machine().gpus
    report = report_gpus()
    assert report == GpuReport(gpus=machine)
    assert [device.uuid for device in report.devices] == ["GPU-0", "MIG-c6d4", "MIG-77aa"]


def test_what_the_driver_does_not_tell_is_none(nvml: Path) -> None:
    """A word that is no number once ended the program that asked for the compute capability."""
    unified = replace(whole(0, 0), memory_bytes=None, free_memory_bytes=None, driver_version=None, numbers=())
    install_fake_nvml(nvml, [unified])
    (gpu,) = read_gpus()
    assert (gpu.memory_bytes, gpu.free_memory_bytes, gpu.compute_capability) == (None, None, None)
    assert (gpu.driver_version, gpu.numbers, gpu.has_mig) == (None, (), False)


def test_a_gpu_that_has_failed_leaves_the_others(nvml: Path) -> None:
    install_fake_nvml(nvml, [replace(whole(0, 79), uuid=None), whole(1, 79)])  # type: ignore[arg-type]
    assert read_gpus() == (whole(1, 79),)


def test_who_computes_is_named_where_it_can_be_seen(nvml: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        # No process has a number above 2**22: see proc(5), pid_max.
        install_fake_nvml(
            nvml,
            [whole(0, 79), divided(1, "MIG-a")],
            [("GPU-0", process.pid, 3 * GIB), ("GPU-0", 1 << 23, None), ("MIG-a", process.pid, GIB)],
        )
        first, second = report_gpus().devices
        process.kill()
    mine, stranger = first.users
    assert (mine.pid, stranger.pid) == (process.pid, 1 << 23)
    assert mine.name.endswith(": sleep 60")
    assert [user.pid for user in second.users] == [process.pid]


@pytest.mark.parametrize(
    ("fault", "has_driver"), [(NVML_ERROR_LIBRARY_NOT_FOUND, False), (NVML_ERROR_UNKNOWN, True)]
)
def test_a_driver_that_is_missing_or_fails_shows_none(nvml: Path, fault: int, has_driver: bool) -> None:
    install_fake_nvml(nvml, [whole(0, 79)], fault=fault)
    report = report_gpus()
    assert (report.gpus, report.has_driver) == ((), has_driver)
    assert str(fault) in report.complaint


def test_the_real_library_is_asked_where_there_is_one() -> None:
    assert isinstance(read_gpus(), tuple)


def test_prc_1_a_driver_that_hangs_holds_nobody_up(nvml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "NVML_LIMIT_S", 0.3)
    install_fake_nvml(nvml, [whole(0, 79)], hang_s=600.0)
    began_at = time.monotonic()
    report = report_gpus()
    assert (report.gpus, report.has_driver) == ((), True)
    assert time.monotonic() - began_at < 60.0


@pytest.mark.parametrize(
    ("entry", "uuids"),
    [
        ("0", ["GPU-12"]),
        ("7", []),
        ("GPU-12", ["GPU-12"]),
        ("GPU-1", ["GPU-12", "GPU-13"]),
        ("MIG-c", ["MIG-c6d4"]),
        # Until driver 470 a slice was named by its GPU and two numbers.
        ("MIG-GPU-13/7/0", ["MIG-c6d4"]),
        ("MIG-GPU-13/9/0", []),
    ],
)
def test_an_entry_of_the_variable_names_a_device(entry: str, uuids: list[str]) -> None:
    first = replace(whole(0, 70), uuid="GPU-12")
    second = replace(divided(1, "MIG-c6d4", "MIG-77aa"), uuid="GPU-13")
    assert [device.uuid for device in match_devices(entry, [first, second])] == uuids


@pytest.mark.parametrize(
    ("cuda", "driver", "is_fit"),
    [
        ("12.6", "525.60.13", True),
        ("12.6", "525.59", False),
        ("12.6", "470.82.01", False),
        ("13.0", "580.65.06", True),
        ("13.0", "570.172.08", False),
        ("11.8", "450.80.02", True),
        ("14.0", "580.65.06", True),
        (None, "470.82", True),
        ("12.6", None, True),
        ("12.6", "unknown", True),
    ],
)
def test_drivers_run_what_they_are_new_enough_for(cuda: str | None, driver: str | None, is_fit: bool) -> None:
    assert (explain_misfit(TorchBuild(version="2", cuda=cuda), driver) is None) == is_fit


def test_torch_is_asked_without_being_imported(tmp_path: Path) -> None:
    assert read_torch_build(tmp_path) is None
    text = "from typing import Optional\n__version__ = '2.13.0+cu126'\ncuda: Optional[str] = '12.6'\n"
    (tmp_path / "version.py").write_text(f"{text}hip: Optional[str] = None\n")
    assert read_torch_build(tmp_path) == TorchBuild(version="2.13.0+cu126", cuda="12.6")
    words = "import sys, strop.hardware.gpus as t; t.read_torch_build(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", words], check=False).returncode == 0
