"""Going on from a mirror, and copies of it: at every moment of an upload, and after every damage."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import cast

import pytest

from strop.errors import CheckRefused, CorruptRecord, RemoteMissing
from strop.io import FileLock, verify_directory
from strop.record import RunDir
from strop.record.mirror.claim import RunIdentity, claim_mirror
from strop.record.mirror.layout import flush_path, mirror_uri
from strop.record.mirror.restore import find_remote_run, restore_run
from strop.store.local_objects import LocalObjects
from strop.store.record_store import Objects, RecordStore
from tests.fixtures.mirrored import CHANGES, PlayedRun, WatchedObjects, model_bytes


def mirror_of(played: PlayedRun, root: str) -> str:
    return mirror_uri(root, played.run.path.name)


def require_sound(path: Path, step: int, salt: str = "") -> None:
    """See that a restored run is the one that was at a step: nothing less, nothing more."""
    run = RunDir.open(path)
    assert run.checkpoint_steps() == [step]
    facts = verify_directory(run.checkpoint_path(step)).facts
    assert facts == {"step": step}
    assert (run.checkpoint_path(step) / "model" / "model.safetensors").read_bytes() == model_bytes(step, salt)
    assert [line["step"] for line in run.metrics.read()] == list(range(1, step + 1))
    assert all(event.step <= step for event in run.events.read())
    # A kill may come between a checkpoint and the rollouts before it; of later ones there are none.
    assert all(int(path.stem[-6:]) <= step for path in run.rollouts_files())


def test_a_restored_run_is_the_run_at_its_newest_checkpoint(
    tmp_path: Path, played: PlayedRun, root: str
) -> None:
    played.train(1, 2, 3, 4, 5)
    (played.run.path / "eval" / "task-step-000002.json").write_text("two")
    (played.run.path / "eval" / "task-step-000005.json").write_text("five")
    (played.run.path / "attempts" / "1" / "train.log").write_text("line\n")
    (played.run.path / "trackers" / "wandb").mkdir(parents=True)
    (played.run.path / "trackers" / "wandb" / "run.wandb").write_bytes(b"offline")
    played.uploader(root).look(is_flush=True)
    path = restore_run(mirror_of(played, root), tmp_path / "elsewhere")
    assert path == tmp_path / "elsewhere" / played.run.path.name
    require_sound(path, 4)
    run = RunDir.open(path)
    assert run.state == played.run.state
    assert [file.name for file in run.rollouts_files()] == [
        f"step-00000{step}.parquet" for step in range(1, 5)
    ]
    assert (path / "eval" / "task-step-000002.json").read_text() == "two"
    assert not (path / "eval" / "task-step-000005.json").exists()
    assert (path / "attempts" / "1" / "train.log").read_text() == "line\n"
    assert (path / "trackers" / "wandb" / "run.wandb").read_bytes() == b"offline"
    assert (path / "spec.toml").read_text() == "spec\n"
    # Nothing else is left where it was made.
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    run.acquire()
    assert run.begin_attempt().index == 2
    run.release()


class Death(BaseException):
    """The end of a process, as far as one process can play it."""


@pytest.mark.slow
@pytest.mark.parametrize("is_flush", [True, False], ids=["at the end", "under way"])
def test_every_state_between_two_requests_can_be_gone_on_from(is_flush: bool, tmp_path: Path) -> None:
    """An uploader dies before each change that it makes to the store, one after the other."""
    num_changes = 0
    seen_steps = set()
    while True:
        folder = tmp_path / str(num_changes)
        played, root = PlayedRun.create(folder / "runs").train(1, 2), str(folder / "store")
        played.uploader(root, keep_last=1).look(is_flush=False)
        played.train(3, 4)
        num_left = num_changes

        def before(method: str, uri: str) -> None:
            nonlocal num_left
            if method in CHANGES:
                if num_left == 0:
                    raise Death
                num_left -= 1

        objects = cast(Objects, WatchedObjects(before))
        uploader = played.uploader(root, objects, keep_last=1)
        try:
            uploader.look(is_flush=is_flush)
            is_dead = False
        except Death:
            is_dead = True
        restored = restore_run(mirror_of(played, root), folder / "elsewhere")
        found = find_remote_run(mirror_of(played, root))
        assert found is not None
        assert found.step is not None
        require_sound(restored, found.step)
        seen_steps.add(found.step)
        if not is_dead:
            break
        # Another process finishes what the dead one began.
        flush_path(played.run.path).touch()
        assert played.uploader(root, keep_last=1).run() == 0
        after = find_remote_run(mirror_of(played, root))
        assert after is not None
        assert [name.step for name in after.records] == [4]
        shutil.rmtree(folder)
        num_changes += 1
    assert seen_steps == {2, 4}
    # Claim, uploads, COMPLETE, latest.json, removal, traces: were there none, nothing would be tested.
    assert num_changes > 15


@pytest.mark.parametrize("damage", ["bytes", "file", "manifest", "pointer"])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    damage: str, tmp_path: Path, played: PlayedRun, root: str
) -> None:
    uploader = played.uploader(root)
    for step in (2, 4):
        played.train(step - 1, step)
        uploader.look(is_flush=False)
    newest = Path(mirror_of(played, root)) / "tiny_step4"
    weights = newest / "model" / "model.safetensors"
    if damage == "bytes":
        weights.write_bytes(model_bytes(5))
    elif damage == "file":
        weights.unlink()
    elif damage == "manifest":
        (newest / "COMPLETE").write_text("{")
    else:  # What it points to is gone altogether.
        shutil.rmtree(newest)
    require_sound(restore_run(mirror_of(played, root), tmp_path / "elsewhere"), 2)


def test_a_finished_run_whose_last_checkpoint_is_damaged_is_not_finished_where_it_goes_on(
    tmp_path: Path, played: PlayedRun, root: str
) -> None:
    played.train(1, 2)
    uploader = played.uploader(root)
    uploader.look(is_flush=False)
    played.train(3, 4)
    played.run.mark_finished()
    uploader.look(is_flush=True)
    uri = mirror_of(played, root)
    whole = restore_run(uri, tmp_path / "whole")
    assert RunDir.open(whole).state.finished_at == played.run.state.finished_at
    (Path(uri) / "tiny_step4" / "state" / "optimizer.safetensors").write_bytes(b"")
    before = restore_run(uri, tmp_path / "before")
    require_sound(before, 2)
    assert not RunDir.open(before).is_finished


def test_an_attempt_that_sent_nothing_counts_where_the_run_goes_on(
    tmp_path: Path, played: PlayedRun, root: str
) -> None:
    """Its log may be in the mirror: the next attempt must not have its number."""
    played.train(1, 2).uploader(root).look(is_flush=False)
    store, uri = RecordStore(LocalObjects()), mirror_of(played, root)
    claim_mirror(store, uri, RunIdentity.of(played.run.state), owner="second", attempt=2)
    with RunDir.open(restore_run(uri, tmp_path / "elsewhere")) as run:
        assert run.begin_attempt().index == 3


def test_an_evaluation_of_a_later_step_is_in_no_record(tmp_path: Path, played: PlayedRun, root: str) -> None:
    played.train(1, 2, 3)
    for step in (2, 3):
        (played.run.path / "eval" / f"task-step-00000{step}.json").write_text(str(step))
    played.run.mark_finished()
    played.uploader(root).look(is_flush=False)
    record = Path(mirror_of(played, root)) / "tiny_step2" / "run"
    assert [path.name for path in (record / "eval").iterdir()] == ["task-step-000002.json"]
    # Nor is the run finished for those elsewhere before its model was sent.
    assert json.loads((record / "run.json").read_text())["finished_at"] is None


def test_a_mirror_without_a_sound_checkpoint_is_refused(tmp_path: Path, played: PlayedRun, root: str) -> None:
    uri = mirror_of(played, root)
    with pytest.raises(RemoteMissing, match=r"has no latest\.json"):
        restore_run(uri, tmp_path / "elsewhere")
    assert find_remote_run(uri) is None
    played.uploader(root).look(is_flush=False)
    with pytest.raises(RemoteMissing, match="has no complete checkpoint"):
        restore_run(uri, tmp_path / "elsewhere")
    played.train(1, 2)
    played.uploader(root).look(is_flush=False)
    (Path(uri) / "tiny_step2" / "state" / "optimizer.safetensors").write_bytes(b"")
    with pytest.raises(CorruptRecord, match=r"none of 1 checkpoints at .* is sound"):
        restore_run(uri, tmp_path / "elsewhere")
    assert not (tmp_path / "elsewhere" / played.run.path.name).exists()


def test_a_directory_that_is_there_is_never_replaced(tmp_path: Path, played: PlayedRun, root: str) -> None:
    played.train(1, 2).uploader(root).look(is_flush=False)
    with pytest.raises(CheckRefused, match=r"is there already, and .* would be restored to it"):
        restore_run(mirror_of(played, root), played.run.path.parent)
    incoming = tmp_path / "elsewhere" / "mine.incoming"
    incoming.mkdir(parents=True)
    with FileLock(incoming / "lock"), pytest.raises(CheckRefused, match=r"is being filled by process \d+"):
        restore_run(mirror_of(played, root), tmp_path / "elsewhere", name="mine")
    require_sound(restore_run(mirror_of(played, root), tmp_path / "elsewhere", name="mine"), 2)


def test_no_name_in_a_store_leads_out_of_the_directory(
    tmp_path: Path, played: PlayedRun, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    played.train(1, 2).uploader(root).look(is_flush=False)
    manifest = Path(mirror_of(played, root)) / "tiny_step2" / "COMPLETE"
    content = json.loads(manifest.read_text())
    content["files"]["../../escaped"] = content["files"]["run/spec.toml"]
    manifest.write_text(json.dumps(content))
    with pytest.raises(RemoteMissing, match="has no complete checkpoint"):
        restore_run(mirror_of(played, root), tmp_path / "elsewhere")
    assert not list(tmp_path.rglob("escaped"))


def test_clocks_play_no_part(
    tmp_path: Path, played: PlayedRun, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine that goes on has a clock that is ten years behind."""
    played.train(1, 2).uploader(root).look(is_flush=False)
    monkeypatch.setattr("time.time", lambda: 1_500_000_000.0)
    other_path = restore_run(mirror_of(played, root), tmp_path / "elsewhere")
    run = RunDir.open(other_path)
    run.acquire()
    run.begin_attempt()
    other = PlayedRun(run).train(3, 4)
    assert other.uploader(root, owner="other").look(is_flush=False)
    found = find_remote_run(mirror_of(played, root))
    assert found is not None
    assert (found.latest.owner, found.step) == ("other", 4)
