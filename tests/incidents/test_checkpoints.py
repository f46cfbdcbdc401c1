"""Incidents of the checkpoint group, as far as files can cause or prevent them.

That loaded tensors are the file's, and that a resumed run equals an uninterrupted one, is shown
where weights are loaded and trained.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from strop.errors import ConfigError, CorruptRecord
from strop.record import RunDir
from strop.store import AtomicDirectory, get_model, is_complete, verify_directory

# Writes a checkpoint and dies just before its n-th touch of the file system. An audit hook sees
# every open, mkdir, rename and remove, so no write point is forgotten when the code changes.
WRITE_AND_DIE = """
import os, signal, sys
from pathlib import Path
from strop.store import AtomicDirectory
target, countdown, replace = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "replace"
parent = str(target.parent)
def watch(event, arguments):
    global countdown
    if event in WATCHED and arguments and str(arguments[0]).startswith(parent):
        countdown -= 1
        if countdown < 0:
            os.kill(os.getpid(), signal.SIGKILL)
WATCHED = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir"}
sys.addaudithook(watch)
with AtomicDirectory(target, replace=replace) as partial:
    for role in ("model", "state"):
        (partial / role).mkdir()
        (partial / role / "part.bin").write_bytes(b"new " + role.encode() * 1000)
"""
MAX_WRITE_POINTS = 200


def write_checkpoint(run: RunDir, step: int) -> Path:
    with AtomicDirectory(run.checkpoint_path(step)) as partial:
        for role in ("model", "state"):
            (partial / role).mkdir()
            (partial / role / "part.bin").write_bytes(f"{role} {step}".encode() * 1000)
    return run.checkpoint_path(step)


def write_and_die(target: Path, countdown: int, mode: str) -> bool:
    """Return whether the writer reached its end alive."""
    ended = subprocess.run(
        [sys.executable, "-c", WRITE_AND_DIE, str(target), str(countdown), mode],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode in {0, -signal.SIGKILL}, ended.stderr
    return ended.returncode == 0


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "runs", "demo", "", "d1", {})


def test_ckp_4_a_kill_at_any_write_point_leaves_the_previous_checkpoint(run: RunDir) -> None:
    """Incident: the newest directory was chosen without a completeness marker; a torn save looked whole."""
    write_checkpoint(run, 10)
    target = run.checkpoint_path(20)
    num_died = num_published = 0
    for countdown in range(MAX_WRITE_POINTS):
        if write_and_die(target, countdown, "fresh"):
            break
        num_died += 1
        latest = run.latest_checkpoint()
        assert latest is not None
        step, path = latest
        verify_directory(path)
        # Once the name is there, the rest is tidying: the new checkpoint counts, whole.
        assert step == (20 if target.exists() else 10)
        num_published += step == 20
        run.release()
        run.acquire()
        assert {entry.name for entry in run.checkpoints_path.iterdir()} == {
            f"step-{known:06d}" for known in run.checkpoint_steps()
        }
        shutil.rmtree(target, ignore_errors=True)
    # Two directories and two files made, four files read back or sealed, a manifest and two renames.
    assert num_died >= 10
    assert num_died < MAX_WRITE_POINTS
    assert num_published <= 2
    run.release()


def test_ckp_4_a_kill_while_replacing_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    target = tmp_path / "model"
    for countdown in range(MAX_WRITE_POINTS):
        with AtomicDirectory(target, replace=True) as partial:
            (partial / "old.bin").write_bytes(b"old")
        if write_and_die(target, countdown, "replace"):
            break
        # At no point is there nothing, or a mixture.
        names = set(verify_directory(target).files)
        assert names in ({"old.bin"}, {"model/part.bin", "state/part.bin"})
    assert set(verify_directory(target).files) == {"model/part.bin", "state/part.bin"}
    assert countdown >= 10


def test_ckp_4_a_flipped_byte_is_refused_by_name(run: RunDir) -> None:
    path = write_checkpoint(run, 20) / "state" / "part.bin"
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    latest = run.latest_checkpoint()
    assert latest is not None
    with pytest.raises(CorruptRecord, match=r"step-000020/state/part\.bin has SHA-256"):
        verify_directory(latest[1])
    run.release()


def test_ckp_4_one_roles_missing_half_is_refused_by_name(run: RunDir) -> None:
    path = write_checkpoint(run, 20)
    shutil.rmtree(path / "state")
    with pytest.raises(CorruptRecord, match=r"state/part\.bin cannot be read"):
        verify_directory(path)
    run.release()


def test_ckp_4_a_directory_without_its_marker_is_passed_over(run: RunDir) -> None:
    write_checkpoint(run, 10)
    copied = run.checkpoint_path(20)
    shutil.copytree(write_checkpoint(run, 15), copied, ignore=shutil.ignore_patterns("COMPLETE"))
    assert not is_complete(copied)
    assert run.latest_checkpoint() == (15, run.checkpoint_path(15))
    run.release()


def test_ckp_3_a_removed_optimizer_file_is_refused(run: RunDir) -> None:
    """Incident: resume restored a counter only; parts that were missing went unnoticed."""
    path = write_checkpoint(run, 20)
    (path / "state" / "part.bin").unlink()
    with pytest.raises(CorruptRecord, match=r"state/part\.bin"):
        verify_directory(path)
    run.release()


def test_ckp_3_records_continue_at_the_checkpoint_without_gap_or_repeat(run: RunDir) -> None:
    for step in range(1, 8):
        run.metrics.append(step, {"loss": 1.0 / step})
        if step == 5:
            run.sync()
            write_checkpoint(run, step)
    run.release()  # The process is gone two steps after its checkpoint.
    with RunDir.open(run.path) as resumed:
        latest = resumed.latest_checkpoint()
        assert latest is not None
        resumed.truncate_after(latest[0])
        for step in range(latest[0] + 1, 11):
            resumed.metrics.append(step, {"loss": 1.0 / step})
        assert [line["step"] for line in resumed.metrics.read()] == list(range(1, 11))


def test_ckp_1_an_empty_model_folder_is_refused(tmp_path: Path) -> None:
    """Incident: loading was skipped without an error and random weights were trained."""
    (tmp_path / "model").mkdir()
    with pytest.raises(
        ConfigError, match=r"config\.json, tokenizer\.json, weights .* missing; found nothing"
    ):
        get_model(str(tmp_path / "model"), cache_dir=tmp_path / "cache")


def test_ckp_1_a_missing_shard_is_refused_by_name(tmp_path: Path) -> None:
    model_dir = tmp_path / "model"
    model_dir.mkdir()
    for name in ("config.json", "tokenizer.json", "model-00001-of-00002.safetensors"):
        (model_dir / name).write_bytes(b"{}")
    index = (
        '{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}'
    )
    (model_dir / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ConfigError, match=r"model-00002-of-00002\.safetensors missing"):
        get_model(str(model_dir), cache_dir=tmp_path / "cache")
