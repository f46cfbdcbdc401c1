"""GPUs, slices and their users, by the real path: a program named nvidia-smi that is found and asked."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from strop.hardware import Gpu, GpuUser, MigSlice, describe_machine, gpus, read_gpu_users, read_gpus
from strop.hardware.gpus import GpuReport, Probe, parse_gpu_line, parse_slices, report_gpus
from tests.fixtures.nvidia_smi import install_fake_nvidia_smi

GIB = 1 << 30
WHOLE = Gpu(index="0", uuid="GPU-5a", name="NVIDIA H100", memory_bytes=80 * GIB, free_memory_bytes=79 * GIB)
DIVIDED = Gpu(
    index="1",
    uuid="GPU-5b",
    name="NVIDIA A100, 80GB",
    memory_bytes=80 * GIB,
    free_memory_bytes=None,
    has_mig=True,
    slices=(MigSlice(uuid="MIG-c6d4", profile="1g.10gb"), MigSlice(uuid="MIG-77aa", profile="3g.40gb+me")),
)


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in front of PATH."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return tmp_path


def test_what_is_installed_is_read_back(tool: Path) -> None:
    install_fake_nvidia_smi(tool, [WHOLE, DIVIDED])
    assert read_gpus() == (WHOLE, DIVIDED) == describe_machine().gpus
    # 3g.40gb+me: three of seven parts of the processors, 40 GB, and the media extensions.
    assert [part.memory_bytes for part in DIVIDED.slices] == [10_000_000_000, 40_000_000_000]


def test_prc_7_gpu_ids_stay_strings() -> None:
    """Incident: UUIDs parsed as integers, MIG ids replaced by a hard-coded 0."""
    # 81559 MiB = 81559 * 1048576 bytes.
    assert parse_gpu_line("0, GPU-5a, NVIDIA H100 80GB HBM3, 81559, 81000, Disabled, 550.54, 9.0") == Gpu(
        index="0",
        uuid="GPU-5a",
        name="NVIDIA H100 80GB HBM3",
        memory_bytes=85_520_809_984,
        free_memory_bytes=81_000 << 20,
        driver_version="550.54",
        compute_capability=9.0,
    )
    unified = parse_gpu_line("1, GPU-5b, NVIDIA GB10, [N/A], [N/A], [N/A], [N/A], [N/A]")
    assert unified is not None
    assert (unified.memory_bytes, unified.free_memory_bytes, unified.used_bytes) == (None, None, None)
    assert (unified.has_mig, unified.driver_version, unified.compute_capability) == (False, None, None)
    assert parse_gpu_line("Unable to determine the device handle") is None


def test_slices_are_listed_under_their_gpu() -> None:
    """The old spelling of a slice's UUID is kept as it is."""
    listed = [
        "GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5d5b)",
        "  MIG 1g.5gb      Device  0: (UUID: MIG-GPU-5d5b/7/0)",
        "GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-6e6c)",
        "  MIG 2g.10gb     Device  0: (UUID: MIG-c6d4f1ef)",
        "  MIG 2g.10gb     Device  1: (UUID: MIG-0b1d2e3f)",
        "Unable to determine the device handle",
    ]
    assert parse_slices(listed) == {
        "GPU-5d5b": (MigSlice(uuid="MIG-GPU-5d5b/7/0", profile="1g.5gb"),),
        "GPU-6e6c": (
            MigSlice(uuid="MIG-c6d4f1ef", profile="2g.10gb"),
            MigSlice(uuid="MIG-0b1d2e3f", profile="2g.10gb"),
        ),
    }
    assert MigSlice(uuid="MIG-1", profile="all").memory_bytes is None


def test_who_computes_is_named_where_it_can_be_seen(tool: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        # No process has a number above 2**22: see proc(5), pid_max.
        install_fake_nvidia_smi(tool, [WHOLE], [("GPU-5a", process.pid, 3 * GIB), ("GPU-5a", 1 << 23, GIB)])
        mine, stranger = read_gpu_users()
        process.kill()
    assert (mine.pid, mine.memory_bytes, mine.command) == (process.pid, 3 * GIB, "sleep 60")
    assert mine.user is not None
    assert stranger == GpuUser(gpu_uuid="GPU-5a", pid=1 << 23, memory_bytes=GIB, user=None, command=None)


def test_a_tool_that_fails_or_is_missing_shows_none(tool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tool / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'driver mismatch' >&2\nexit 9\n")
    program.chmod(0o755)
    assert (read_gpus(), read_gpu_users()) == ((), ())
    assert report_gpus() == GpuReport(gpus=(), probe=Probe.FAILED, complaint="driver mismatch")
    program.write_text("#!/bin/sh\necho 'No running processes found'\n")
    assert (read_gpus(), read_gpu_users()) == ((), ())
    program.write_text("not a program")
    assert report_gpus().probe is Probe.FAILED
    monkeypatch.setenv("PATH", str(tool / "nowhere"))
    assert report_gpus() == GpuReport(gpus=(), probe=Probe.MISSING)


def test_prc_1_a_tool_that_hangs_and_cannot_be_buried_holds_nobody_up(
    tool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that hangs in the driver survives KILL; here a child of it keeps its output open as long."""
    monkeypatch.setattr(gpus, "NVIDIA_SMI_LIMIT_S", 0.3)
    monkeypatch.setattr(gpus, "_DEATH_LIMIT_S", 0.3)
    path = tool / "nvidia-smi"
    path.unlink(missing_ok=True)
    path.write_text("#!/bin/sh\nsleep 120 & wait\n")
    path.chmod(0o755)
    began_at = time.monotonic()
    answer = gpus.ask_nvidia_smi("-L")
    assert answer.probe is Probe.FAILED
    assert "timed out after 0.3 seconds" in answer.complaint
    assert time.monotonic() - began_at < 60.0
