"""Which processes belong to a dead run, and which only look like it: by real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from strop.errors import StoreError
from strop.hardware import clear_leftovers, find_inherited, find_leases, identify, take_lease
from strop.hardware.leases import (
    FOLDER_VARIABLE,
    LEASE_VARIABLE,
    HeldLease,
    LeaseState,
    lock_path_of,
    state_of,
)
from strop.hardware.leftovers import find_processes, find_strays
from strop.io.lock import FileLock
from strop.io.variables import set_variables

# Takes a lease, makes its processes carry it, does something, says its id, and waits to be killed.
_HOLDER = """
import os, subprocess, sys, time
from strop.hardware import take_lease
held = take_lease("lost", "1")
os.environ.update(held.variables)
{work}
print(held.lease.lease_id, flush=True)
time.sleep(600)
"""


@pytest.fixture
def leases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of leases, of this test alone and for its processes too."""
    (tmp_path / "runtime").mkdir(mode=0o700)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "runtime"))
    # Whoever was killed may be slow to go where other work keeps the machine busy.
    monkeypatch.setattr("strop.hardware.leftovers._END_LIMIT_S", 60.0)
    return tmp_path / "runtime" / "leases"


@contextmanager
def holder(work: str = "", **variables: str) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """Start a run that holds a lease; give it, and the words that it says."""
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLDER.format(work=work)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **variables},
    )
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline().split()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@contextmanager
def asleep(**variables: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"], env={**os.environ, **variables}) as process:
        # While it becomes its program, it has no environment of its own.
        while (
            identify(process.pid) is None or b"sleep" not in Path(f"/proc/{process.pid}/cmdline").read_bytes()
        ):
            time.sleep(0.01)
        try:
            yield process
        finally:
            process.kill()


def wait_for_processes(lease_id: str) -> list[int]:
    """Return those that carry an id. While one becomes its program, it has no environment for a moment."""
    deadline = time.monotonic() + 60
    while not (pids := find_processes(lease_id)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return pids


def change(folder: Path, **values: Any) -> None:
    """Rewrite the only lease of a folder."""
    (path,) = folder.glob("*.json")
    content = json.loads(path.read_text())
    for name, value in values.items():
        (content["holder"] if name in content["holder"] else content)[name] = value
    path.write_text(json.dumps(content))


def test_a_process_without_its_environment_is_known_by_its_note(leases: Path) -> None:
    note = (
        "child = subprocess.Popen(['sleep', '600'], env={}, start_new_session=True)\n"
        "held.record_process(child.pid)\n"
    )
    with holder(note) as (process, (lease_id,)):
        (lease,) = find_leases()
        (child,) = lease.processes
        assert find_processes(lease_id) == []
        process.kill()
        process.wait()
        assert child.is_alive()
        (cleared,) = clear_leftovers()
        assert cleared.ended == (child.pid,)
        assert str(cleared) == (
            f"run lost, attempt 1, had ended without clearing up; ended process {child.pid}"
        )
        assert not child.is_alive()


def test_a_noted_number_that_was_used_again_is_spared(leases: Path) -> None:
    with asleep() as stranger, holder() as (process, _):
        who = identify(stranger.pid)
        assert who is not None
        process.kill()
        process.wait()
        fields = {"pid": who.pid, "boot_id": who.boot_id, "pid_namespace": who.pid_namespace}
        change(leases, processes=[{**fields, "start_ticks": who.start_ticks - 1}])
        (cleared,) = clear_leftovers()
        assert cleared.ended == ()
        assert stranger.poll() is None


def test_a_clock_that_jumps_ends_nothing(leases: Path) -> None:
    with holder() as (process, _):
        for taken_at in (0.0, time.time() + 1e9):
            change(leases, taken_at=taken_at)
            assert clear_leftovers() == []
        (lease,) = find_leases()
        assert state_of(lease) is LeaseState.ALIVE
        assert process.poll() is None


def test_after_a_reboot_nothing_of_a_lease_is_left_to_end(leases: Path) -> None:
    """The same numbers may be anybody's now."""
    with holder("subprocess.Popen(['sleep', '600'])") as (process, (lease_id,)):
        process.kill()
        process.wait()
        (survivor,) = wait_for_processes(lease_id)
        change(leases, boot_id="the boot before")
        (cleared,) = clear_leftovers()
        assert (cleared.ended, cleared.surviving) == ((), ())
        assert find_leases() == []
        # Only in this test: no process outlives a reboot.
        assert find_strays()[survivor] == lease_id
        os.kill(survivor, 9)


def test_a_lease_of_another_machine_on_a_shared_disk_is_left_alone(leases: Path) -> None:
    held = take_lease("run", "1", gpus=["GPU-a"])
    change(leases, boot_id="of another machine", host="another machine")
    (lease,) = find_leases()
    assert state_of(lease) is LeaseState.ELSEWHERE
    assert clear_leftovers() == []
    assert find_leases() == [lease]
    # It says nothing of this machine's GPU of that name.
    take_lease("here", "1", gpus=["GPU-a"]).release()
    held.release()


def test_a_lease_of_another_container_holds_as_long_as_its_lock(leases: Path) -> None:
    """Its numbers mean other processes here: process 7 of one container is not process 7 of the next."""
    with holder() as (process, _):
        change(leases, pid_namespace="pid:[another]")
        (lease,) = find_leases()
        assert not lease.is_alive
        assert state_of(lease) is LeaseState.ALIVE
        assert clear_leftovers() == []
        process.kill()
        process.wait()
        assert state_of(lease) is LeaseState.ELSEWHERE
        assert clear_leftovers() == []
        lock_path_of(lease, leases).unlink()
        assert state_of(lease) is LeaseState.ELSEWHERE


def test_a_lease_whose_processes_have_all_gone_is_removed(leases: Path) -> None:
    with holder() as (process, (lease_id,)):
        process.kill()
        process.wait()
        (cleared,) = clear_leftovers()
        assert (cleared.ended, cleared.removed, cleared.surviving) == ((), (), ())
        assert cleared.lease.lease_id == lease_id
    assert [path.name for path in leases.iterdir()] == ["lock"]


def test_a_process_whose_lease_is_not_there_is_told_and_never_ended(leases: Path) -> None:
    with asleep(**{LEASE_VARIABLE: "f00d"}) as stray:
        assert find_strays()[stray.pid] == "f00d"
        assert clear_leftovers() == []
        assert stray.poll() is None


def test_a_living_run_in_the_shell_of_a_dead_one_is_not_touched(leases: Path) -> None:
    with (
        holder() as (dead, (dead_id,)),
        # As from a terminal that the dead run had opened.
        holder("child = subprocess.Popen(['sleep', '600'])", **{LEASE_VARIABLE: dead_id}) as (living, words),
    ):
        (child,) = wait_for_processes(words[0])
        dead.kill()
        dead.wait()
        assert find_processes(dead_id) == [living.pid]
        (cleared,) = clear_leftovers()
        assert (cleared.lease.lease_id, cleared.ended) == (dead_id, ())
        assert living.poll() is None
        assert find_processes(words[0]) == [child]
        os.kill(child, 9)


# Started by a dead run, clears up: it and its parents are not what it clears up.
_CLEARING = "from strop.hardware import clear_leftovers; print([one.ended for one in clear_leftovers()])"


def test_who_clears_up_after_the_run_that_started_it_lives_on(leases: Path) -> None:
    with holder() as (dead, (dead_id,)):
        dead.kill()
        dead.wait()
        done = subprocess.run(
            [sys.executable, "-c", _CLEARING],
            env={**os.environ, LEASE_VARIABLE: dead_id},
            check=True,
            capture_output=True,
            text=True,
        )
        assert done.stdout == "[()]\n"


def test_a_process_knows_the_run_that_it_was_started_under(
    leases: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_inherited() is None
    with take_lease("run", "1") as held:
        with set_variables(held.variables):
            assert find_inherited() == held.lease
            assert os.environ[LEASE_VARIABLE] == held.lease.lease_id
        assert LEASE_VARIABLE not in os.environ
        monkeypatch.setenv(LEASE_VARIABLE, "outer")
        with set_variables(held.variables):
            pass
        assert os.environ[LEASE_VARIABLE] == "outer"
        assert find_inherited() is None


def test_what_a_run_comes_to_hold_is_noted(leases: Path) -> None:
    with take_lease("run", "1") as held:
        held.record_process(os.getpid())
        held.record_process(1 << 23)
        (lease,) = find_leases()
        assert lease == held.lease
        assert lease.processes == (identify(),)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to make another user's folder")
def test_a_folder_of_another_user_is_neither_read_nor_cleared(leases: Path) -> None:
    held = take_lease("run", "1")
    os.chown(leases, 65534, 65534)
    for act in (clear_leftovers, lambda: take_lease("other", "1")):
        with pytest.raises(StoreError, match="where leases are kept, can be written by others"):
            act()
    os.chown(leases, os.getuid(), os.getgid())
    held.release()


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to start another user's process")
def test_two_users_have_leases_of_their_own(leases: Path, tmp_path: Path) -> None:
    """What one user's run left is no other user's business, whatever its processes are called."""
    with subprocess.Popen(["sleep", "600"], user=65534, env={LEASE_VARIABLE: "theirs"}) as theirs:
        with holder() as (mine, _):
            mine.kill()
            mine.wait()
            (cleared,) = clear_leftovers()
        assert cleared.ended == ()
        assert theirs.poll() is None
        theirs.kill()


def test_a_directory_is_noted_before_it_is_made(leases: Path, tmp_path: Path) -> None:
    """A kill in between leaves a note of nothing, and no directory that nobody knows."""
    with take_lease("run", "1") as held:
        with pytest.raises(StoreError, match="could not be written"):
            held.make_directory(tmp_path / "absent")
        (lease,) = find_leases()
        assert len(lease.directories) == 1
        assert isinstance(held, HeldLease)
        assert FileLock(lock_path_of(lease, leases)).try_acquire() is False
    assert find_leases() == []
