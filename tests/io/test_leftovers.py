"""Unfinished files of dead writers go; everything else stays."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from strop.io.leftovers import (
    FOREIGN_AGE_S,
    is_process_alive,
    partial_path_of,
    process_started_at,
    remove_leftovers,
)


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def renamed_for(path: Path, *, pid: int, host_tag: str | None = None) -> Path:
    """Give a leftover's name another process id, and another machine's tag if wanted."""
    start, _, end = path.name.rpartition(f"-{os.getpid()}-")
    tagged = end if host_tag is None else host_tag + end[6:]
    return path.with_name(f"{start}-{pid}-{tagged}")


def test_only_leftovers_of_dead_processes_go(tmp_path: Path) -> None:
    ours = partial_path_of(tmp_path / "x")
    ours.mkdir()
    dead_directory = renamed_for(partial_path_of(tmp_path / "x"), pid=dead_pid())
    (dead_directory / "deep").mkdir(parents=True)
    dead_file = renamed_for(partial_path_of(tmp_path / "y"), pid=dead_pid())
    dead_file.touch()
    others = [tmp_path / name for name in ("x", "notes.partial-mine", ".partial-12-zz", "a.partial-1-abc")]
    for path in others:
        path.touch()

    assert sorted(remove_leftovers(tmp_path)) == sorted([dead_directory, dead_file])
    assert sorted(tmp_path.iterdir()) == sorted([ours, *others])


def test_a_link_is_removed_and_not_followed(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "data").touch()
    renamed_for(partial_path_of(tmp_path / "latest"), pid=dead_pid()).symlink_to(kept)
    assert len(remove_leftovers(tmp_path)) == 1
    assert (kept / "data").exists()


def test_a_writer_on_another_machine_is_given_a_day(tmp_path: Path) -> None:
    foreign = renamed_for(partial_path_of(tmp_path / "x"), pid=dead_pid(), host_tag="ffffff")
    foreign.touch()
    assert remove_leftovers(tmp_path) == []
    assert remove_leftovers(tmp_path, now=time.time() + FOREIGN_AGE_S + 60) == [foreign]


def test_a_reused_process_id_does_not_protect_a_leftover(tmp_path: Path) -> None:
    """Containers give every life of a job the same process id."""
    leftover = partial_path_of(tmp_path / "x")
    leftover.mkdir()
    started_at = process_started_at(os.getpid())
    if started_at is None:
        pytest.skip("needs /proc to know when a process started")
    os.utime(leftover, (started_at - 100, started_at - 100))
    assert remove_leftovers(tmp_path) == [leftover]


def test_the_old_half_of_a_torn_replacement_comes_back(tmp_path: Path) -> None:
    name = renamed_for(partial_path_of(tmp_path / "x"), pid=dead_pid()).name
    (tmp_path / f"{name}-old").mkdir()
    assert remove_leftovers(tmp_path) == []
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_no_directory_has_no_leftovers(tmp_path: Path) -> None:
    assert remove_leftovers(tmp_path / "absent") == []


def test_processes_are_known_alive_or_dead() -> None:
    assert is_process_alive(os.getpid())
    gone = dead_pid()
    assert not is_process_alive(gone)
    assert process_started_at(gone) is None


@pytest.mark.parametrize("text", ["", "7 (name) S 1\n", "btime\n"])
def test_where_proc_tells_nothing_a_start_is_unknown(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    for path in (tmp_path / "stat", tmp_path / str(os.getpid()) / "stat"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert process_started_at(os.getpid()) is None
