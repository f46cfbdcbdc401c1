"""Level a: what is read of a node, with a driver's tool that is not there."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from strop.errors import CheckRefused
from strop.hardware.allocation import Allocation, GpuRequest, allocate_gpus
from strop.hardware.findings import Finding, Severity
from strop.hardware.gpus import (
    GpuReport,
    Probe,
    TorchBuild,
    explain_misfit,
    has_compat_package,
    read_torch_build,
)
from strop.hardware.inventory import read_inventory
from strop.hardware.leases import take_lease
from strop.hardware.preflight import Level, require_ready, run_preflight
from strop.hardware.preflight.checks import check_driver
from tests.fixtures.devices import GIB, OnCpu, divided, whole
from tests.fixtures.nvidia_smi import install_fake_nvidia_smi


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in front of PATH."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    return tmp_path / "bin"


def given(inherited: str, **wanted: int) -> Allocation:
    return allocate_gpus(GpuRequest(wanted=wanted, inherited=inherited), read_inventory())


def codes(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.code, finding.where) for finding in findings]


def test_a_node_that_has_everything_is_ready_within_a_second(tool: Path, tmp_path: Path) -> None:
    install_fake_nvidia_smi(tool, [whole(0, 70), whole(1, 70)])
    request = OnCpu(
        run_path=tmp_path,
        allocation=given("1,0", learner=1, engine=1),
        gpu_need_bytes={"learner": 60 * GIB, "engine": 10 * GIB},
        disk_need_bytes=1,
        memory_need_bytes=1,
        reference_at=time.time(),
        interfaces={"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "^docker"},
    )
    # Of three tries, as other work may have the machine.
    took_s = []
    for _ in range(3):
        began = time.monotonic()
        assert require_ready(request) == []
        took_s.append(time.monotonic() - began)
    assert min(took_s) < 1.0


def test_lau_10_every_shortage_is_named_with_its_code(tool: Path, tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "62"]) as stranger:
        install_fake_nvidia_smi(tool, [whole(0, 70), whole(1, 13)], [("GPU-0", stranger.pid, GIB)])
        request = OnCpu(
            run_path=tmp_path,
            allocation=given("0,1", learner=1, engine=1),
            node="n7",
            gpu_need_bytes={"engine": 20 * GIB},
            disk_need_bytes=1 << 60,
            memory_need_bytes=1 << 60,
            reference_at=time.time() - 100,
            interfaces={"GLOO_SOCKET_IFNAME": "eno7"},
        )
        assert codes(run_preflight(request)) == [
            ("free_disk", "n7"),
            ("clock_skew", "n7"),
            ("free_host_memory", "n7"),
            ("interface", "n7"),
            ("foreign_process", "GPU-0"),
            ("free_memory", "GPU-1"),
        ]
        with pytest.raises(CheckRefused) as caught:
            require_ready(request)
        assert stranger.poll() is None
        stranger.kill()
    assert caught.value.exit_code == 76
    said = str(caught.value).splitlines()
    assert len(said) == 6
    parts = ("free_disk: n7: ", "30 s", "free_host_memory: n7: ", "=eno7 ", "13.00 GiB free of")
    for part in (*parts, f"is used by process {stranger.pid} (of "):
        assert sum(part in line for line in said) == 1
    assert all(". Next: " in line for line in said)


def test_a_levels_error_ends_the_ladder(tool: Path, tmp_path: Path) -> None:
    install_fake_nvidia_smi(tool, [whole(0, 70)])
    request = OnCpu(
        run_path=tmp_path,
        allocation=given("0", learner=1),
        levels=(Level.READ, Level.COMPUTE),
        disk_need_bytes=1 << 60,
    )
    assert [finding.code for finding in run_preflight(request)] == ["free_disk"]
    assert not (tmp_path / "preflight").exists()


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (finding,) = run_preflight(OnCpu(run_path=tmp_path / "file" / "run", node="n7"))
    assert (finding.code, finding.where) == ("run_directory", "n7")
    assert "Not a directory" in finding.given


def test_a_gpu_that_has_gone_since_it_was_given(tool: Path, tmp_path: Path) -> None:
    install_fake_nvidia_smi(tool, [whole(0, 70), whole(1, 70)])
    allocation = given("0,1", learner=2)
    install_fake_nvidia_smi(tool, [whole(0, 70)])
    (finding,) = run_preflight(OnCpu(run_path=tmp_path, allocation=allocation))
    assert (finding.code, finding.where) == ("gpu_missing", "GPU-1")
    assert finding.allowed == "one of GPU-0"


def test_a_driver_that_fails_is_told_in_its_own_words(tool: Path, tmp_path: Path) -> None:
    install_fake_nvidia_smi(tool, [whole(0, 70)])
    allocation = given("0", learner=1)
    (tool / "nvidia-smi").write_text("#!/bin/sh\necho 'Driver/library version mismatch' >&2\nexit 18\n")
    (finding,) = run_preflight(OnCpu(run_path=tmp_path, allocation=allocation))
    assert (finding.code, finding.severity) == ("driver", Severity.ERROR)
    assert finding.given == "nvidia-smi fails: Driver/library version mismatch"


def test_a_held_gpu_names_its_run_and_ones_own_is_none(tool: Path, tmp_path: Path) -> None:
    install_fake_nvidia_smi(tool, [whole(0, 70)])
    allocation = given("0", learner=1)
    with take_lease("other", "2", gpus=["GPU-0"]) as held:
        (finding,) = run_preflight(OnCpu(run_path=tmp_path, allocation=allocation))
        assert finding.code == "gpu_held"
        assert "is held by run other, attempt 2" in finding.given
        own = OnCpu(run_path=tmp_path, allocation=allocation, own_lease_id=held.lease.lease_id)
        assert run_preflight(own) == []


def test_slices_cannot_compute_together_on_several_nodes(tool: Path, tmp_path: Path) -> None:
    install_fake_nvidia_smi(tool, [divided(0, "MIG-a")])
    request = OnCpu(run_path=tmp_path, allocation=given("MIG-a", learner=1), num_nodes=2)
    (finding,) = run_preflight(request)
    assert (finding.code, finding.where) == ("mig_mode", "MIG-a")


def test_torch_must_be_built_for_the_driver() -> None:
    missing = GpuReport(gpus=(), probe=Probe.MISSING)
    (finding,) = check_driver(missing, TorchBuild(version="2.13.0", cuda="12.6"), needs_cuda=True)
    assert (finding.code, finding.severity) == ("nvidia_smi", Severity.UNKNOWN)
    old = GpuReport(gpus=(whole(0, 70),), probe=Probe.ANSWERED)
    # The fixture's driver is 590.10: new enough for CUDA 13, which needs 580.
    assert list(check_driver(old, TorchBuild(version="2.13.0", cuda="13.0"), needs_cuda=True)) == []
    (finding,) = check_driver(old, TorchBuild(version="2.13.0+cpu", cuda=None), needs_cuda=True)
    assert (finding.code, finding.severity) == ("torch_build", Severity.ERROR)
    assert "torch 2.13.0+cpu computes on CPUs only" in finding.given
    assert list(check_driver(old, TorchBuild(version="2.13.0+cpu", cuda=None), needs_cuda=False)) == []
    assert list(check_driver(old, TorchBuild(version="2.9", cuda=None, hip="6.4"), needs_cuda=True)) == []


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


def test_lau_10_a_driver_that_is_too_old_is_refused_unless_it_is_helped(tmp_path: Path) -> None:
    report = GpuReport(gpus=(replace(whole(0, 70), driver_version="570.10"),), probe=Probe.ANSWERED)
    build = TorchBuild(version="2.13.0", cuda="13.0")
    (finding,) = check_driver(report, build, needs_cuda=True)
    assert (finding.code, finding.severity) == ("driver_version", Severity.ERROR)
    assert finding.given == "driver 570.10 is older than 580.0, which CUDA 13.0 of torch needs"
    (finding,) = check_driver(report, build, needs_cuda=True, has_compat=True)
    assert finding.severity is Severity.UNKNOWN
    assert not has_compat_package(tmp_path)
    (tmp_path / "cuda-13.0" / "compat").mkdir(parents=True)
    (tmp_path / "cuda-13.0" / "compat" / "libcuda.so.1").touch()
    assert has_compat_package(tmp_path)


def test_torch_is_asked_without_being_imported(tmp_path: Path) -> None:
    assert read_torch_build(tmp_path) is None
    text = "from typing import Optional\n__version__ = '2.13.0+cu126'\ncuda: Optional[str] = '12.6'\n"
    (tmp_path / "version.py").write_text(f"{text}hip: Optional[str] = None\n")
    assert read_torch_build(tmp_path) == TorchBuild(version="2.13.0+cu126", cuda="12.6")
    words = "import sys, strop.hardware.gpus as t; t.read_torch_build(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", words], check=False).returncode == 0
    own = read_torch_build()
    assert own is not None
    assert own.version == importlib.metadata.version("torch")
