"""A run's directory and its logs, read wherever they are: on a disk that is seen here, or in a store."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from strop.errors import StoreError, explain_refusal

MAX_READ_BYTES = 64 << 20
"""A checkpoint may be larger than this machine's memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogLine:
    """One line of a run's logs, with who said it."""

    text: str
    attempt: str
    node: str
    role: str


class RecordFiles(Protocol):
    """A run's directory, wherever it is: on a disk that is seen here, or mirrored in a store."""

    def read(self, name: str) -> bytes | None:
        """Return a file's bytes, None if there is none. Raises: StoreError if the place does not answer."""

    def read_from(self, name: str, offset: int) -> bytes:
        """Return what a file has from a byte on, or the beginning of it; empty where there is no more."""

    def list(self, prefix: str) -> list[str]:
        """Return the names of the files below a folder, as paths in the run's directory, sorted."""

    def describe(self, name: str) -> str:
        """Return where a file is, for a message: a path or a URI."""


class LogSource(Protocol):
    """The logs of one run while they grow."""

    def read_new(self) -> list[LogLine]:
        """Return the complete lines since the last call. Raises: StoreError if the place does not answer."""


class DirectoryRecord:
    """`RecordFiles` of a directory. A file that is replaced while it is read is read whole, old or new."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, name: str) -> bytes | None:
        """Return a file's bytes, None if there is none. Raises: StoreError if the disk fails."""
        try:
            return (self.path / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise self._failed(name, error) from error

    def read_from(self, name: str, offset: int) -> bytes:
        """Return what a file has from a byte on, 64 MiB at most; empty where there is no more.

        Raises: StoreError.
        """
        try:
            with (self.path / name).open("rb") as file:
                file.seek(offset)
                return file.read(MAX_READ_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            return b""
        except OSError as error:
            raise self._failed(name, error) from error

    def list(self, prefix: str) -> list[str]:
        """Return the names of the files below a folder, sorted; links to folders are not followed."""
        found = []
        for folder, _, names in os.walk(self.path / prefix):
            found += [(Path(folder) / name).relative_to(self.path).as_posix() for name in names]
        return sorted(found)

    def describe(self, name: str) -> str:
        """Return a file's path."""
        return str(self.path / name)

    def _failed(self, name: str, error: OSError) -> StoreError:
        return StoreError(
            explain_refusal(
                f"{self.path / name} cannot be read ({error.strerror})",
                allowed="a run directory that answers",
                next_step="check the disk or the file server, then ask again",
            )
        )
