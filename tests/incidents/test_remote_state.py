"""Incidents of results that did not reach storage, or reached it in a form that nobody could use."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from strop.errors import CheckRefused
from strop.io import remove_directory, verify_directory
from strop.record import EventKind, RunDir, list_runs
from strop.record.mirror.layout import mirror_uri
from strop.record.mirror.restore import find_remote_run, restore_run
from strop.run.mirroring import continue_from
from strop.run.training import train_here
from strop.spec import load_spec
from strop.train import SilentObserver
from tests.fixtures.attempts import Bench, describe_run
from tests.fixtures.mirrored import Clock, PlayedRun, list_files, model_bytes
from tests.fixtures.object_store import SpoilingProxy
from tests.fixtures.tiny_run import Curve
from tests.fixtures.train_here import Moment

NUM_STEPS = 5
# In the order in which a run comes by: before, in the middle of and after its checkpoints.
DEATHS = (
    r"open .*/rollouts/step-000004\.parquet",
    r"os\.rename .*/checkpoints/step-000004\.partial-[^/]*/COMPLETE",
    r"os\.rename .*/eval/reverse-text-step-000005\.json",
    r"open .*/\.mirror/flush",  # all is trained, and nothing was waited for
)


def short_run(model_dir: Path) -> str:
    return describe_run("remote", model_dir, NUM_STEPS)


@pytest.mark.parametrize(
    ("fault", "expected"), [("403", "the right to write objects is missing"), ("503", "")]
)
def test_ckp_6_a_store_that_cannot_be_written_is_refused_before_anything_else(
    fault: str, expected: str, proxy: SpoilingProxy, s3_root: str, tmp_path: Path
) -> None:
    """Incident: results reached storage only at the end, where it turned out that they could not."""
    proxy.spoil = lambda exchange: fault if exchange.method == "PUT" else None
    run_file = tmp_path / "run.toml"
    # The model does not exist either: the refusal comes before it is looked for.
    run_file.write_text(short_run(tmp_path / "absent"))
    resolved = load_spec(run_file, [f"store.uri={s3_root}", f"output.root={tmp_path / 'runs'}"])
    with pytest.raises(
        CheckRefused, match=f"runs cannot be mirrored to s3://.*/checkpoints: .*{expected}"
    ) as caught:
        train_here(resolved, SilentObserver(), on_run=lambda run_dir: None)
    assert caught.value.exit_code == 76
    assert "store.mirror=false" in str(caught.value)
    assert list_runs(tmp_path / "runs") == []


@pytest.fixture(scope="module")
def whole(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Curve:
    """A run that nobody disturbed."""
    return Bench(tmp_path_factory.mktemp("whole") / "bench", short_run(tiny_model_dir)).finish()


@pytest.mark.slow
def test_ckp_6_the_disk_is_lost_again_and_again_and_the_curve_stays_the_same(
    tmp_path: Path, tiny_model_dir: Path, whole: Curve
) -> None:
    """Incident: three of four sweep jobs left traces only; a restarted instance had an empty disk.

    Every attempt is killed with all that belongs to it, and its directory is lost. The next one has the
    store. A checkpoint that had not arrived is trained again.
    """
    store = tmp_path / "store"
    text = short_run(tiny_model_dir) + f'[store]\nuri = "{store}"\nmirror = true\n'
    bench = Bench(tmp_path / "0", text)
    # The first one may end when its first checkpoint is there.
    assert bench.end(Moment(r"os\.rename .*/rollouts/step-000003\.parquet", signal.SIGTERM)) == 75
    (mirror,) = (store / "checkpoints").iterdir()
    reached = [3]
    for number, die_at in enumerate(DEATHS, start=1):
        shutil.rmtree(bench.folder)
        bench = Bench(tmp_path / str(number), text)
        restored = restore_run(str(mirror), bench.runs_path)
        reached.append(RunDir.open(restored).checkpoint_steps()[-1])
        assert bench.end(Moment(die_at)) == -signal.SIGKILL, (die_at, bench.log_path.read_text())
    assert reached == sorted(reached)
    shutil.rmtree(bench.folder)
    bench = Bench(tmp_path / "last", text)
    resolved = load_spec(bench.run_file, [f"output.root={bench.runs_path}"])
    assert continue_from(str(mirror), resolved).run_path == bench.runs_path / mirror.name
    assert bench.finish() == whole
    verify_directory(mirror / "remote_final")


def test_ckp_6_a_checkpoint_that_is_pruned_here_stays_there(tmp_path: Path) -> None:
    """Incident: a synced folder mirrors deletions and half-written files."""
    played, root = PlayedRun.create(tmp_path / "runs"), str(tmp_path / "store")
    uploader = played.train(1, 2).uploader(root)
    uploader.look(is_flush=False)
    half = played.run.checkpoints_path / "step-000004.partial-1-abcdef12345678"
    (half / "model").mkdir(parents=True)
    (half / "model" / "model.safetensors").write_bytes(b"half")
    remove_directory(played.run.checkpoint_path(2))
    uploader.look(is_flush=True)
    uri = mirror_uri(root, played.run.path.name)
    assert not [name for name in list_files(Path(uri)) if "step4" in name or "partial" in name]
    restored = RunDir.open(restore_run(uri, tmp_path / "elsewhere"))
    assert restored.checkpoint_steps() == [2]
    weights = restored.checkpoint_path(2) / "model" / "model.safetensors"
    assert weights.read_bytes() == model_bytes(2)


def test_ckp_6_a_store_that_fails_later_is_an_alarm_and_is_tried_again(tmp_path: Path) -> None:
    """Incident: the end of a run was the first moment at which anybody learned of it."""
    played, root, clock = PlayedRun.create(tmp_path / "runs"), tmp_path / "store", Clock()
    uploader = played.train(1, 2).uploader(str(root), clock=clock)
    root.write_text("where the store was, there is a file: a disk that was unmounted")
    assert not uploader.look(is_flush=False)
    (note,) = played.notes()
    assert (note["cause"], note["is_alarm"]) == ("upload_failed", True)
    assert str(root) in note["detail"]
    root.unlink()
    clock.sleep(5.0)
    assert uploader.look(is_flush=False)
    assert [note["cause"] for note in played.notes()] == ["upload_failed", "upload_recovered"]
    found = find_remote_run(mirror_uri(str(root), played.run.path.name))
    assert found is not None
    assert found.step == 2


def test_prc_8_a_mirror_that_is_behind_holds_one_checkpoint_at_most(tmp_path: Path) -> None:
    """Incident: the disk filled up with what waited to be sent."""
    played, root = PlayedRun.create(tmp_path / "runs"), tmp_path / "store"
    root.write_text("a store that fails")
    uploader = played.uploader(str(root), clock=(clock := Clock()))
    for step in range(2, 41, 2):
        played.train(step - 1, step)
        played.run.keep_checkpoints(2)
        uploader.look(is_flush=False)
        clock.sleep(100.0)
    held = [name for name in list_files(played.run.path / ".mirror") if name.endswith("model.safetensors")]
    assert len(held) <= 1
    # 20 failures in a row, of which the 1st, 2nd, 4th, 8th and 16th are told.
    assert len(played.notes()) == 5
    events = played.run.events.read()
    assert all(event.kind is EventKind.CHECKPOINT for event in events)
