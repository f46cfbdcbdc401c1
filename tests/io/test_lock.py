"""One holder at a time, known by name, gone with its process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from strop.errors import StoreError
from strop.io.lock import FileLock

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
