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
    """Remove and return this user's directories whose owner is gone."""
    removed = []
    lock_paths = [path for prefix in (PREFIX, MEMORY_PREFIX) for path in parent.glob(f"{prefix}*{_LOCK}")]
    for lock_path in sorted(lock_paths):
        with suppress(OSError, StoreError):
            lock, is_own = FileLock(lock_path), lock_path.lstat().st_uid == os.getuid()
            if is_own and lock.try_acquire():
                path = lock_path.with_name(lock_path.name.removesuffix(_LOCK))
                shutil.rmtree(path, ignore_errors=True)
                lock_path.unlink(missing_ok=True)
                lock.release()
                removed.append(path)
    return removed


def clear_directories() -> list[Path]:
    """Remove and return the directories of killed owners: weights in shared memory, and Ray's."""
    return [*remove_dead(SHARED_MEMORY), *remove_dead(USER_FOLDER)]
