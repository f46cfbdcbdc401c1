"""Leases: who holds what, and that exactly a dead run's leftovers are ended, by real processes."""

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

import pytest

from strop.errors import CheckRefused, StoreError
from strop.hardware import clear_leftovers, find_leases, identify, take_lease
from strop.hardware.identity import identify_self
from strop.hardware.leases import FOLDER_VARIABLE, LEASE_VARIABLE, MARKER_NAME, leases_dir
from strop.hardware.leftovers import find_processes
from strop.io.leftovers import is_process_alive
from tests.fixtures.jobs import wait_for

# Takes a lease, starts a process in a session of its own and one that makes others, and waits to be killed.
_RUN = """
import os, subprocess, sys, time
from pathlib import Path
from strop.hardware import take_lease
held = take_lease("lost", "1", gpus=[sys.argv[3]], folder=Path(sys.argv[1]))
os.environ.update(held.variables)
held.make_directory(Path(sys.argv[2]))
subprocess.Popen(["sleep", "600"], start_new_session=True)
subprocess.Popen(["sh", "-c", "while true; do sleep 0.02; done"], start_new_session=True)
print(held.lease.lease_id, flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever was killed may be slow to go where other work keeps the machine busy."""
    monkeypatch.setattr("strop.hardware.leftovers._END_LIMIT_S", 60.0)


@contextmanager
def running(folder: Path, directory: Path, gpu: str = "GPU-a") -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a run that holds a lease; give it and the id."""
    directory.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", _RUN, str(folder), str(directory), gpu], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    lease_id = process.stdout.readline().strip()
    try:
        yield process, lease_id
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        for pid in find_processes(lease_id):
            # One of them starts others that end by themselves.
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def asleep(**variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that does nothing, in a session of its own."""
    environment = {"PATH": os.environ["PATH"], **variables}
    process = subprocess.Popen(["sleep", "600"], env=environment, start_new_session=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_dead_run_leaves_nothing_and_a_living_one_everything(tmp_path: Path) -> None:
    folder = tmp_path / "leases"
    with (
        # Looks like the dead run's processes, and carries no lease.
        asleep() as stranger,
        running(folder, tmp_path / "first") as (lost, lost_id),
        running(folder, tmp_path / "second", "GPU-b") as (living, living_id),
    ):
        assert clear_leftovers(folder) == []
        lost.kill()
        lost.wait()
        # While they become other programs, they have no environment for a moment.
        wait_for(lambda: len(find_processes(lost_id)) >= 2)
        (cleared,) = clear_leftovers(folder)
        assert cleared.lease.lease_id == lost_id
        assert len(cleared.ended) >= 2
        assert cleared.surviving == ()
        assert find_processes(lost_id) == []
        assert list((tmp_path / "first").iterdir()) == []
        assert [lease.lease_id for lease in find_leases(folder)] == [living_id]
        assert living.poll() is None
        assert len(list((tmp_path / "second").iterdir())) == 1
        assert clear_leftovers(folder) == []
        assert stranger.poll() is None


def test_what_a_living_run_holds_is_refused_by_its_name(tmp_path: Path) -> None:
    with take_lease("first", "2", gpus=["GPU-a", "MIG-b"], ports=[7001], folder=tmp_path / "leases") as held:
        for wanted, shown in (
            ({"gpus": ["GPU-c", "MIG-b"]}, "MIG-b of .* is held by run first, attempt 2, process"),
            ({"gpus": [], "ports": [7001, 7002]}, "7001 of .* is held by run first"),
        ):
            with pytest.raises(CheckRefused, match=shown):
                take_lease("second", "1", folder=tmp_path / "leases", **wanted)
        take_lease("second", "1", gpus=["GPU-c"], folder=tmp_path / "leases").release()
        path = held.make_directory(tmp_path)
        assert (path / MARKER_NAME).read_text() == held.lease.lease_id
    assert not path.exists()
    assert find_leases(tmp_path / "leases") == []


def test_a_dead_lease_holds_nothing(tmp_path: Path) -> None:
    with running(tmp_path / "leases", tmp_path / "dir") as (process, _):
        with pytest.raises(CheckRefused, match=r"GPU-a of .* is held by run lost"):
            take_lease("next", "1", gpus=["GPU-a"], folder=tmp_path / "leases")
        process.kill()
        process.wait()
        take_lease("next", "1", gpus=["GPU-a"], folder=tmp_path / "leases").release()


def test_a_number_that_was_used_again_and_a_reboot_end_a_lease(tmp_path: Path) -> None:
    held = take_lease("run", "1", folder=tmp_path / "leases")
    (path,) = (tmp_path / "leases").glob("*.json")
    values = json.loads(path.read_text())
    for change in ({"start_ticks": values["holder"]["start_ticks"] - 1}, {"boot_id": "another boot"}):
        path.write_text(json.dumps(values | {"holder": values["holder"] | change}))
        (lease,) = find_leases(tmp_path / "leases")
        assert not lease.is_alive
        assert [cleared.ended for cleared in clear_leftovers(tmp_path / "leases")] == [()]
        assert not path.exists()
    held.release()


def test_a_directory_that_is_somebody_elses_stays(tmp_path: Path) -> None:
    """Named by a lease, but with the marker of another, with none, or by way of a link."""
    foreign, bare, target = (tmp_path / name for name in ("foreign", "bare", "target"))
    for path in (foreign, bare, target):
        path.mkdir()
    (foreign / MARKER_NAME).write_text("another lease")
    held = take_lease("run", "1", folder=tmp_path / "leases")
    (target / MARKER_NAME).write_text(held.lease.lease_id)
    (tmp_path / "link").symlink_to(target)
    (path,) = (tmp_path / "leases").glob("*.json")
    names = [str(tmp_path / name) for name in ("foreign", "bare", "link", "absent")]
    held.lease = replace(held.lease, directories=tuple(names))
    held.release()
    assert [path.exists() for path in (foreign, bare, target)] == [True] * 3
    assert not path.exists()


def test_a_file_of_another_form_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "leases"
    take_lease("run", "1", folder=folder).release()
    for number, text in enumerate(("", "{}", "[]", '{"holder": 3}')):
        (folder / f"{number}.json").write_text(text)
    assert find_leases(folder) == []
    assert clear_leftovers(folder) == []
    assert len(list(folder.glob("*.json"))) == 4


def test_a_folder_that_others_can_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "leases").mkdir()
    (tmp_path / "leases").chmod(0o777)
    with pytest.raises(StoreError, match=r"leases, where leases are kept, can be written by others.*Next: "):
        take_lease("run", "1", folder=tmp_path / "leases")


def test_where_leases_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    # As in a role of a job, whose temporary folder and runtime folder are its own.
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert leases_dir() == Path(f"/tmp/strop-{os.getuid()}/leases")
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "own"))
    assert leases_dir() == tmp_path / "own" / "leases"
    assert clear_leftovers(tmp_path / "none") == []


def test_a_process_is_itself_until_it_ends() -> None:
    assert identify_self() == identify(os.getpid())
    with asleep(**{LEASE_VARIABLE: "x"}) as process:
        who = identify(process.pid)
        assert who is not None
        assert who.is_alive()
        # While it becomes another program, it has no environment for a moment.
        deadline = time.monotonic() + 60
        while not (pids := find_processes("x")) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert pids == [process.pid]
        process.kill()
        # Until it is waited for, its number is there: a zombie, which has ended.
        deadline = time.monotonic() + 60
        while who.is_alive() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not who.is_alive()
        assert is_process_alive(process.pid)
    assert identify(process.pid) is None


def test_a_lease_of_what_could_not_be_ended_stays_for_whoever_clears_up_next(tmp_path: Path) -> None:
    """Incident: a process that hung in the driver lost its lease with its agent, and became a stranger."""
    folder = tmp_path / "leases"
    with take_lease("run", "1", folder=folder) as held:
        path = held.make_directory(tmp_path)
        held.is_kept = True
    assert [lease.lease_id for lease in find_leases(folder)] == [held.lease.lease_id]
    assert path.is_dir()
