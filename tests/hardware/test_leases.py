"""Leases: who holds what, which processes belong to a dead run, and which only look like it; all real."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from strop.errors import CheckRefused, StoreError
from strop.hardware import clear_leftovers, find_leases, identify, take_lease
from strop.hardware.identity import identify_self
from strop.hardware.leases import (
    FOLDER_VARIABLE,
    LEASE_VARIABLE,
    MARKER_NAME,
    LeaseState,
    leases_dir,
    lock_path_of,
    state_of,
)
from strop.hardware.leftovers import find_processes, find_strays
from strop.io.lock import FileLock
from tests.fixtures.jobs import wait_for

# Takes a lease, makes its processes carry it, does something, says its id, and waits to be killed.
_HOLDER = """
import os, subprocess, sys, time
from pathlib import Path
from strop.hardware import take_lease
held = take_lease("lost", "1", gpus=["GPU-a"] if {has_gpu} else [])
os.environ.update(held.variables)
{work}
print(held.lease.lease_id, flush=True)
time.sleep(600)
"""
# A process in a session of its own, and one that makes others.
_PROLIFIC = """
held.make_directory(Path({path!r}))
subprocess.Popen(["sleep", "600"], start_new_session=True)
subprocess.Popen(["sh", "-c", "while true; do sleep 0.02; done"], start_new_session=True)
"""


@pytest.fixture(autouse=True)
def leases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of leases, of this test alone and for its processes too."""
    (tmp_path / "runtime").mkdir(mode=0o700)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "runtime"))
    # Whoever was killed may be slow to go where other work keeps the machine busy.
    monkeypatch.setattr("strop.hardware.leftovers._END_LIMIT_S", 60.0)
    return tmp_path / "runtime" / "leases"


@contextmanager
def holder(
    work: str = "", *, has_gpu: bool = False, outer: str | None = None
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a run that holds a lease; give it, and the id."""
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLDER.format(work=work, has_gpu=has_gpu)],
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
        for pid in find_processes(lease_id):
            # One of them starts others that end by themselves.
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


def wait_for_processes(lease_id: str, number: int = 1) -> list[int]:
    """Return those that carry an id. While one becomes its program, it has no environment for a moment."""
    wait_for(lambda: len(find_processes(lease_id)) >= number)
    return find_processes(lease_id)


def change(folder: Path, **values: Any) -> None:
    """Rewrite the only lease of a folder."""
    (path,) = folder.glob("*.json")
    content = json.loads(path.read_text())
    for name, value in values.items():
        (content["holder"] if name in content["holder"] else content)[name] = value
    path.write_text(json.dumps(content))


# What leases hold.


def test_what_a_living_run_holds_is_refused_by_its_name(tmp_path: Path) -> None:
    with take_lease("first", "2", gpus=["GPU-a", "MIG-b"], ports=[7001]) as held:
        for gpus, ports, shown in (
            (["GPU-c", "MIG-b"], [], "MIG-b of .* is held by run first, attempt 2, process"),
            ([], [7001, 7002], "7001 of .* is held by run first"),
        ):
            with pytest.raises(CheckRefused, match=shown):
                take_lease("second", "1", gpus=gpus, ports=ports)
        take_lease("second", "1", gpus=["GPU-c"]).release()
        path = held.make_directory(tmp_path)
        assert (path / MARKER_NAME).read_text() == held.lease.lease_id
    assert not path.exists()
    assert find_leases() == []


def test_a_dead_lease_holds_nothing_and_is_removed(leases: Path) -> None:
    with holder(has_gpu=True) as (process, lease_id):
        with pytest.raises(CheckRefused, match=r"GPU-a of .* is held by run lost"):
            take_lease("next", "1", gpus=["GPU-a"])
        kill(process)
        take_lease("next", "1", gpus=["GPU-a"]).release()
        (cleared,) = clear_leftovers()
        assert (cleared.ended, cleared.removed, cleared.surviving) == ((), (), ())
        assert cleared.lease.lease_id == lease_id
    assert [path.name for path in leases.iterdir()] == ["lock"]


def test_a_number_that_was_used_again_and_a_reboot_end_a_lease(leases: Path) -> None:
    held = take_lease("run", "1")
    for changes in ({"start_ticks": held.lease.holder.start_ticks - 1}, {"boot_id": "another boot"}):
        change(leases, **changes)
        (lease,) = find_leases()
        assert not lease.is_alive
    assert [cleared.ended for cleared in clear_leftovers()] == [()]
    assert find_leases() == []
    held.release()


def test_a_clock_that_jumps_ends_nothing(leases: Path) -> None:
    with holder() as (process, _):
        for taken_at in (0.0, time.time() + 1e9):
            change(leases, taken_at=taken_at)
            assert clear_leftovers() == []
        (lease,) = find_leases()
        assert state_of(lease) is LeaseState.ALIVE
        assert process.poll() is None


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
        kill(process)
        assert state_of(lease) is LeaseState.ELSEWHERE
        assert clear_leftovers() == []
        lock_path_of(lease, leases).unlink()
        assert state_of(lease) is LeaseState.ELSEWHERE


def test_a_file_of_another_form_is_left_alone(leases: Path) -> None:
    take_lease("run", "1").release()
    for number, text in enumerate(("", "{}", "[]", '{"holder": 3}')):
        (leases / f"{number}.json").write_text(text)
    assert find_leases() == []
    assert clear_leftovers() == []
    assert len(list(leases.glob("*.json"))) == 4


def test_a_folder_that_others_can_write_is_refused(leases: Path) -> None:
    leases.mkdir()
    leases.chmod(0o777)
    with pytest.raises(StoreError, match=str(leases)):
        take_lease("run", "1")


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to make another user's folder")
def test_a_folder_of_another_user_is_neither_read_nor_cleared(leases: Path) -> None:
    held = take_lease("run", "1")
    os.chown(leases, 65534, 65534)
    for act in (clear_leftovers, lambda: take_lease("other", "1")):
        with pytest.raises(StoreError, match=str(leases)):
            act()
    os.chown(leases, os.getuid(), os.getgid())
    held.release()


def test_where_leases_are(tmp_path: Path, leases: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert leases_dir() == leases
    assert clear_leftovers(tmp_path / "none") == []
    monkeypatch.delenv(FOLDER_VARIABLE)
    # As in a role of a job, whose temporary folder and runtime folder are its own.
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert leases_dir() == Path(f"/tmp/strop-{os.getuid()}/leases")


def test_a_lease_of_what_could_not_be_ended_stays_for_whoever_clears_up_next(tmp_path: Path) -> None:
    """Incident: a process that hung in the driver lost its lease with its agent, and became a stranger."""
    with take_lease("run", "1") as held:
        path = held.make_directory(tmp_path)
        held.is_kept = True
    assert [lease.lease_id for lease in find_leases()] == [held.lease.lease_id]
    assert path.is_dir()


def test_a_directory_that_is_somebody_elses_stays(tmp_path: Path, leases: Path) -> None:
    """Named by a lease, but with the marker of another, with none, or by way of a link."""
    foreign, bare, target = (tmp_path / name for name in ("foreign", "bare", "target"))
    for path in (foreign, bare, target):
        path.mkdir()
    (foreign / MARKER_NAME).write_text("another lease")
    held = take_lease("run", "1")
    (target / MARKER_NAME).write_text(held.lease.lease_id)
    (tmp_path / "link").symlink_to(target)
    names = [str(tmp_path / name) for name in ("foreign", "bare", "link", "absent")]
    held.lease = replace(held.lease, directories=tuple(names))
    held.release()
    assert [path.exists() for path in (foreign, bare, target)] == [True] * 3
    assert find_leases() == []


def test_a_directory_is_noted_before_it_is_made(leases: Path, tmp_path: Path) -> None:
    """A kill in between leaves a note of nothing, and no directory that nobody knows."""
    with take_lease("run", "1") as held:
        with pytest.raises(StoreError, match="could not be written"):
            held.make_directory(tmp_path / "absent")
        held.record_process(os.getpid())
        # No process has a number above 2**22.
        held.record_process(1 << 23)
        (lease,) = find_leases()
        assert len(lease.directories) == 1
        assert lease.processes == (identify(),)
        assert FileLock(lock_path_of(lease, leases)).try_acquire() is False
    assert find_leases() == []


# Which processes are a dead run's.


def test_a_process_is_itself_until_it_ends() -> None:
    assert identify_self() == identify(os.getpid())
    with asleep() as process:
        who = identify(process.pid)
        assert who is not None
        assert who.is_alive()
        process.kill()
        # Until it is waited for, its number is there: a zombie, which has ended.
        wait_for(lambda: not who.is_alive())
        assert psutil.pid_exists(process.pid)
    assert identify(process.pid) is None


def test_prc_6_a_dead_run_leaves_nothing_and_a_living_one_everything(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    with (
        # Looks like the dead run's processes, and carries no lease.
        asleep() as stranger,
        holder(_PROLIFIC.format(path=str(first)), has_gpu=True) as (lost, lost_id),
        holder(_PROLIFIC.format(path=str(second))) as (living, living_id),
    ):
        assert clear_leftovers() == []
        kill(lost)
        wait_for_processes(lost_id, 2)
        (cleared,) = clear_leftovers()
        assert cleared.lease.lease_id == lost_id
        assert len(cleared.ended) >= 2
        assert cleared.surviving == ()
        assert find_processes(lost_id) == []
        assert list(first.iterdir()) == []
        assert [lease.lease_id for lease in find_leases()] == [living_id]
        assert living.poll() is None
        assert len(list(second.iterdir())) == 1
        assert clear_leftovers() == []
        assert stranger.poll() is None


def test_a_process_without_its_environment_is_known_by_its_note() -> None:
    note = (
        "child = subprocess.Popen(['sleep', '600'], env={}, start_new_session=True)\n"
        "held.record_process(child.pid)\n"
    )
    with holder(note) as (process, lease_id):
        (lease,) = find_leases()
        (child,) = lease.processes
        assert find_processes(lease_id) == []
        kill(process)
        assert child.is_alive()
        (cleared,) = clear_leftovers()
        assert cleared.ended == (child.pid,)
        assert str(cleared).startswith("run lost, attempt 1, ")
        assert str(child.pid) in str(cleared)
        assert not child.is_alive()


def test_a_noted_number_that_was_used_again_is_spared(leases: Path) -> None:
    with asleep() as stranger, holder() as (process, _):
        who = identify(stranger.pid)
        assert who is not None
        kill(process)
        fields = {"pid": who.pid, "boot_id": who.boot_id, "pid_namespace": who.pid_namespace}
        change(leases, processes=[{**fields, "start_ticks": who.start_ticks - 1}])
        (cleared,) = clear_leftovers()
        assert cleared.ended == ()
        assert stranger.poll() is None


def test_after_a_reboot_nothing_of_a_lease_is_left_to_end(leases: Path) -> None:
    """The same numbers may be anybody's now."""
    with holder("subprocess.Popen(['sleep', '600'])") as (process, lease_id):
        kill(process)
        (survivor,) = wait_for_processes(lease_id)
        change(leases, boot_id="the boot before")
        (cleared,) = clear_leftovers()
        assert (cleared.ended, cleared.surviving) == ((), ())
        assert find_leases() == []
        # Only in this test: no process outlives a reboot.
        assert find_strays()[survivor] == lease_id


def test_a_process_whose_lease_is_not_there_is_told_and_never_ended() -> None:
    with asleep(**{LEASE_VARIABLE: "f00d"}) as stray:
        assert find_strays()[stray.pid] == "f00d"
        assert clear_leftovers() == []
        assert stray.poll() is None


def test_a_living_run_in_the_shell_of_a_dead_one_is_not_touched() -> None:
    with (
        holder() as (dead, dead_id),
        # As from a terminal that the dead run had opened.
        holder("child = subprocess.Popen(['sleep', '600'])", outer=dead_id) as (living, own_id),
    ):
        (child,) = wait_for_processes(own_id)
        kill(dead)
        assert find_processes(dead_id) == [living.pid]
        (cleared,) = clear_leftovers()
        assert (cleared.lease.lease_id, cleared.ended) == (dead_id, ())
        assert living.poll() is None
        assert find_processes(own_id) == [child]


# Started by a dead run, clears up: it and its parents are not what it clears up.
_CLEARING = "from strop.hardware import clear_leftovers; print([one.ended for one in clear_leftovers()])"


def test_who_clears_up_after_the_run_that_started_it_lives_on() -> None:
    with holder() as (dead, dead_id):
        kill(dead)
        environment = {**os.environ, LEASE_VARIABLE: dead_id}
        done = subprocess.run(
            [sys.executable, "-c", _CLEARING], env=environment, check=True, capture_output=True
        )
        assert done.stdout == b"[()]\n"


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to start another user's process")
def test_two_users_have_leases_of_their_own() -> None:
    """What one user's run left is no other user's business, whatever its processes are called."""
    with subprocess.Popen(["sleep", "600"], user=65534, env={LEASE_VARIABLE: "theirs"}) as theirs:
        with holder() as (mine, _):
            kill(mine)
            (cleared,) = clear_leftovers()
        assert cleared.ended == ()
        assert theirs.poll() is None
        theirs.kill()
