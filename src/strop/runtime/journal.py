"""The controller's journal: one JSON line for each change of a sandbox, synced before it takes effect.

A line has the whole state of one sandbox, so the last line of each sandbox counts, and a torn last line loses
only that change. Concurrent changes share one fsync. When most lines are out of date, the file is compacted.

It survives a kill at any point, a power loss after `put` returned, and a full disk (the change fails). A
`FileLock` refuses a second writer. The file contains keys, so its mode is 0600.
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
"""A journal with fewer lines is not compacted."""


class Journal:
    """Entries by key, kept in a file. `open` reads and locks it."""

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
        """Read and lock a journal; a missing one is created.

        Raises: StoreError if another process has it or it cannot be read; CorruptRecord if a line before the
            last one is broken.
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
        """Return the newest content of each key, in the order of the keys' first lines."""
        return [json.loads(line)["content"] for line in self._lines.values()]

    async def put(self, key: str, content: dict[str, Any]) -> None:
        """Replace the content of a key; it is on disk when this returns. Raises: StoreError."""
        line = json.dumps({"id": key, "content": content}, separators=(",", ":")).encode() + b"\n"
        self._lines[key] = line
        done = asyncio.get_running_loop().create_future()
        self._waiting.append((line, done))
        if self._flushing is None or self._flushing.done():
            self._flushing = asyncio.create_task(self._flush())
        await done

    def forget(self, key: str) -> None:
        """Drop a key at the next compaction. Until then a restart would read it again."""
        self._lines.pop(key, None)

    async def close(self) -> None:
        """Write the waiting lines, close the file and release the lock."""
        if self._flushing is not None:
            await self._flushing
        os.close(self._file)
        self._lock.release()

    async def _flush(self) -> None:
        # One turn of the event loop, so that concurrent changes share one write.
        await asyncio.sleep(0)
        while self._waiting:
            batch, self._waiting = self._waiting, []
            should_compact = self._num_lines + len(batch) > max(_MIN_LINES, 4 * len(self._lines))
            try:
                if should_compact:
                    await asyncio.to_thread(self._compact, b"".join(self._lines.values()))
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
            # The next line would follow half a line, and the journal would be corrupt.
            os.ftruncate(self._file, size)
            raise

    def _compact(self, data: bytes) -> None:
        new_path = self._path.with_suffix(".new")
        new_path.unlink(missing_ok=True)
        new_file = _open_for_append(new_path)
        try:
            _write_all(new_file, data)
            os.replace(new_path, self._path)
            fsync_directory(self._path.parent)
        except OSError:
            os.close(new_file)
            raise
        os.close(self._file)
        self._file = new_file


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
