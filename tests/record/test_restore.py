"""Going on from a mirror: at every moment of an upload, after every damage, and after kill -9."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from strop.errors import CheckRefused, CorruptRecord, MirrorFenced, RemoteMissing
from strop.io import FileLock, verify_directory
from strop.record import RunDir
from strop.record.mirror import claim_mirror, find_remote_run, mirror_uri, restore_run
from strop.store.local_objects import LocalObjects
from strop.store.record_store import Objects, RecordStore
from tests.fixtures.attempts import fork
from tests.fixtures.mirrored import CHANGES, PlayedRun, WatchedObjects, model_bytes
from tests.fixtures.object_store import Exchange, SpoilingProxy, make_objects

NUM_KILLS = 12
LIMIT_S = 240.0


def mirror_of(played: PlayedRun, root: str) -> str:
    return mirror_uri(root, played.run.path.name)


def require_sound(path: Path, step: int) -> None:
    """See that a restored run is the one that was at a step: nothing less, nothing more."""
    run = RunDir.open(path)
    assert run.checkpoint_steps() == [step]
    assert verify_directory(run.checkpoint_path(step)).facts == {"step": step}
    assert (run.checkpoint_path(step) / "model" / "model.safetensors").read_bytes() == model_bytes(step)
    assert [path.name for path in run.checkpoints_path.iterdir()] == [f"step-{step:06d}"]
    steps = list(range(1, step + 1))
    assert [line["step"] for line in run.metrics.read()] == steps
    assert [line["step"] for line in run.timeline.read_lines()] == steps
    assert all(event.step <= step for event in run.events.read())
    assert [int(path.stem[-6:]) for path in run.rollouts_files()] == steps


def test_a_restored_run_is_the_run_at_its_newest_checkpoint(
    tmp_path: Path, played: PlayedRun, root: str
) -> None:
    played.train(1, 2, 3, 4, 5)
    for step in (2, 5):
        (played.run.path / "eval" / f"task-step-00000{step}.json").write_text(str(step))
        replies = played.run.path / "eval" / f"task-step-00000{step}"
        replies.mkdir()
        (replies / "examples-000000-000001.parquet").write_bytes(b"replies")
    (played.run.path / "attempts" / "1" / "train.log").write_text("line\n")
    (played.run.path / "trackers" / "wandb").mkdir(parents=True)
    (played.run.path / "trackers" / "wandb" / "run.wandb").write_bytes(b"offline")
    played.mirror(root).look(is_last=True)
    path = restore_run(mirror_of(played, root), tmp_path / "elsewhere")
    assert path == tmp_path / "elsewhere" / played.run.path.name
    require_sound(path, 4)
    run = RunDir.open(path)
    assert run.state == played.run.state
    evaluated = ["task-step-000002", "task-step-000002.json"]
    assert sorted(entry.name for entry in (path / "eval").iterdir()) == evaluated
    assert (path / "eval" / "task-step-000002.json").read_text() == "2"
    assert (path / "attempts" / "1" / "train.log").read_text() == "line\n"
    assert (path / "trackers" / "wandb" / "run.wandb").read_bytes() == b"offline"
    assert (path / "spec.toml").read_text() == "spec\n"
    # Nothing else is left where it was made.
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    assert not (path / "latest.json").exists()
    with run:
        assert run.begin_attempt().index == 2


class Death(BaseException):
    """The end of a process, as far as one process can play it."""


@pytest.mark.slow
def test_every_state_between_two_requests_can_be_gone_on_from(tmp_path: Path) -> None:
    """A mirror dies before each change that it makes to the store, one after the other."""
    num_changes, seen_steps, is_dead = 0, set[int](), True
    while is_dead:
        folder = tmp_path / str(num_changes)
        played, root = PlayedRun.create(folder / "runs").train(1, 2), str(folder / "store")
        played.mirror(root, keep_last=1).look()
        played.run.begin_attempt()
        num_left = num_changes

        def before(method: str, uri: str) -> None:
            nonlocal num_left
            if method in CHANGES:
                if num_left == 0:
                    raise Death
                num_left -= 1

        mirror = played.mirror(root, cast(Objects, WatchedObjects(before)), keep_last=1)
        try:
            mirror.claim()
            played.train(3, 4)
            mirror.look(is_last=True)
            is_dead = False
        except Death:
            pass
        found = find_remote_run(mirror_of(played, root))
        assert found is not None
        assert found.step is not None
        require_sound(restore_run(mirror_of(played, root), folder / "elsewhere"), found.step)
        seen_steps.add(found.step)
        # The next attempt finishes what the dead one began.
        played.run.begin_attempt()
        played.train(*() if played.run.rollouts_path(4).exists() else (3, 4))
        played.mirror(root, keep_last=1).look(is_last=True)
        require_sound(restore_run(mirror_of(played, root), folder / "after"), 4)
        shutil.rmtree(folder)
        num_changes += 1
    assert seen_steps == {2, 4}
    # Claim, uploads, COMPLETE, latest.json, removal: were there none, nothing would be tested.
    assert num_changes > 15


@pytest.mark.parametrize("damage", ["bytes", "file", "manifest", "pointer", "cut", "logs"])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    damage: str, tmp_path: Path, played: PlayedRun, root: str
) -> None:
    mirror = played.mirror(root)
    for step in (2, 4):
        played.train(step - 1, step)
        mirror.look()
    newest = Path(mirror_of(played, root)) / "checkpoints" / "step-000004"
    weights = newest / "model" / "model.safetensors"
    if damage == "bytes":
        weights.write_bytes(model_bytes(5))
    elif damage == "file":
        weights.unlink()
    elif damage == "manifest":
        (newest / "COMPLETE").write_text("{")
    elif damage == "pointer":  # What it points to is gone altogether.
        shutil.rmtree(newest)
    elif damage == "cut":
        weights.write_bytes(weights.read_bytes()[:100])
    else:
        log = newest.parent.parent / "metrics.jsonl"
        log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:3]))
    require_sound(restore_run(mirror_of(played, root), tmp_path / "elsewhere"), 2)


def test_a_finished_run_whose_last_checkpoint_is_damaged_is_not_finished_where_it_goes_on(
    tmp_path: Path, played: PlayedRun, root: str
) -> None:
    played.train(1, 2)
    mirror, uri = played.mirror(root), mirror_of(played, root)
    mirror.look()
    played.train(3, 4)
    played.run.mark_finished()
    # Nor before its model was sent.
    mirror.look()
    assert not RunDir.open(restore_run(uri, tmp_path / "early")).is_finished
    mirror.look(is_last=True)
    whole = restore_run(uri, tmp_path / "whole")
    assert RunDir.open(whole).state.finished_at == played.run.state.finished_at
    (Path(uri) / "checkpoints" / "step-000004" / "state" / "optimizer.safetensors").write_bytes(b"")
    before = restore_run(uri, tmp_path / "before")
    require_sound(before, 2)
    assert not RunDir.open(before).is_finished


def test_an_attempt_that_sent_nothing_counts_where_the_run_goes_on(
    tmp_path: Path, played: PlayedRun, root: str
) -> None:
    """Its log may be in the mirror: the next attempt must not have its number."""
    played.train(1, 2).mirror(root).look()
    uri = mirror_of(played, root)
    claim_mirror(RecordStore(LocalObjects()), uri, played.run.state, "second")
    with RunDir.open(restore_run(uri, tmp_path / "elsewhere")) as run:
        assert run.begin_attempt().index == 3


def test_a_mirror_without_a_sound_checkpoint_is_refused(tmp_path: Path, played: PlayedRun, root: str) -> None:
    uri, mirror = mirror_of(played, root), played.mirror(root)
    with pytest.raises(RemoteMissing):
        restore_run(uri, tmp_path / "elsewhere")
    assert find_remote_run(uri) is None
    mirror.look()
    with pytest.raises(RemoteMissing):
        restore_run(uri, tmp_path / "elsewhere")
    played.train(1, 2)
    mirror.look()
    (Path(uri) / "checkpoints" / "step-000002" / "state" / "optimizer.safetensors").write_bytes(b"")
    with pytest.raises(CorruptRecord):
        restore_run(uri, tmp_path / "elsewhere")
    assert not (tmp_path / "elsewhere" / played.run.path.name).exists()


def test_a_directory_that_is_there_is_never_replaced(tmp_path: Path, played: PlayedRun, root: str) -> None:
    played.train(1, 2).mirror(root).look()
    with pytest.raises(CheckRefused):
        restore_run(mirror_of(played, root), played.run.path.parent)
    incoming = tmp_path / "elsewhere" / "mine.incoming"
    (incoming / "rollouts").mkdir(parents=True)
    with FileLock(incoming / "lock"), pytest.raises(CheckRefused):
        restore_run(mirror_of(played, root), tmp_path / "elsewhere", name="mine")
    # What an interrupted call left of another state is replaced, or goes.
    for step in (1, 7):
        (incoming / "rollouts" / f"step-00000{step}.parquet").write_bytes(b"of another state")
    (incoming / "checkpoints" / "step-000009").mkdir(parents=True)
    path = restore_run(mirror_of(played, root), tmp_path / "elsewhere", name="mine")
    require_sound(path, 2)
    assert RunDir.open(path).rollouts_path(1).read_bytes() == b"rollouts of step 1"


def test_no_name_in_a_store_leads_out_of_the_directory(tmp_path: Path, played: PlayedRun, root: str) -> None:
    played.train(1, 2).mirror(root).look()
    manifest = Path(mirror_of(played, root)) / "checkpoints" / "step-000002" / "COMPLETE"
    content = json.loads(manifest.read_text())
    content["files"]["../../escaped"] = content["files"]["model/config.json"]
    manifest.write_text(json.dumps(content))
    with pytest.raises(CorruptRecord):
        restore_run(mirror_of(played, root), tmp_path / "elsewhere")
    assert not list(tmp_path.rglob("escaped"))


def test_clocks_play_no_part(
    tmp_path: Path, played: PlayedRun, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine that goes on has a clock that is ten years behind."""
    played.train(1, 2).mirror(root).look()
    monkeypatch.setattr("time.time", lambda: 1_500_000_000.0)
    with RunDir.open(restore_run(mirror_of(played, root), tmp_path / "elsewhere")) as run:
        run.begin_attempt()
        PlayedRun(run).train(3, 4).mirror(root).look()
    found = find_remote_run(mirror_of(played, root))
    assert found is not None
    assert (found.latest.fence, found.step) == (2, 4)
    require_sound(restore_run(mirror_of(played, root), tmp_path / "back"), 4)


# Trainers as processes of their own, before a real server of S3's interface.


def train_mirrored(path: str, root: str, last: int) -> None:
    """Go on with a run to a step, mirrored, and wait for the end of the upload."""
    with RunDir.open(Path(path)) as run:
        latest = run.latest_checkpoint()
        run.begin_attempt()
        run.truncate_after(begin := latest[0] if latest else 0)
        played = PlayedRun(run)
        mirror = played.mirror(root, make_objects())
        mirror.claim()
        mirror.thread.start()
        for step in range(begin + 1, last + 1):
            played.train(step)
            run.keep_checkpoints(2)
            mirror.wake()
            time.sleep(0.02)
            if mirror.fenced is not None:
                break
        mirror.wake(is_ending=True)
        mirror.thread.join()
        os._exit(0 if mirror.is_done else 3 if isinstance(mirror.fenced, MirrorFenced) else 1)


class Killer:
    """Ends a process at its n-th request from then on, which arrives or does not."""

    def __init__(self, num_before: int, *, arrives: bool) -> None:
        self.pid: int | None = None
        self._num_left = num_before
        self._fate = "lost-reply" if arrives else "dropped"

    def __call__(self, exchange: Exchange) -> str | None:
        self._num_left -= 1
        if self.pid is None or self._num_left >= 0:
            return None
        os.kill(self.pid, signal.SIGKILL)
        # What it had under way beside this one may arrive or not as well.
        return self._fate


@pytest.fixture
def begun(tmp_path: Path) -> Iterator[PlayedRun]:
    played = PlayedRun.create(tmp_path / "first")
    played.run.release()
    yield played
    played.run.release()


@pytest.mark.slow
def test_kills_at_random_points_lose_no_more_than_the_steps_after_the_last_checkpoint(
    begun: PlayedRun, proxy: SpoilingProxy, s3_root: str, tmp_path: Path
) -> None:
    """A spot instance: kill -9 at a random request, the disk is lost, and another machine goes on."""
    stream, steps = random.Random(7), [0]
    path, uri = begun.run.path, mirror_of(begun, s3_root)
    while len(steps) <= NUM_KILLS:
        killer = Killer(stream.randrange(10, 100), arrives=stream.random() < 0.5)
        proxy.spoil = killer
        process = fork(train_mirrored, str(path), s3_root, steps[-1] + 4)
        killer.pid = process.pid
        process.join(LIMIT_S)
        assert process.exitcode in {0, -signal.SIGKILL}
        process.close()
        proxy.spoil = lambda exchange: None
        found = find_remote_run(uri)
        assert found is not None
        if found.step is None:
            # Killed before its first checkpoint had arrived: nothing is lost but what a new run trains anew.
            assert steps == [0]
            continue
        steps.append(found.step)
        folder = tmp_path / str(len(steps))
        path = restore_run(uri, folder, name=begun.run.path.name)
        require_sound(path, found.step)
    # What was reached is never lost again, and the kills did not keep everything from arriving.
    assert steps == sorted(steps)
    assert len(set(steps)) > 2


@pytest.mark.slow
def test_an_attempt_that_slept_and_wakes_up_ends(begun: PlayedRun, s3_root: str, tmp_path: Path) -> None:
    """Incident of split brain: a machine was taken for dead, and its attempt woke up beside the new one."""
    uri = mirror_of(begun, s3_root)
    old = fork(train_mirrored, str(begun.run.path), s3_root, 10_000)
    assert old.pid is not None
    deadline = time.monotonic() + LIMIT_S
    try:
        while (found := find_remote_run(uri)) is None or found.step is None:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        os.kill(old.pid, signal.SIGSTOP)
        new = restore_run(uri, tmp_path / "new", name=begun.run.path.name)
        step = RunDir.open(new).checkpoint_steps()[-1] + 4
        other = fork(train_mirrored, str(new), s3_root, step)
        other.join(LIMIT_S)
        assert other.exitcode == 0
        os.kill(old.pid, signal.SIGCONT)
        old.join(LIMIT_S)
        assert old.exitcode == 3
    finally:
        old.kill()
        old.join()
    require_sound(restore_run(uri, tmp_path / "after"), step)
