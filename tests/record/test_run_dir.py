"""One process per run directory; a run is found again, cut back and continued."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from strop.errors import CheckRefused, ConfigError, CorruptRecord, StoreError
from strop.io import AtomicDirectory
from strop.record import Event, EventKind, RunDir, find_resumable, list_runs, point_latest
from strop.record.fence import ATTEMPT_VARIABLE, NUMBER_VARIABLE, raise_fence, read_fence, require_unfenced
from tests.fixtures.tiny_disk import tiny_disk

# 2026-11-21 04:05:06 UTC
NOW = 1_795_233_906.0


def create(root: Path, name: str = "demo", digest: str = "d1", now: float = NOW) -> RunDir:
    return RunDir.create(root, name, 'name = "demo"\n', digest, {"model": "abc"}, now=now)


def write_checkpoint(run: RunDir, step: int) -> Path:
    with AtomicDirectory(run.checkpoint_path(step)) as partial:
        (partial / "state.bin").write_bytes(b"state")
    return run.checkpoint_path(step)


def test_a_run_is_born_complete_and_locked(tmp_path: Path) -> None:
    with create(tmp_path) as run:
        assert run.path == tmp_path / "demo-20261121-040506"
        assert run.is_locked_here
        assert run.spec_path.read_text() == 'name = "demo"\n'
        assert "numpy==" in (run.path / "env.txt").read_text()
        assert json.loads((run.path / "run.json").read_bytes())["facts"] == {"model": "abc"}
        assert [path.name for path in tmp_path.iterdir()] == [run.path.name]


def test_runs_of_the_same_second_get_numbers(tmp_path: Path) -> None:
    with create(tmp_path), create(tmp_path) as second, create(tmp_path) as third:
        assert second.path.name == "demo-20261121-040506-2"
        assert third.path.name == "demo-20261121-040506-3"


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "../up", "a b", "x" * 81, "a\n", "a.partial-1"])
def test_a_name_that_is_no_directory_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be a directory name"):
        create(tmp_path, name=name)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_no_run(tmp_path: Path) -> None:
    with tiny_disk(tmp_path / "disk") as disk:
        with pytest.raises(StoreError, match="the disk is full"):
            RunDir.create(disk, "demo", "x" * (2 << 20), "d1", {})
        assert list(disk.iterdir()) == []


def test_changes_need_the_lock(tmp_path: Path) -> None:
    create(tmp_path).release()
    (run,) = list_runs(tmp_path)
    with RunDir.open(run.path) as other:
        attempt = other.begin_attempt()
        write_checkpoint(other, 5)
        write_checkpoint(other, 10)
    for change in (
        run.begin_attempt,
        run.mark_finished,
        lambda: run.truncate_after(0),
        lambda: run.end_attempt(attempt, cause="done", exit_code=0, step=1),
        lambda: run.keep_checkpoints(1),
    ):
        with pytest.raises(CheckRefused, match="opened for reading only"):
            change()
    assert run.checkpoint_steps() == [5, 10]
    assert "ended_at" not in json.loads((attempt.path / "attempt.json").read_bytes())


def test_an_attempt_has_its_directory_and_its_end(tmp_path: Path) -> None:
    with create(tmp_path) as run:
        first = run.begin_attempt()
        run.end_attempt(first, cause="sigterm", exit_code=75, step=7)
    with RunDir.open(run.path) as again:
        second = again.begin_attempt({"resumed_at_step": 7})
        assert (first.index, second.index) == (1, 2)
        assert second.log_path == run.path / "attempts" / "2" / "train.log"
        assert (run.path / "latest").readlink() == Path("attempts/2")
    noted = json.loads((run.path / "latest" / ".." / "1" / "attempt.json").read_bytes())
    assert (noted["cause"], noted["exit_code"], noted["step"]) == ("sigterm", 75, 7)
    killed = json.loads((run.path / "latest" / "attempt.json").read_bytes())
    assert killed["facts"] == {"resumed_at_step": 7}
    assert "ended_at" not in killed


def test_the_newest_unfinished_run_of_the_same_spec_is_resumed(tmp_path: Path) -> None:
    for digest, age_s in (("d1", 300), ("d1", 200), ("d2", 100)):
        create(tmp_path, digest=digest, now=NOW - age_s).release()
    create(tmp_path, name="demo-2", now=NOW).release()
    found = find_resumable(tmp_path, "demo", "d1")
    assert found is not None
    assert found.state.created_at == NOW - 200
    assert found.is_locked_here
    # The newest is taken now, so a second process gets the older one, a third none.
    second = find_resumable(tmp_path, "demo", "d1")
    assert second is not None
    assert second.state.created_at == NOW - 300
    assert find_resumable(tmp_path, "demo", "d1") is None
    found.mark_finished()
    found.release()
    second.release()
    remaining = find_resumable(tmp_path, "demo", "d1")
    assert remaining is not None
    assert remaining.path == second.path
    remaining.release()
    assert find_resumable(tmp_path, "demo", "d3") is None
    assert find_resumable(tmp_path / "absent", "demo", "d1") is None


def test_whoever_takes_a_run_over_knows_what_was_done_meanwhile(tmp_path: Path) -> None:
    with create(tmp_path) as run:
        seen = RunDir.open(run.path)
        run.begin_attempt()
    with seen:
        assert seen.begin_attempt().index == 2


def test_a_run_that_was_finished_between_a_look_and_its_lock_is_not_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(tmp_path).release()
    acquire = RunDir.acquire

    def be_a_moment_late(self: RunDir) -> None:
        monkeypatch.undo()
        with RunDir.open(self.path) as faster:
            faster.mark_finished()
        acquire(self)

    monkeypatch.setattr(RunDir, "acquire", be_a_moment_late)
    assert find_resumable(tmp_path, "demo", "d1") is None
    # And nobody holds it.
    (run,) = list_runs(tmp_path)
    run.acquire()
    run.release()


def test_resuming_cuts_back_everything_after_the_checkpoint(tmp_path: Path) -> None:
    with create(tmp_path) as run:
        for step in (1, 2, 3):
            run.metrics.append(step, {"loss": 1.0})
            run.events.append(Event(kind=EventKind.NOTICE, step=step, cause=f"c{step}"))
            run.rollouts_path(step).touch()
            run.eval_path("t", step).touch()
            write_checkpoint(run, step)
        (run.path / "rollouts" / "notes.txt").touch()
        run.sync()
        run.truncate_after(2)
        assert [line["step"] for line in run.metrics.read()] == [1, 2]
        assert [event.step for event in run.events.read()] == [1, 2]
        left = sorted(path.name for path in (run.path / "rollouts").iterdir())
        assert left == ["notes.txt", "step-000001.parquet", "step-000002.parquet"]
        assert not run.eval_path("t", 3).exists()
        assert run.checkpoint_steps() == [1, 2, 3]


def test_old_checkpoints_go_and_the_newest_always_stays(tmp_path: Path) -> None:
    with create(tmp_path) as run:
        assert run.latest_checkpoint() is None
        for step in (5, 10, 15):
            write_checkpoint(run, step)
        assert run.keep_checkpoints(2) == [5]
        assert run.keep_checkpoints(0) == [10]
        assert run.latest_checkpoint() == (15, run.checkpoint_path(15))
        assert [path.name for path in run.checkpoints_path.iterdir()] == ["step-000015"]


def test_taking_a_run_over_clears_what_its_dead_owner_left(tmp_path: Path) -> None:
    run = create(tmp_path)
    run.release()
    kill_while_writing = (
        "import os, signal, sys; from pathlib import Path; from strop.io import AtomicDirectory\n"
        "with AtomicDirectory(Path(sys.argv[1])): os.kill(os.getpid(), signal.SIGKILL)"
    )
    places = [run.checkpoint_path(5), run.rollouts_path(5), run.eval_path("t", 5), run.path / "report.html"]
    for place in places:
        subprocess.run([sys.executable, "-c", kill_while_writing, str(place)], check=False)
    assert [len(list(place.parent.glob(f"{place.name}.partial-*"))) for place in places] == [1, 1, 1, 1]
    with RunDir.open(run.path):
        assert list(run.path.rglob("*.partial-*")) == []


WORK = """
import sys, time
from pathlib import Path
from strop.record import RunDir
run = RunDir.open(Path(sys.argv[1]))
run.acquire()
print("working", flush=True)
time.sleep(600)
"""


def test_a_second_process_in_the_same_run_is_refused_by_name(tmp_path: Path) -> None:
    create(tmp_path).release()
    (run,) = list_runs(tmp_path)
    worker = subprocess.Popen([sys.executable, "-c", WORK, str(run.path)], stdout=subprocess.PIPE, text=True)
    try:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "working\n"
        with pytest.raises(CheckRefused, match=f"in use by process {worker.pid} on "):
            run.acquire()
        assert find_resumable(tmp_path, "demo", "d1") is None
        RunDir.open(run.path)  # Reading needs no lock.
    finally:
        worker.send_signal(signal.SIGKILL)
        worker.communicate()
    run.acquire()
    run.release()


def test_what_is_no_run_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is not a run directory"):
        RunDir.open(tmp_path)
    assert list_runs(tmp_path) == []


@pytest.mark.parametrize("content", ["", "{", "[]", '{"name": "x"}', '{"surprise": 1}'])
def test_a_damaged_state_is_refused_by_name(tmp_path: Path, content: str) -> None:
    run = create(tmp_path)
    run.release()
    (run.path / "run.json").write_text(content)
    with pytest.raises(CorruptRecord, match=r"run\.json is damaged"):
        RunDir.open(run.path)


def test_the_environment_text_holds_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    with create(tmp_path) as run:
        written = [path.read_bytes() for path in run.path.rglob("*") if path.is_file()]
    assert not any(b"hf_very_secret" in data for data in written)
    assert os.environ["HF_TOKEN"] == "hf_very_secret"


def test_latest_leads_on_whatever_a_killed_process_left(tmp_path: Path) -> None:
    """Incident: killed between two steps, an agent left its link; in a container the next has its number."""
    (tmp_path / f"latest.{os.getpid()}").symlink_to("attempts/a-0")
    for attempt in ("a-0", "a-1"):
        point_latest(tmp_path, attempt)
        assert (tmp_path / "latest").readlink() == Path("attempts") / attempt
    assert sorted(os.listdir(tmp_path)) == ["latest", f"latest.{os.getpid()}"]


def test_the_highest_attempt_that_has_begun_may_write(tmp_path: Path) -> None:
    raise_fence(tmp_path, 0, "17-0")
    raise_fence(tmp_path, 2, "17-2")
    # Every node of an attempt says so.
    raise_fence(tmp_path, 2, "17-2")
    assert read_fence(tmp_path) == (2, "17-2")
    require_unfenced(tmp_path, 2)
    with pytest.raises(CheckRefused) as caught:
        raise_fence(tmp_path, 1, "17-1")
    assert "attempt 1 of" in str(caught.value)
    assert "was overtaken by attempt 2 (17-2)" in str(caught.value)
    assert read_fence(tmp_path) == (2, "17-2")


def test_a_writer_that_was_stopped_between_its_look_and_its_write_lowers_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that hangs, is given up, and wakes: just that is what the fence is for."""

    def sleep_through_the_next_attempt(run_path: Path, number: int | None = None) -> None:
        monkeypatch.undo()
        raise_fence(tmp_path, 1, "17-1")

    monkeypatch.setattr("strop.record.fence.require_unfenced", sleep_through_the_next_attempt)
    with pytest.raises(CheckRefused):
        raise_fence(tmp_path, 0, "17-0")
    assert read_fence(tmp_path) == (1, "17-1")
    with pytest.raises(CheckRefused):
        require_unfenced(tmp_path, 0)


@pytest.mark.parametrize(("own", "is_refused"), [("0", True), ("1", False), ("", False), ("x", False)])
def test_a_process_knows_its_number_from_its_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, is_refused: bool
) -> None:
    monkeypatch.setenv(NUMBER_VARIABLE, own)
    raise_fence(tmp_path, 1, "17-1")
    if is_refused:
        with pytest.raises(CheckRefused):
            require_unfenced(tmp_path)
    else:
        require_unfenced(tmp_path)


def test_other_files_are_no_fence(tmp_path: Path) -> None:
    raise_fence(tmp_path, 0, "17-0")
    for name in ("7.txt", "fence-x-17-9", ".fence-8-17-8", "18-0"):
        (tmp_path / "attempts" / name).touch()
    assert read_fence(tmp_path) == (0, "17-0")


def test_a_disk_that_does_not_answer_lets_nobody_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> list[str]:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr("os.listdir", fail)
    with pytest.raises(StoreError) as caught:
        require_unfenced(tmp_path, 0)
    assert "cannot be listed (Stale file handle)" in str(caught.value)


# A run that is made of the folder that a launcher prepared.


def prepared(folder: Path) -> Path:
    path = folder / "run-1"
    (path / "attempts" / "17-0" / "0").mkdir(parents=True)
    (path / "job").mkdir()
    (path / "job" / "plan.json").write_text("{}")
    (path / "attempts" / "17-0" / "0" / "train.log").write_text("first words\n")
    return path


def adopt(path: Path) -> RunDir:
    return RunDir.adopt(path, "run", 'name = "run"\n', "digest", {"model": "m"})


def test_a_prepared_folder_becomes_a_run_and_keeps_what_is_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ATTEMPT_VARIABLE, "17-0")
    path = prepared(tmp_path)
    run = adopt(path)
    assert run.is_locked_here
    attempt = run.begin_attempt()
    # The launcher has named the folder of this life.
    assert (attempt.index, attempt.path) == (1, path / "attempts" / "17-0")
    assert (path / "latest").resolve() == attempt.path
    assert (path / "attempts" / "17-0" / "0" / "train.log").read_text() == "first words\n"
    assert (path / "job" / "plan.json").exists()
    run.release()
    assert RunDir.open(path).state.name == "run"


def test_a_run_that_was_made_meanwhile_is_taken_as_it_is(tmp_path: Path) -> None:
    path = prepared(tmp_path)
    first = adopt(path)
    with pytest.raises(CheckRefused) as caught:
        adopt(path)
    assert "is in use by process" in str(caught.value)
    first.mark_finished()
    first.release()
    again = adopt(path)
    assert again.is_finished
    again.release()


def test_a_folder_that_cannot_be_filled_gives_its_lock_back(tmp_path: Path) -> None:
    path = prepared(tmp_path)
    (path / "rollouts").write_text("a file")
    with pytest.raises(StoreError):
        adopt(path)
    # And is no run yet: whoever comes next fills it.
    assert not (path / "run.json").exists()
    (path / "rollouts").unlink()
    run = adopt(path)
    assert (run.path / "checkpoints").is_dir()
    run.release()


def test_an_attempt_of_a_job_waits_for_the_one_that_it_overtook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is cut off and ends; a run that no launcher began is refused at once."""
    path = prepared(tmp_path)
    first, second = adopt(path), RunDir.open(path)
    with pytest.raises(CheckRefused, match="is in use by process"):
        second.acquire()
    monkeypatch.setenv(ATTEMPT_VARIABLE, "17-1")
    ending = threading.Timer(0.3, first.release)
    ending.start()
    second.acquire()
    ending.join()
    second.release()


def test_an_attempt_that_was_overtaken_writes_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NUMBER_VARIABLE, "0")
    monkeypatch.setenv(ATTEMPT_VARIABLE, "17-0")
    path = prepared(tmp_path)
    raise_fence(path, 0, "17-0")
    run = adopt(path)
    attempt = run.begin_attempt()
    run.metrics.append(1, {"loss": 1.0})
    # Its node was lost, and its job lives again elsewhere.
    raise_fence(path, 1, "17-1")
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    for change in (
        run.mark_finished,
        run.begin_attempt,
        lambda: run.end_attempt(attempt, cause="done", exit_code=0, step=1),
        lambda: run.truncate_after(0),
        lambda: run.keep_checkpoints(1),
    ):
        with pytest.raises(CheckRefused) as caught:
            change()
        assert "was overtaken by attempt 1 (17-1)" in str(caught.value)
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before
    run.release()
