"""What a running job's GPUs do: as nvidia-smi tells an agent, and as a user reads it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from strop.cli.jobs import show_gpus
from strop.cli.output import Output
from strop.hardware.allocation import Allocation, RoleDevices
from strop.hardware.gpus import Gpu, MigSlice, read_gpu_work
from strop.hardware.leases import LEASE_VARIABLE
from strop.hardware.visible_devices import parse_visible_devices
from strop.launch.gpus import read_gpu_rows, watch_gpus
from strop.record.files import DirectoryRecord
from tests.fixtures.jobs import wait_for
from tests.fixtures.nvidia_smi import install_fake_nvidia_smi

GIB = 1 << 30
LEASE = "lease-of-the-job"
UUIDS = ("GPU-busy", "GPU-waiting", "GPU-held", "GPU-zombie", "GPU-idle", "GPU-mig", "GPU-not-ours")


@pytest.fixture
def attempt(tmp_path: Path) -> Path:
    path = tmp_path / "run" / "attempts" / "a-0"
    path.mkdir(parents=True)
    return path


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    return tmp_path / "bin"


@pytest.fixture
def process() -> Iterator[int]:
    """A process of the job: it carries the job's lease."""
    words = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    with subprocess.Popen(words, env={**os.environ, LEASE_VARIABLE: LEASE}) as child:
        yield child.pid
        child.kill()


def a_gpu(index: int, uuid: str, used: int) -> Gpu:
    slices = (MigSlice(uuid="MIG-ours", profile="1g.10gb"),) if uuid == "GPU-mig" else ()
    return Gpu(
        index=str(index),
        uuid=uuid,
        name="NVIDIA H100",
        memory_bytes=80 * GIB,
        free_memory_bytes=80 * GIB - used,
        has_mig=bool(slices),
        slices=slices,
    )


def an_allocation() -> Allocation:
    uuids = (*UUIDS[:5], "MIG-ours")
    parts = {"train/infer": uuids[:2], "train/train": uuids[2:]}
    devices = parse_visible_devices(None)
    return Allocation(
        roles={name: RoleDevices(visible=devices, uuids=found) for name, found in parts.items()}
    )


def observe(attempt: Path, node: int = 0) -> None:
    with watch_gpus(attempt, node, an_allocation(), LEASE, every_s=0.05):
        wait_for((attempt / f"gpus-{node}.json").is_file)


def test_each_gpu_is_told_apart(attempt: Path, tool: Path, process: int) -> None:
    used = (60 * GIB, 60 * GIB, 70 * GIB, 40 * GIB, 0, 0, 0)
    gpus = [a_gpu(index, uuid, size) for index, (uuid, size) in enumerate(zip(UUIDS, used, strict=True))]
    users = [
        ("GPU-busy", process, 60 * GIB),
        ("GPU-waiting", process, 60 * GIB),
        ("GPU-held", os.getpid(), GIB),
    ]
    install_fake_nvidia_smi(tool, gpus, users, working={"GPU-busy": 93, "GPU-held": 100})
    assert read_gpu_work()["GPU-busy"] == 0.93
    (attempt.parents[1] / "metrics.jsonl").write_text("{}\n")
    observe(attempt)
    rows = read_gpu_rows(DirectoryRecord(attempt.parents[1]), now=time.time())
    assert [(row.uuid, row.state, row.role) for row in rows] == [
        ("GPU-busy", "busy", "train/infer"),
        ("GPU-waiting", "waiting", "train/infer"),
        ("GPU-held", "held", "train/train"),
        ("GPU-zombie", "held", "train/train"),
        ("GPU-idle", "idle", "train/train"),
        ("GPU-mig", "idle", "train/train"),
    ]
    assert f"process {os.getpid()} (of " in rows[2].holders[0]
    assert "no visible process" in rows[3].holders[0]
    assert rows[5].work_frac is None
    assert (rows[0].trace_age_s or 0.0) < 60.0


def test_the_newest_attempt_counts_and_what_is_old_is_unknown(attempt: Path, tool: Path) -> None:
    install_fake_nvidia_smi(tool, [a_gpu(0, "GPU-idle", 0)])
    later = attempt.parent / "a-10"
    for path, node in ((attempt, 0), (attempt.parent / "a-9", 0), (later, 1), (later, 0)):
        path.mkdir(exist_ok=True)
        observe(path, node)
    record = DirectoryRecord(attempt.parents[1])
    assert [(row.node, row.state) for row in read_gpu_rows(record, now=time.time())] == [
        (0, "idle"),
        (1, "idle"),
    ]
    (old, _) = read_gpu_rows(record, now=time.time() + 600.0)
    assert (old.state, old.age_s > 500.0) == ("unknown", True)


def test_a_job_without_gpus_and_a_broken_tool_are_no_failure(attempt: Path, tool: Path) -> None:
    with watch_gpus(attempt, 0, Allocation(roles={}), LEASE):
        pass
    assert read_gpu_rows(DirectoryRecord(attempt.parents[1]), now=0.0) == []
    tool.mkdir()
    (tool / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    (tool / "nvidia-smi").chmod(0o755)
    observe(attempt)
    assert read_gpu_rows(DirectoryRecord(attempt.parents[1]), now=time.time()) == []


def test_the_table_and_its_json(
    attempt: Path, tool: Path, process: int, capsys: pytest.CaptureFixture[str]
) -> None:
    users = [("GPU-busy", process, 60 * GIB), ("GPU-held", os.getpid(), GIB)]
    gpus = [a_gpu(0, "GPU-busy", 60 * GIB), a_gpu(1, "GPU-held", GIB)]
    install_fake_nvidia_smi(tool, gpus, users, working={"GPU-busy": 93})
    observe(attempt)
    record = DirectoryRecord(attempt.parents[1])
    launcher = SimpleNamespace(backend=SimpleNamespace(open_record=lambda ref, trial: record))
    status = SimpleNamespace(
        ref=SimpleNamespace(name="mine"), trial=0, state=SimpleNamespace(is_terminal=False)
    )
    for is_json in (False, True):
        show_gpus(Output(), [launcher], [status], is_json=is_json)  # type: ignore[list-item]
    out = capsys.readouterr().out
    table, _, text = out.partition("\n[")
    assert "93%" in table
    assert f"mine, node 0, GPU 1: process {os.getpid()} (of " in table
    assert [one["state"] for one in json.loads(f"[{text}")] == ["busy", "held"]
    status.state.is_terminal = True
    show_gpus(Output(), [launcher], [status], is_json=False)  # type: ignore[list-item]
    assert "no running job has reported its GPUs" in capsys.readouterr().err
