"""A growing file of lines, read as it grows, wherever it is.

A run that goes on from a checkpoint cuts its files back, and a reader that waits for growth alone would hear
nothing more. So the last line that was read is compared with what stands in the file: where another one is
there, what was read before counts no more, and the file is read anew.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from strop.errors import CorruptRecord
from strop.record.files import RecordFiles


@dataclass(frozen=True, kw_only=True, slots=True)
class NewLines:
    """What a file has that was not read yet."""

    is_restarted: bool
    """Whether all lines that were given before count no more: the file was cut back, replaced or removed."""
    lines: list[bytes]
    """Complete ones, without their ends, in order."""


class LineFollower:
    """Reads the complete lines of one file; a last line without its end waits until it has one."""

    def __init__(self, record: RecordFiles, name: str, offset: int = 0) -> None:
        """`offset`: bytes that were read before, up to the end of a line."""
        self._record, self._name = record, name
        self._offset = offset
        # Of a place that another reader reached, only the end of its last line is known.
        self._last = b"\n" if offset else b""
        self._version: str | None = None

    @property
    def offset(self) -> int:
        """Bytes of the file that were given as lines: where another reader may go on."""
        return self._offset

    def read_new(self) -> NewLines:
        """Return the lines since the last call; nothing is read where nothing has changed.

        Raises: StoreError if the place does not answer; the next call then gives what this one could not.
        """
        # Asked first: what is written while the lines are read shows as another version at the next call.
        version = self._record.version(self._name)
        if version is not None and version == self._version:
            return NewLines(is_restarted=False, lines=[])
        data = self._read_from(self._offset - len(self._last))
        is_restarted = not data.startswith(self._last)
        if is_restarted:
            self._offset, self._last = 0, b""
            data = self._read_from(0)
        whole = data[len(self._last) : data.rfind(b"\n") + 1]
        lines = whole.split(b"\n")[:-1]
        self._offset += len(whole)
        self._version = version
        if lines:
            self._last = lines[-1] + b"\n"
        return NewLines(is_restarted=is_restarted, lines=lines)

    def read_records(self) -> tuple[bool, list[dict[str, Any]]]:
        """Return whether the file is read anew, and the new lines as objects.

        Raises: StoreError if the place does not answer; CorruptRecord for a line that is no JSON object.
        """
        found = self.read_new()
        return found.is_restarted, [self._parse(line) for line in found.lines]

    def _parse(self, line: bytes) -> dict[str, Any]:
        try:
            content = json.loads(line)
        except ValueError:
            content = None
        if not isinstance(content, dict):
            raise CorruptRecord(
                f"{self._record.describe(self._name)} has a line that is no record: {line[:60]!r}",
                allowed="one JSON object per line",
                next_step="mend or delete that line; the rest of the file is intact",
            )
        return content

    def _read_from(self, offset: int) -> bytes:
        parts: list[bytes] = []
        while part := self._record.read_from(self._name, offset + sum(map(len, parts))):
            parts.append(part)
        return b"".join(parts)
