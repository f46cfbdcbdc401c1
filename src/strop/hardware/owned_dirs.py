"""Private directories that end with their owner, however it ends: sockets, logs, weights in memory.

Beside each directory lies a lock that its owner holds: who finds it free may remove both.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from strop.errors import StoreError
from strop.io.atomic import explain_write_failure
from strop.io.lock import FileLock

PREFIX = "ray-"
"""Of directories of Ray nodes, whose paths must be short."""
MEMORY_PREFIX = "strop-"
"""Of directories in shared memory that belong to no Ray node."""
SHARED_MEMORY = Path("/dev/shm")
_LOCK = ".lock"


@contextmanager
def own_dir(path: Path) -> Iterator[None]:
    """Make the directory, hold its lock, and remove both; first remove what dead keepers left beside it.

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
        yield
    finally:
        shutil.rmtree(path, ignore_errors=True)
        lock.path.unlink(missing_ok=True)
        lock.release()


def remove_dead(parent: Path) -> list[Path]:
    """Remove directories of this user whose owner is gone; return them."""
    removed = []
    lock_paths = [path for prefix in (PREFIX, MEMORY_PREFIX) for path in parent.glob(f"{prefix}*{_LOCK}")]
    for lock_path in sorted(lock_paths):
        with suppress(OSError, StoreError):
            if lock_path.lstat().st_uid != os.getuid():
                continue
            lock = FileLock(lock_path)
            if lock.try_acquire():
                path = lock_path.with_name(lock_path.name.removesuffix(_LOCK))
                shutil.rmtree(path, ignore_errors=True)
                lock_path.unlink(missing_ok=True)
                lock.release()
                removed.append(path)
    return removed


def clear_shared_memory() -> list[Path]:
    """Remove what killed owners left in this machine's memory, weights for example; return it."""
    return remove_dead(SHARED_MEMORY)
