"""A file of one JSON value per line that survives being killed in the middle of a line.

Appends are one write each, so a kill tears at most the last line, and the next opening removes it.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from strop.errors import CorruptRecord
from strop.io.atomic import explain_write_failure, write_bytes_atomically


class JsonLines:
    """An append-only file of JSON lines, each with an integer `step`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def append(self, content: dict[str, Any]) -> None:
        """Write one line; the operating system has it when this returns.

        Raises: StoreError if the disk is full or not writable; ValueError for a value that JSON lacks.
        """
        line = json.dumps(content, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        descriptor = self._open()
        end = os.fstat(descriptor).st_size
        try:
            if os.write(descriptor, line) != len(line):
                # A short write is how a disk that fills up in the middle of a line shows itself.
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            os.ftruncate(descriptor, end)
            raise explain_write_failure(error, self.path) from error

    def read(self) -> list[dict[str, Any]]:
        """Return all complete lines; a torn last one is left out.

        Raises: CorruptRecord if a line before the last is not a JSON object with a step.
        """
        return [content for _, content in self._scan()]

    def read_until(self, step: int) -> bytes:
        """Return the complete lines of steps up to `step`, as they stand in the file.

        Raises: CorruptRecord if a line before the last is not a JSON object with a step.
        """
        return b"".join(line for line, content in self._scan() if content["step"] <= step)

    def truncate_after(self, step: int) -> int:
        """Drop the lines of later steps and a torn end; return how many complete lines went.

        Raises: CorruptRecord if a line before the last is not a JSON object with a step.
        """
        lines = list(self._scan())
        kept = [line for line, content in lines if content["step"] <= step]
        data = b"".join(kept)
        if not self.path.exists() or len(data) == self.path.stat().st_size:
            return 0
        self.close()
        write_bytes_atomically(self.path, data)
        return len(lines) - len(kept)

    def sync(self) -> None:
        """Make everything appended durable against power loss."""
        if self._descriptor is not None:
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file; the next append opens it again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open(self) -> int:
        if self._descriptor is None:
            try:
                self._descriptor = os.open(
                    self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644
                )
            except OSError as error:
                raise explain_write_failure(error, self.path) from error
            # Drop a line that a kill tore.
            size = os.fstat(self._descriptor).st_size
            if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
                os.ftruncate(self._descriptor, self.path.read_bytes().rfind(b"\n") + 1)
        return self._descriptor

    def _scan(self) -> Iterator[tuple[bytes, dict[str, Any]]]:
        data = self.path.read_bytes() if self.path.exists() else b""
        # What follows the last line end is nothing, or a line that a kill tore.
        for index, line in enumerate(data.split(b"\n")[:-1]):
            yield line + b"\n", self._parse(line, index)

    def _parse(self, line: bytes, index: int) -> dict[str, Any]:
        try:
            content = json.loads(line)
            if isinstance(content["step"], int):
                return dict(content)
        except (ValueError, KeyError, TypeError):
            pass
        shown = line[:60].decode(errors="replace").strip()
        raise CorruptRecord(
            f"{self.path}, line {index + 1}, is not a record: {shown!r}",
            allowed="one JSON object with an integer step per line",
            next_step="mend or delete that line; the rest of the file is intact",
        )
