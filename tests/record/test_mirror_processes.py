"""Uploaders as processes of their own, before a real server of S3's interface."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from strop.record.mirror.__main__ import main
from strop.record.mirror.claim import read_latest
from strop.record.mirror.layout import MirrorOrder, flush_path, mirror_uri
from strop.record.mirror.restore import find_remote_run, restore_run
from strop.record.mirror.uploader import EXIT_FENCED
from strop.store.record_store import RecordStore
from tests.fixtures.attempts import fork
from tests.fixtures.mirrored import PlayedRun
from tests.fixtures.object_store import Exchange, SpoilingProxy, make_objects
from tests.record.test_mirror_restore import require_sound

NUM_KILLS = 12
LIMIT_S = 240.0
"""The first one waits until the server that it is forked from has imported what all need."""


class Process:
    """An uploader of a played run."""

    def __init__(self, played: PlayedRun, root: str, **changes: object) -> None:
        values: dict[str, object] = {
            "run_path": str(played.run.path),
            "uri": mirror_uri(root, played.run.path.name),
            "owner": "process",
            "attempt": 1,
            "every_s": 0.01,
        }
        order = MirrorOrder(**{**values, **changes})  # type: ignore[arg-type]
        self.log_path = played.run.path.parent / f"{order.owner}.log"
        self._process = fork(upload, order.to_json(), str(self.log_path))
        assert self._process.pid is not None
        self.pid = self._process.pid

    def wait(self, limit_s: float = LIMIT_S) -> int | None:
        """Return how it ended; None: it has not."""
        self._process.join(limit_s)
        return self._process.exitcode

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not (self.log_path.exists() and text in self.log_path.read_text()):
            assert self._process.is_alive(), self.log_path.read_text()
            assert time.monotonic() < deadline, self.log_path.read_text()
            time.sleep(0.02)

    def close(self) -> None:
        self._process.kill()
        self._process.join()


def upload(order: str, log_path: str) -> None:
    """Mirror, with the output in a file."""
    descriptor = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.exit(main([order]))


class Killer:
    """Ends the next uploader at its n-th request from then on, which arrives or does not."""

    def __init__(self, num_before: int, *, arrives: bool) -> None:
        self.process: Process | None = None
        self._num_left = num_before
        self._fate = "lost-reply" if arrives else "dropped"

    def __call__(self, exchange: Exchange) -> str | None:
        self._num_left -= 1
        if self.process is None or self._num_left >= 0:
            return None
        self.process.send(signal.SIGKILL)
        # What it had under way beside this one may arrive or not as well.
        return self._fate


@pytest.fixture
def played(tmp_path: Path) -> Iterator[PlayedRun]:
    yield (one := PlayedRun.create(tmp_path / "runs"))
    one.run.release()


@pytest.mark.slow
def test_kills_at_random_points_leave_states_to_go_on_from(
    played: PlayedRun, proxy: SpoilingProxy, s3_root: str, tmp_path: Path
) -> None:
    """A kill -9 at a random request, which arrives or does not, while training goes on and prunes.

    A dozen: that each single request may be the last one is what the tests of restoring show.
    """
    stream = random.Random(7)
    uri = mirror_uri(s3_root, played.run.path.name)
    flush_path(played.run.path).parent.mkdir()
    played.train(1, 2)
    assert played.uploader(s3_root, make_objects(), owner="process").look(is_flush=False)
    steps, num_killed, step = [], 0, 2
    while num_killed < NUM_KILLS:
        played.train(step + 1, step + 2)
        played.run.keep_checkpoints(2)
        step += 2
        # While training goes on: early enough in the first look that there is so much to ask for. Or at the
        # end: an uploader that has sent all by then ends by itself.
        is_flush = num_killed % 2 == 1
        if is_flush:
            flush_path(played.run.path).touch()
        killer = Killer(stream.randrange(45 if is_flush else 12), arrives=stream.random() < 0.5)
        proxy.spoil = killer
        killer.process = process = Process(played, s3_root)
        code = process.wait()
        assert code in ({0, -signal.SIGKILL} if is_flush else {-signal.SIGKILL}), process.log_path.read_text()
        num_killed += code != 0
        process.close()
        proxy.spoil = lambda exchange: None
        flush_path(played.run.path).unlink(missing_ok=True)
        found = find_remote_run(uri)
        assert found is not None
        assert found.step is not None
        steps.append(found.step)
        restored = restore_run(uri, tmp_path / "restored" / str(len(steps)))
        require_sound(restored, found.step)
    # What was reached is never lost again, and the kills did not keep everything from arriving.
    assert steps == sorted(steps)
    assert len(set(steps)) > 2
    flush_path(played.run.path).touch()
    assert Process(played, s3_root).wait() == 0
    found = find_remote_run(uri)
    assert found is not None
    assert [name.step for name in found.records] == [step, *[name.step for name in found.records[1:]]]
    assert len(found.records) == 2


@pytest.mark.slow
def test_an_attempt_that_slept_and_wakes_up_ends(played: PlayedRun, s3_root: str) -> None:
    """Incident of split brain: a machine was taken for dead, and its attempt woke up beside the new one."""
    played.train(1, 2)
    process = Process(played, s3_root, owner="old")
    try:
        process.wait_for("_step2: ")
        process.send(signal.SIGSTOP)
        newer = played.uploader(s3_root, make_objects(), owner="new", attempt=2)
        assert newer.look(is_flush=False)
        played.train(3, 4)
        process.send(signal.SIGCONT)
        assert process.wait() == EXIT_FENCED
    finally:
        process.close()
    uri = mirror_uri(s3_root, played.run.path.name)
    found = read_latest(RecordStore(make_objects()), uri)
    assert found is not None
    assert (found[0].owner, found[0].step) == ("new", 2)
    assert "belongs to attempt 2, fence 2" in process.log_path.read_text()
    assert newer.look(is_flush=False)
    require_sound(restore_run(uri, played.run.path.parent / "restored"), 4)


@pytest.mark.slow
def test_signals_for_the_trainer_do_not_end_the_uploader(played: PlayedRun, s3_root: str) -> None:
    """A scheduler may tell every process of a job to stop: then there is most to be sent."""
    process = Process(played, s3_root)
    try:
        process.wait_for("may write to")
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
            process.send(number)
        played.train(1, 2)
        flush_path(played.run.path).parent.mkdir(exist_ok=True)
        flush_path(played.run.path).touch()
        assert process.wait() == 0
    finally:
        process.close()
    found = find_remote_run(mirror_uri(s3_root, played.run.path.name))
    assert found is not None
    assert found.step == 2
