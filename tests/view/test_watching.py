"""A run that trains elsewhere, as its record tells it: steps, evaluations and alarms, a resume, the end."""

from __future__ import annotations

import io
import os
import socket
from pathlib import Path

import pytest

from strop.errors import StoreError
from strop.evaluate import result_name, write_result
from strop.record import Event, EventKind, RunDir
from strop.record.files import DirectoryRecord, StoreRecord
from strop.store.local_objects import LocalObjects
from strop.view import PlainProgress, TerminalObserver
from strop.view.live import LiveRun
from strop.view.watching import RunEnd, Watcher, find_end, watch
from tests.view.synthetic_run import make_result

EVALUATED = "step 5: held-out accuracy 50.0% greedy (95% interval 43.1% to 56.9%, 200 examples)"
SPEC = 'name = "demo"\n[train]\nsteps = 6\n'


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path, "demo", SPEC, "digest", {})


class Watched:
    """A run that is watched, and what was told of it since the last look."""

    def __init__(self, path: Path) -> None:
        self.stream = io.StringIO()
        self.run = LiveRun(key="demo", record=DirectoryRecord(path))
        self.observer = TerminalObserver(PlainProgress(self.stream))
        self.watcher = Watcher(self.run, self.observer)

    def look(self) -> list[str]:
        self.watcher.look()
        return self.told()

    def told(self) -> list[str]:
        lines = self.stream.getvalue().splitlines()
        self.stream.seek(0)
        self.stream.truncate()
        return lines


def add_steps(run_dir: RunDir, first: int, last: int, seconds: float = 2.0) -> None:
    for step in range(first, last + 1):
        run_dir.metrics.append(step, {"reward_mean": step / 10, "seconds_step": seconds})


def heads(lines: list[str]) -> list[str]:
    return [line.split("  ")[0] for line in lines]


def test_new_steps_and_alarms_are_told_once(run_dir: RunDir) -> None:
    with run_dir:
        watched = Watched(run_dir.path)
        assert watched.look() == ["demo: 6 steps"]
        add_steps(run_dir, 1, 2)
        run_dir.events.append(Event(kind=EventKind.TRIPWIRE, step=2, cause="drift", detail="is high \x1b[2J"))
        run_dir.events.append(Event(kind=EventKind.CHECKPOINT, step=2, cause="written"))
        assert heads(watched.look()) == ["step 1/6", "step 2/6", "alarm: step 2: drift: is high ␛[2J"]
        assert watched.look() == []
        add_steps(run_dir, 3, 3)
        (line,) = watched.look()
        # Three steps are left, at 2 s each.
        assert line.endswith("left 6.0 s")


def test_who_comes_late_sees_where_the_run_is_and_the_last_events(run_dir: RunDir) -> None:
    with run_dir:
        add_steps(run_dir, 1, 4)
        for number in range(8):
            run_dir.events.append(Event(kind=EventKind.NOTICE, step=1, cause=f"n{number}"))
        watched = Watched(run_dir.path)
        told = watched.look()
        assert told[0] == "demo: continues after step 4 of 6"
        assert told[1] == f"3 earlier events are in {run_dir.path}/events.jsonl"
        assert told[2:] == [f"step 1: n{number}" for number in range(3, 8)]
        add_steps(run_dir, 5, 5)
        # The earlier steps count in the estimate: one step of 2 s is left.
        assert watched.look()[0].endswith("left 2.0 s")


def test_a_resume_begins_anew_where_the_run_goes_on(run_dir: RunDir) -> None:
    with run_dir:
        watched = Watched(run_dir.path)
        watched.look()
        add_steps(run_dir, 1, 5)
        run_dir.events.append(Event(kind=EventKind.NOTICE, step=1, cause="early"))
        run_dir.events.append(Event(kind=EventKind.NOTICE, step=5, cause="late"))
        watched.look()
        result = make_result(5, num_solved=100)
        path = run_dir.path / "eval" / result_name(result)
        write_result(result, path)
        assert heads(watched.look()) == [EVALUATED]
        run_dir.truncate_after(3)
        run_dir.events.append(Event(kind=EventKind.RESUME, step=3, cause="checkpoint", detail="step 3"))
        assert watched.look() == ["demo: continues after step 3 of 6", "step 3: checkpoint: step 3"]
        add_steps(run_dir, 4, 4)
        write_result(result, path)
        assert heads(watched.look()) == ["step 4/6", EVALUATED]
        # More than before between two looks: it begins anew at the last step.
        run_dir.truncate_after(3)
        add_steps(run_dir, 4, 5, seconds=4.0)
        assert watched.look() == ["demo: continues after step 5 of 6"]


def test_how_a_run_ends_is_read_from_its_record(run_dir: RunDir) -> None:
    run = LiveRun(key="demo", record=DirectoryRecord(run_dir.path))
    with run_dir:
        attempt = run_dir.begin_attempt()
        assert find_end(run) is None
        run_dir.end_attempt(attempt, cause="Interrupted", exit_code=75, step=1)
        # It is about to end, and still holds the lock.
        assert find_end(run) is None
    lock = run_dir.path / "lock"
    dead = lock.read_text().replace(str(os.getpid()), "999999999")
    lock.write_text(dead)
    assert find_end(run) == RunEnd(cause="Interrupted", exit_code=75)
    with RunDir.open(run_dir.path) as again:
        again.begin_attempt()
    lock.write_text(dead)
    assert find_end(run) == RunEnd(cause="no process works in it any more", exit_code=1)
    # Of another machine's processes nothing is known here.
    lock.write_text(dead.replace(socket.gethostname(), "elsewhere"))
    assert find_end(run) is None
    with RunDir.open(run_dir.path) as again:
        again.mark_finished()
    assert find_end(run) == RunEnd(cause="done", exit_code=0)


def test_a_mirror_is_watched_until_its_run_is_finished(run_dir: RunDir, tmp_path: Path) -> None:
    place = f"{tmp_path}/mirror/demo"

    def upload() -> None:
        for name in ("run.json", "spec.toml", "metrics.jsonl"):
            LocalObjects().write(f"{place}/{name}", (run_dir.path / name).read_bytes())

    with run_dir:
        add_steps(run_dir, 1, 2)
        upload()
        run = LiveRun(key="demo", record=StoreRecord(LocalObjects(), place))
        stream = io.StringIO()
        observer = TerminalObserver(PlainProgress(stream))
        pauses = iter(range(2, 5))

        def pause() -> None:
            step = next(pauses) + 1
            if step <= 4:
                add_steps(run_dir, step, step)
            else:
                run_dir.mark_finished()
            upload()

        end = watch(Watcher(run, observer), observer, lambda: find_end(run), pause=pause)
    assert end == RunEnd(cause="done", exit_code=0)
    assert heads(stream.getvalue().splitlines()) == [
        "demo: continues after step 2 of 6",
        "step 3/6",
        "step 4/6",
        "ended: done",
    ]


def test_a_place_that_does_not_answer_is_asked_again(run_dir: RunDir) -> None:
    with run_dir:
        watched = Watched(run_dir.path)
        answers = iter([StoreError("the place is silent"), StoreError("the place is silent"), None, "end"])

        def find() -> RunEnd | None:
            answer = next(answers)
            if isinstance(answer, StoreError):
                raise answer
            return None if answer is None else RunEnd(cause="done", exit_code=0)

        watch(watched.watcher, watched.observer, find, pause=lambda: None)
    assert watched.told() == ["notice: the place is silent", "demo: 6 steps", "ended: done"]
