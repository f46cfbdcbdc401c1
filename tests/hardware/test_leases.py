"""Leases: who holds what, which processes belong to a dead run, and which only look like it; all real."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from strop.errors import CheckRefused, StoreError
from strop.hardware import clear_leftovers, take_lease
from strop.hardware.leases import (
    FOLDER_VARIABLE,
    LEASE_VARIABLE,
    find_holder,
    find_processes,
    is_inherited,
    leases_dir,
)
from strop.hardware.leftovers import own_dir, remove_dead
from tests.fixtures.jobs import wait_for

# Takes a lease, makes its processes carry it, does something, says its id, and waits to be killed.
_HOLDER = """
import os, subprocess, sys, time
from strop.hardware import take_lease
with take_lease(["GPU-a"] if {has_gpu} else []) as lease:
    os.environ.update(lease.variables)
    {work}
    print(lease.lease_id, flush=True)
    time.sleep(600)
"""
_SLEEPER = "subprocess.Popen(['sleep', '600'], start_new_session=True)"
_PROLIFIC = f"{_SLEEPER}; subprocess.Popen(['sh', '-c', 'while true; do sleep 0.02; done'])"


@pytest.fixture(autouse=True)
def leases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of leases, of this test alone and for its processes too."""
    (tmp_path / "runtime").mkdir(mode=0o700)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "runtime"))
    # Whoever was killed may be slow to go where other work keeps the machine busy.
    monkeypatch.setattr("strop.hardware.leases._END_LIMIT_S", 60.0)
    return tmp_path / "runtime" / "leases"


def pids_of(lease_id: str) -> list[int]:
    return sorted(process.pid for process in find_processes({lease_id}))


@contextmanager
def holder(
    work: str = "", *, has_gpu: bool = False, outer: str | None = None
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a run that holds a lease; give it, and the id."""
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLDER.format(work=work or "pass", has_gpu=has_gpu)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **({LEASE_VARIABLE: outer} if outer else {})},
    )
    assert process.stdout is not None
    lease_id = process.stdout.readline().strip()
    try:
        yield process, lease_id
    finally:
        kill(process)
        process.stdout.close()
        for pid in pids_of(lease_id):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def kill(process: subprocess.Popen[Any]) -> None:
    process.kill()
    process.wait()


@contextmanager
def asleep(**variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that does nothing, in a session of its own."""
    environment = {**os.environ, **variables}
    with subprocess.Popen(["sleep", "600"], env=environment, start_new_session=True) as process:
        # While it becomes its program, it has no environment of its own.
        wait_for(lambda: b"sleep" in Path(f"/proc/{process.pid}/cmdline").read_bytes())
        try:
            yield process
        finally:
            process.kill()


def test_what_a_living_run_holds_is_refused_by_the_name_of_its_process(leases: Path) -> None:
    with take_lease(["GPU-a", "MIG-GPU-b/7/0"]):
        assert find_holder("GPU-c") is None
        with pytest.raises(CheckRefused, match=f"MIG-GPU-b/7/0 is held by process {os.getpid()} "):
            take_lease(["GPU-c", "MIG-GPU-b/7/0"]).__enter__()
        # What a refused request had taken is free again.
        with take_lease(["GPU-c"]):
            assert find_holder("GPU-c") is not None
    assert find_holder("GPU-a") is None
    assert [path.name for path in leases.glob("*.run")] == []


def test_a_kill_frees_what_a_run_held(leases: Path) -> None:
    with holder(has_gpu=True) as (process, _):
        assert f"process {process.pid} " in str(find_holder("GPU-a"))
        kill(process)
        with take_lease(["GPU-a"]):
            pass
        assert len(list(leases.glob("*.run"))) == 1
        assert clear_leftovers() == ()
    assert list(leases.glob("*.run")) == []


def test_a_clock_that_is_set_and_a_file_from_before_a_reboot_end_nothing(leases: Path) -> None:
    with holder() as (process, lease_id):
        for seconds in (0.0, 4e9):
            os.utime(leases / f"{lease_id}.run", (seconds, seconds))
            assert clear_leftovers() == ()
        assert process.poll() is None
        # As a reboot leaves it: a file that nobody has locked, with the number of a process of this boot.
        (leases / "f00d.run").write_text(f'{{"pid": {process.pid}, "host": "here", "since": 0}}')
        assert clear_leftovers() == ()
        assert process.poll() is None


def test_a_run_knows_whether_it_belongs_to_one_that_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_inherited()
    with holder() as (process, lease_id):
        monkeypatch.setenv(LEASE_VARIABLE, lease_id)
        assert is_inherited()
        kill(process)
        assert not is_inherited()


def test_a_folder_that_others_can_write_is_refused(leases: Path) -> None:
    leases.mkdir()
    leases.chmod(0o777)
    for act in (clear_leftovers, take_lease().__enter__):
        with pytest.raises(StoreError, match=str(leases)):
            act()


def test_where_leases_are(tmp_path: Path, leases: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert leases_dir() == leases
    assert clear_leftovers() == ()
    monkeypatch.delenv(FOLDER_VARIABLE)
    # As in a role of a job, whose temporary folder and runtime folder are its own.
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert leases_dir() == Path(f"/tmp/strop-{os.getuid()}/leases")


def test_prc_6_a_dead_run_leaves_nothing_and_a_living_one_everything() -> None:
    with (
        # Looks like the dead run's processes, and carries no lease.
        asleep() as stranger,
        holder(_PROLIFIC, has_gpu=True) as (lost, lost_id),
        holder(_PROLIFIC) as (living, living_id),
    ):
        wait_for(lambda: len(pids_of(lost_id)) >= 2)
        assert clear_leftovers() == ()
        kill(lost)
        assert len(clear_leftovers()) >= 2
        assert pids_of(lost_id) == []
        assert len(pids_of(living_id)) >= 2
        assert living.poll() is None
        assert clear_leftovers() == ()
        assert stranger.poll() is None


def test_a_process_whose_lease_is_not_there_is_never_ended() -> None:
    with asleep(**{LEASE_VARIABLE: "f00d"}) as stray:
        assert clear_leftovers() == ()
        assert stray.poll() is None


def test_what_a_run_leaves_at_its_end_is_ended_by_whoever_comes_next() -> None:
    left = []
    with take_lease() as lease:
        left.append(subprocess.Popen(["sleep", "600"], env={**os.environ, **lease.variables}))
        wait_for(lambda: pids_of(lease.lease_id) == [left[0].pid])
        assert clear_leftovers() == ()
    assert clear_leftovers() == (left[0].pid,)
    assert left[0].wait() == -signal.SIGKILL


def test_a_living_run_in_the_shell_of_a_dead_one_is_not_touched() -> None:
    with (
        holder() as (dead, dead_id),
        # As from a terminal that the dead run had opened.
        holder("subprocess.Popen(['sleep', '600'])", outer=dead_id) as (living, own_id),
    ):
        wait_for(lambda: len(pids_of(own_id)) == 1)
        kill(dead)
        assert clear_leftovers() == ()
        assert living.poll() is None
        assert len(pids_of(own_id)) == 1


# Started by a dead run, clears up: it and its parents are not what it clears up.
_CLEARING = "from strop.hardware import clear_leftovers; print(clear_leftovers())"


def test_who_clears_up_after_the_run_that_started_it_lives_on() -> None:
    with holder() as (dead, dead_id):
        kill(dead)
        environment = {**os.environ, LEASE_VARIABLE: dead_id}
        done = subprocess.run(
            [sys.executable, "-c", _CLEARING], env=environment, check=True, capture_output=True
        )
        assert done.stdout == b"()\n"


def test_a_directory_goes_with_its_owner_however_that_ends(tmp_path: Path) -> None:
    with own_dir(tmp_path / "strop-mine") as mine:
        (mine / "file").touch()
        (tmp_path / "strop-lost").mkdir()
        (tmp_path / "strop-lost.lock").touch()
        (tmp_path / "strop-others").mkdir()
        assert remove_dead(tmp_path) == [tmp_path / "strop-lost"]
        assert sorted(path.name for path in tmp_path.glob("strop-*")) == [
            *("strop-mine", "strop-mine.lock", "strop-others"),
        ]
    assert sorted(path.name for path in tmp_path.glob("strop-*")) == ["strop-others"]
