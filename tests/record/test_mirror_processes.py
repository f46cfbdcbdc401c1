"""Uploaders as processes of their own, before a real server of S3's interface."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from strop.record.mirror.claim import read_latest
from strop.record.mirror.layout import MirrorOrder, flush_path, mirror_uri
from strop.record.mirror.restore import find_remote_run, restore_run
from strop.record.mirror.uploader import EXIT_FENCED
from strop.store.record_store import RecordStore
from tests.fixtures.mirrored import PlayedRun
from tests.fixtures.object_store import Exchange, SpoilingProxy, make_objects
from tests.record.test_mirror_restore import require_sound

NUM_KILLS = 30
LIMIT_S = 60.0


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
        with self.log_path.open("ab") as log:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "strop.record.mirror", order.to_json()],
                stdout=log,
                stderr=log,
                env=dict(os.environ),
            )

    def wait(self) -> int:
        return self.popen.wait(LIMIT_S)

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while text not in self.log_path.read_text():
            assert self.popen.poll() is None, self.log_path.read_text()
            assert time.monotonic() < deadline, self.log_path.read_text()
            time.sleep(0.02)

    def close(self) -> None:
        self.popen.kill()
        self.popen.wait()


@pytest.fixture
def played(tmp_path: Path) -> Iterator[PlayedRun]:
    yield (one := PlayedRun.create(tmp_path / "runs"))
    one.run.release()


@pytest.mark.slow
def test_thirty_kills_at_random_points_leave_thirty_states_to_go_on_from(
    played: PlayedRun, proxy: SpoilingProxy, s3_root: str, tmp_path: Path
) -> None:
    """A kill -9 at a random request, which arrives or does not, while training goes on and prunes."""
    stream = random.Random(7)
    uri = mirror_uri(s3_root, played.run.path.name)
    played.train(1, 2)
    assert played.uploader(s3_root, make_objects(), owner="process").look(is_flush=False)
    steps, num_killed, step = [], 0, 2
    while num_killed < NUM_KILLS:
        played.train(step + 1, step + 2)
        played.run.keep_checkpoints(2)
        step += 2
        num_left, fate = stream.randrange(35), stream.choice(["dropped", "lost-reply"])
        process: Process | None = None

        def spoil(exchange: Exchange) -> str | None:
            nonlocal num_left
            num_left -= 1
            if process is None or num_left >= 0:
                return None
            process.popen.kill()
            return fate if num_left == -1 else "dropped"

        proxy.spoil = spoil
        process = Process(played, s3_root)
        if num_killed % 2:  # A look that finds all sent ends by itself where nothing else would.
            flush_path(played.run.path).touch()
        try:
            code = process.popen.wait(8.0)
            num_killed += code == -signal.SIGKILL
        except subprocess.TimeoutExpired:
            process.popen.kill()  # Between two looks: a kill as good as any.
            num_killed += 1
        process.close()
        proxy.spoil = lambda exchange: None
        flush_path(played.run.path).unlink(missing_ok=True)
        found = find_remote_run(uri)
        assert found is not None
        assert found.step is not None
        steps.append(found.step)
        restored = restore_run(uri, tmp_path / "restored" / str(num_killed))
        require_sound(restored, found.step)
    # What was reached is never lost again, and the kills did not keep everything from arriving.
    assert steps == sorted(steps)
    assert len(set(steps)) > 5
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
        process.popen.send_signal(signal.SIGSTOP)
        newer = played.uploader(s3_root, make_objects(), owner="new", attempt=2)
        assert newer.look(is_flush=False)
        played.train(3, 4)
        process.popen.send_signal(signal.SIGCONT)
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
        process.wait_for("claimed")
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
            process.popen.send_signal(number)
        assert os.getpriority(os.PRIO_PROCESS, process.popen.pid) >= 10
        played.train(1, 2)
        flush_path(played.run.path).touch()
        assert process.wait() == 0
    finally:
        process.close()
    found = find_remote_run(mirror_uri(s3_root, played.run.path.name))
    assert found is not None
    assert found.step == 2
