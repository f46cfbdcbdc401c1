"""One living attempt: the later one may write, and the earlier one is told so."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from strop.errors import CheckRefused, StoreError
from strop.io.leftovers import partial_path_of
from strop.record import RunDir
from strop.record.fence import ATTEMPT_VARIABLE, NUMBER_VARIABLE, raise_fence, read_fence, require_unfenced


def test_without_a_launcher_there_is_no_fence(tmp_path: Path) -> None:
    assert read_fence(tmp_path) is None
    require_unfenced(tmp_path)
    require_unfenced(tmp_path, 3)


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
    for path in (tmp_path / "attempts").rglob("*.json"):
        (path.parent / "7.txt").write_text("")
        (path.parent / "x.json").write_text("{}")
        (path.parent / ".8.json.partial-1").write_text("")
        # Of an attempt that was killed while it set its mark: it has not begun.
        partial_path_of(path.parent / "fence-9.json").write_text("{}")
    assert read_fence(tmp_path) == (0, "17-0")


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "attempts").write_text("a file")
    with pytest.raises(StoreError) as caught:
        raise_fence(tmp_path, 0, "17-0")
    assert "could not be written" in str(caught.value)


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
        lambda: run.move_to(path.with_name("elsewhere")),
    ):
        with pytest.raises(CheckRefused) as caught:
            change()
        assert "was overtaken by attempt 1 (17-1)" in str(caught.value)
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before
    run.release()
