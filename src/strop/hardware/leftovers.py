"""Private directories of processes: sockets, logs, weights in memory, temporary files of an attempt.

Beside each is a lock file that its owner holds; if the lock is free, both may be removed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from strop.errors import StoreError
from strop.hardware.leases import USER_FOLDER
from strop.io.atomic import explain_write_failure
from strop.io.lock import FileLock

PREFIX = "ray-"
"""Prefix of directories of Ray nodes, whose paths must be short."""
MEMORY_PREFIX = "strop-"
"""Prefix of other directories, in shared memory or below TMPDIR."""
SHARED_MEMORY = Path("/dev/shm")
_LOCK = ".lock"


@contextmanager
def own_dir(path: Path) -> Iterator[Path]:
    """Make a directory, hold its lock, and remove both; first remove directories of dead owners beside it.

    Raises: StoreError if it cannot be made.
    """
    remove_dead(path.parent)
    lock = FileLock(path.with_name(path.name + _LOCK))
    try:
        lock.acquire()
        path.mkdir(mode=0o700)
    except OSError as error:
        raise explain_write_failure(error, path) from error
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        lock.path.unlink(missing_ok=True)
        lock.release()


def remove_dead(parent: Path) -> list[Path]:
    """Remove and return this user's directories whose owner is gone; Ray makes some again without a lock."""
    removed = []
    found = [path for prefix in (PREFIX, MEMORY_PREFIX) for path in parent.glob(f"{prefix}*{_LOCK}")]
    found += parent.glob(PREFIX + 8 * "[0-9a-f]")
    for path in sorted({one.with_name(one.name.removesuffix(_LOCK)) for one in found}):
        with suppress(OSError, StoreError):
            lock = FileLock(path.with_name(path.name + _LOCK))
            if max(lock.path, path, key=Path.exists).lstat().st_uid == os.getuid() and lock.try_acquire():
                shutil.rmtree(path, ignore_errors=True)
                lock.path.unlink(missing_ok=True)
                lock.release()
                removed.append(path)
    return removed


def clear_directories() -> list[Path]:
    """Remove and return the directories of killed owners: weights in shared memory, and Ray's."""
    return [*remove_dead(SHARED_MEMORY), *remove_dead(USER_FOLDER)]
