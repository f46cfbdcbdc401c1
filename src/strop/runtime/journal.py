"""The controller's memory on disk: one JSON line for each change of a sandbox, synced before it is acted on.

A line says all of one sandbox, so the last line of each is what counts, and a torn last line costs nothing
but itself. Changes that come together share one fsync. When most lines are out of date, the file is written
anew.

Covered: kill at any point, power loss after `put` returned, full disk (the change fails). Not covered: two
writers; a `FileLock` refuses the second one. Keys stand in it, so its mode is 0600.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

from strop.errors import CorruptRecord, StoreError
from strop.io.atomic import explain_write_failure, fsync_directory
from strop.io.lock import FileLock

_MIN_LINES = 1000
"""Not written anew below this."""


class Journal:
    """Lines by key, kept in a file. `open` reads and locks it."""

    def __init__(self, path: Path, lines: dict[str, bytes], num_lines: int, lock: FileLock) -> None:
        self._path = path
        self._lines = lines
        self._num_lines = num_lines
        self._lock = lock
        self._file = _open_for_append(path)
        self._waiting: list[tuple[bytes, asyncio.Future[None]]] = []
        self._flushing: asyncio.Task[None] | None = None
        self.num_syncs = 0
        self.num_written = 0

    @classmethod
    def open(cls, path: Path) -> Journal:
        """Read a journal, which may not be there yet, and hold it.

        Raises: StoreError if another process has it or it cannot be read; CorruptRecord if another line than
        the last one is broken.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path.with_suffix(".lock"))
        if not lock.try_acquire():
            raise StoreError(
                f"{path} is held by {lock.holder() or 'another process'}",
                allowed="one controller for each state directory",
                next_step="stop it, or name another directory",
            )
        try:
            lines, num_lines = _replay(path)
            return cls(path, lines, num_lines, lock)
        except (StoreError, OSError):
            lock.release()
            raise

    def read(self) -> list[dict[str, Any]]:
        """Return the newest line of each key, in the order in which the keys first came."""
        return [json.loads(line)["content"] for line in self._lines.values()]

    async def put(self, key: str, content: dict[str, Any]) -> None:
        """Write what `key` is from now on; it is on disk when this returns. Raises: StoreError."""
        line = json.dumps({"id": key, "content": content}, separators=(",", ":")).encode() + b"\n"
        self._lines[key] = line
        done = asyncio.get_running_loop().create_future()
        self._waiting.append((line, done))
        if self._flushing is None or self._flushing.done():
            self._flushing = asyncio.create_task(self._flush())
        await done

    def forget(self, key: str) -> None:
        """Leave a key out when the file is next written anew. Until then a restart would find it again."""
        self._lines.pop(key, None)

    async def close(self) -> None:
        """Write what waits, and give the file up."""
        if self._flushing is not None:
            await self._flushing
        os.close(self._file)
        self._lock.release()

    async def _flush(self) -> None:
        # One turn of the loop, so that changes of one moment come into one write.
        await asyncio.sleep(0)
        while self._waiting:
            batch, self._waiting = self._waiting, []
            is_compact = self._num_lines + len(batch) > max(_MIN_LINES, 4 * len(self._lines))
            try:
                if is_compact:
                    await asyncio.to_thread(self._rewrite, b"".join(self._lines.values()))
                    self._num_lines = len(self._lines)
                else:
                    await asyncio.to_thread(self._write, b"".join(line for line, _ in batch))
                    self._num_lines += len(batch)
            except OSError as error:
                failure = explain_write_failure(error, self._path)
                for _, done in batch:
                    if not done.done():
                        done.set_exception(failure)
                continue
            self.num_syncs += 1
            self.num_written += len(batch)
            for _, done in batch:
                if not done.done():
                    done.set_result(None)

    def _write(self, data: bytes) -> None:
        size = os.fstat(self._file).st_size
        try:
            _write_all(self._file, data)
        except OSError:
            # Half a line in the middle could not be told from a broken file.
            os.ftruncate(self._file, size)
            raise

    def _rewrite(self, data: bytes) -> None:
        aside = self._path.with_suffix(".new")
        aside.unlink(missing_ok=True)
        fresh = _open_for_append(aside)
        try:
            _write_all(fresh, data)
            os.replace(aside, self._path)
            fsync_directory(self._path.parent)
        except OSError:
            os.close(fresh)
            raise
        os.close(self._file)
        self._file = fresh


def _open_for_append(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def _write_all(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]
    os.fsync(descriptor)


def _replay(path: Path) -> tuple[dict[str, bytes], int]:
    """Return the newest line of each key and the number of lines; cut off a last line that is torn.

    Raises: CorruptRecord, StoreError.
    """
    try:
        data = path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise StoreError(f"{path} cannot be read ({error.strerror})") from error
    whole = data[: data.rfind(b"\n") + 1]
    lines: dict[str, bytes] = {}
    rows = whole.splitlines(keepends=True)
    end = 0
    for number, row in enumerate(rows, start=1):
        try:
            lines[json.loads(row)["id"]] = row
        except (ValueError, KeyError, TypeError) as error:
            if number == len(rows):
                break
            raise CorruptRecord(
                f"line {number} of {path} is not a line of a journal",
                allowed="lines as the controller writes them; only the last one may be torn",
                next_step="move the file away; nodes then stop the sandboxes that it named",
            ) from error
        end += len(row)
    if end < len(data):
        os.truncate(path, end)
    return lines, len(rows)
