"""A lock that one process holds, that names its holder, and that ends with the process.

`flock` on a file that is never removed: the kernel releases it when the process dies, kill -9 included, and
removing the file would let two processes lock two files of one name.
Not covered: processes forked (not spawned) while the lock is held inherit it.
The package filelock is not used: a waiting process erases the name of the holder.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from strop.errors import StoreError
from strop.io.atomic import explain_write_failure


@dataclass(frozen=True, kw_only=True, slots=True)
class LockHolder:
    """The holder of a lock, as recorded in the lock file."""

    pid: int
    host: str
    since: float
    """Unix seconds."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class FileLock:
    """An exclusive lock on a file; create it, then `try_acquire` or use it in `with` to wait."""

    def __init__(self, path: Path, *, wait_limit_s: float = 3600.0) -> None:
        self.path = path
        self._wait_limit_s = wait_limit_s
        self._descriptor: int | None = None

    @property
    def is_held(self) -> bool:
        """Whether this object holds the lock."""
        return self._descriptor is not None

    def try_acquire(self) -> bool:
        """Take the lock if it is free; return whether this object holds it now.

        Raises: StoreError if the file cannot be opened, or its file system has no locks.
        """
        if self._descriptor is not None:
            return True
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise explain_write_failure(error, self.path) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno in {errno.EWOULDBLOCK, errno.EACCES}:
                return False
            raise StoreError(
                f"{self.path} cannot be locked ({error.strerror})",
                allowed="a file system with flock, so that two runs cannot share a directory",
                next_step="keep runs and cache on a local disk (STROP_CACHE moves the cache)",
            ) from error
        self._descriptor = descriptor
        holder = LockHolder(pid=os.getpid(), host=socket.gethostname(), since=time.time())
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(asdict(holder)).encode(), 0)
        except OSError as error:
            # A full disk: without the name of its holder the lock would be held but unexplained.
            self.release()
            raise explain_write_failure(error, self.path) from error
        return True

    def acquire(self) -> None:
        """Wait for the lock.

        Raises: StoreError naming the holder if it is not free within the limit.
        """
        deadline = time.monotonic() + self._wait_limit_s
        while not self.try_acquire():
            if time.monotonic() >= deadline:
                raise StoreError(
                    f"{self.path} is still locked by {self.holder() or 'another process'} "
                    f"after {self._wait_limit_s:g} s",
                    allowed="one process at a time",
                    next_step="wait for that process or end it, then start the same command again",
                )
            time.sleep(0.05)

    def release(self) -> None:
        """Release the lock; no-op if it is not held."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def holder(self) -> LockHolder | None:
        """Return the last recorded holder; None if the lock file cannot be read."""
        try:
            return LockHolder(**json.loads(self.path.read_bytes()))
        except (OSError, ValueError, TypeError):
            return None

    def __enter__(self) -> FileLock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
