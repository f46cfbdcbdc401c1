"""Servers found by name, locks that die with their holder, and unfinished files of dead writers."""

from __future__ import annotations

import os
import pickle
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from strop.errors import StoreError
from strop.io.endpoints import (
    ENDPOINTS_VARIABLE,
    Endpoint,
    find_endpoint,
    hand_over,
    list_endpoints,
    withdraw,
    write_secret,
)
from strop.io.leftovers import (
    FOREIGN_AGE_S,
    partial_path_of,
    process_started_at,
    remove_leftovers,
)
from strop.io.lock import FileLock

JUDGE = Endpoint(url="http://10.0.0.1:1/v1", key="key-of-the-judge")
SANDBOXES = Endpoint(url="http://10.0.0.1:2", key="key-of-the-sandboxes")


@pytest.fixture(autouse=True)
def no_endpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    # Set first: what a test sets itself is taken back too.
    monkeypatch.setenv(ENDPOINTS_VARIABLE, "")
    monkeypatch.delenv(ENDPOINTS_VARIABLE)


def test_without_a_hand_over_there_is_none() -> None:
    assert list_endpoints() == {}
    assert find_endpoint("judge") is None


def test_servers_are_found_by_name_here_and_in_processes_that_are_started(tmp_path: Path) -> None:
    folder = tmp_path / "roles"
    hand_over(folder, {"judge org/a": JUDGE})
    hand_over(folder, {"sandboxes": SANDBOXES})
    assert find_endpoint("judge org/a") == JUDGE
    assert find_endpoint("judge org/b") is None
    program = (
        "from strop.io.endpoints import find_endpoint as f; print(f('sandboxes').url, f('judge org/a').key)"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert output.split() == [SANDBOXES.url, JUDGE.key]


def test_another_machine_is_handed_what_one_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hand_over(tmp_path / "run", {"judge": JUDGE, "sandboxes": SANDBOXES})
    sent = pickle.loads(pickle.dumps(list_endpoints()))
    monkeypatch.setenv(ENDPOINTS_VARIABLE, "/nowhere")
    assert list_endpoints() == {}
    folder = tmp_path / "worker" / "keys"
    for _ in range(2):
        hand_over(folder, sent)
    assert (find_endpoint("judge"), find_endpoint("sandboxes")) == (JUDGE, SANDBOXES)
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


def test_a_server_that_ends_leaves_the_others(tmp_path: Path) -> None:
    hand_over(tmp_path, {"judge": JUDGE, "sandboxes": SANDBOXES})
    withdraw(tmp_path, ["judge"])
    assert (find_endpoint("judge"), find_endpoint("sandboxes")) == (None, SANDBOXES)
    for _ in range(2):
        withdraw(tmp_path, ["sandboxes"])
    assert list(tmp_path.iterdir()) == []
    assert ENDPOINTS_VARIABLE not in os.environ


def test_what_another_run_handed_over_stays(tmp_path: Path) -> None:
    hand_over(tmp_path / "other", {"judge": JUDGE})
    withdraw(tmp_path / "ours", ["judge"])
    assert find_endpoint("judge") == JUDGE


def test_a_key_stands_in_files_alone(tmp_path: Path) -> None:
    hand_over(tmp_path, {"judge": JUDGE})
    shown = [
        repr(JUDGE),
        str(list_endpoints()),
        *os.environ.values(),
        *(path.name for path in tmp_path.iterdir()),
    ]
    assert not any(JUDGE.key in text for text in shown)


def test_a_secret_never_replaces_a_file(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("open")
    with pytest.raises(FileExistsError):
        write_secret(tmp_path / "key", "secret")
    assert (tmp_path / "key").read_text() == "open"


@pytest.mark.parametrize("content", ["", "{", "[]", "{}"])
def test_a_file_that_is_no_endpoint_is_none(tmp_path: Path, content: str) -> None:
    hand_over(tmp_path, {"judge": JUDGE})
    next(tmp_path.iterdir()).write_text(content)
    assert find_endpoint("judge") is None


HOLD = """
import sys, time
from pathlib import Path
from strop.io.lock import FileLock
lock = FileLock(Path(sys.argv[1]))
lock.acquire()
print("held", flush=True)
time.sleep(600)
"""


def hold_elsewhere(path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_holder_in_the_same_process_is_refused(tmp_path: Path) -> None:
    first, second = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    assert first.try_acquire()
    assert first.try_acquire()  # Asking again changes nothing.
    assert not second.try_acquire()
    first.release()
    assert second.try_acquire()
    second.release()


def test_the_lock_names_its_holder_and_dies_with_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    process = hold_elsewhere(path)
    try:
        lock = FileLock(path, wait_limit_s=0.1)
        assert not lock.try_acquire()
        holder = lock.holder()
        assert holder is not None
        assert holder.pid == process.pid
        with pytest.raises(StoreError, match=f"still locked by process {process.pid} on .* after 0.1 s"):
            lock.acquire()
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    with lock:
        assert lock.is_held
        holder = lock.holder()
        assert holder is not None
        assert holder.pid == os.getpid()
    assert not lock.is_held


def test_a_waiter_gets_the_lock_when_it_is_free(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    process = hold_elsewhere(path)
    process.send_signal(signal.SIGKILL)
    with FileLock(path, wait_limit_s=120):
        pass
    process.communicate()


def test_a_lock_that_cannot_be_opened_is_a_store_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="could not be written"):
        FileLock(tmp_path / "absent" / "lock").try_acquire()
    assert FileLock(tmp_path / "absent" / "lock").holder() is None


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


@pytest.mark.parametrize("text", ["", "7 (name) S 1\n", "btime\n"])
def test_where_proc_tells_nothing_a_start_is_unknown(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    for path in (tmp_path / "stat", tmp_path / str(os.getpid()) / "stat"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert process_started_at(os.getpid()) is None
