"""Read a run's directory and logs from a local disk or a store.

`LineFollower` reads a growing file of lines; `Shard` names the files of an evaluation's rollouts by the range
of examples in each.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

from strop.errors import RemoteMissing, StoreError
from strop.io.atomic import MANIFEST_NAME
from strop.record.events import parse_line
from strop.store.contract import StoredObject
from strop.store.uris import join_uri

T = TypeVar("T")

MAX_READ_BYTES = 64 << 20
"""A checkpoint may be larger than this machine's memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogLine:
    """One line of a run's logs, with the process that wrote it."""

    text: str
    attempt: str
    node: str
    role: str


class RecordFiles(Protocol):
    """A run's directory, on a local disk or mirrored in a store. Raises: StoreError if a read fails."""

    def read(self, name: str) -> bytes | None:
        """Return a file's bytes, None if there is no file."""

    def read_from(self, name: str, offset: int) -> bytes:
        """Return the bytes of a file after an offset, or the first of them; empty at its end."""

    def version(self, name: str) -> str | None:
        """Return a word that changes with the file; None if there is no file."""

    def list(self, prefix: str) -> list[str]:
        """Return the names of the files below a folder, as paths in the run's directory, sorted."""

    def describe(self, name: str) -> str:
        """Return a file's path or URI, for a message."""


class LogSource(Protocol):
    """The logs of one run while they grow."""

    def read_new(self) -> list[LogLine]:
        """Return the complete lines since the last call. Raises: StoreError if the read fails."""


def _open_no_link(path: str, flags: int) -> int:
    """Open a file; a link, which may lead out of the run's directory, is none."""
    try:
        return os.open(path, flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise FileNotFoundError(error.errno, "it is a link", path) from error
        raise


class DirectoryRecord:
    """`RecordFiles` of a directory. A file that is replaced while it is read is read whole, old or new."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, name: str) -> bytes | None:
        """Return a file's bytes, None if there is no file."""
        return self._ask(name, lambda: self._read(name, 0, -1))

    def read_from(self, name: str, offset: int) -> bytes:
        """Return at most 64 MiB of a file after an offset; empty at its end."""
        return self._ask(name, lambda: self._read(name, offset, MAX_READ_BYTES)) or b""

    def version(self, name: str) -> str | None:
        """Return inode, size and time of a file as a word."""
        stat = self._ask(name, (self.path / name).stat)
        return stat and f"{stat.st_ino}-{stat.st_size}-{stat.st_mtime_ns}"

    def list(self, prefix: str) -> list[str]:
        """Return the names of the files below a folder, sorted; links to folders are not followed."""
        found = []
        for folder, _, names in os.walk(self.path / prefix):
            found += [(Path(folder) / name).relative_to(self.path).as_posix() for name in names]
        return sorted(found)

    def describe(self, name: str) -> str:
        """Return a file's path."""
        return str(self.path / name)

    def _read(self, name: str, offset: int, num_bytes: int) -> bytes:
        with open(self.path / name, "rb", opener=_open_no_link) as file:
            file.seek(offset)
            return file.read(num_bytes)

    def _ask(self, name: str, action: Callable[[], T]) -> T | None:
        try:
            return action()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise StoreError(
                f"{self.path / name} cannot be read ({error.strerror})",
                allowed="a run directory that answers",
                next_step="check the disk or the file server, then ask again",
            ) from error


CHECKPOINTS = "checkpoints/"
_CHECKPOINT = re.compile(rf"{CHECKPOINTS}step-(\d{{6,}})(?:-(\d+))?(/.+)?")
"""A checkpoint's folder, in a mirror with the number of the attempt that sent it, or a file in it."""


def step_of(name: str) -> int | None:
    """Return the step of the checkpoint that a file of a record belongs to."""
    match = _CHECKPOINT.fullmatch(name)
    return int(match[1]) if match is not None and match[3] else None


def find_checkpoints(record: RecordFiles) -> list[int]:
    """Return the steps of complete checkpoints, in order. Raises: StoreError if the record cannot be read."""
    names = record.list(CHECKPOINTS.rstrip("/"))
    folders = rank_folders(names).items()
    return sorted(step for folder, step in folders if f"{folder}/{MANIFEST_NAME}" in names)


def rank_folders(names: Collection[str]) -> dict[str, int]:
    """Return the folders of checkpoints among the names of a record's files with their steps, the best last.

    Complete ones are better, then those of later steps, then of later attempts.
    """
    found: dict[str, tuple[bool, int, int]] = {}
    for match in filter(None, map(_CHECKPOINT.fullmatch, names)):
        folder = match[0].removesuffix(match[3] or "")
        found[folder] = f"{folder}/{MANIFEST_NAME}" in names, int(match[1]), int(match[2] or 0)
    return {folder: rank[1] for folder, rank in sorted(found.items(), key=lambda item: item[1])}


class _Readable(Protocol):
    def find(self, uri: str) -> StoredObject | None: ...
    def read(self, uri: str) -> bytes: ...
    def list(self, uri: str) -> Iterator[StoredObject]: ...


class StoreRecord:
    """`RecordFiles` of a run that is mirrored to a store: its files have the names that they have on a disk.

    Nothing is cached. Of several checkpoints of one step, from several attempts, the best is shown. A file is
    read whole, so a checkpoint's largest file has to fit into memory.
    """

    def __init__(self, objects: _Readable, root: str) -> None:
        self._objects, self._root = objects, root.rstrip("/")
        self._folders: dict[str, str] = {}
        """Folder of a checkpoint, as on a disk, to its name in the last listing."""

    def read(self, name: str) -> bytes | None:
        """Return a file's bytes, None if there is no file."""
        try:
            return self._objects.read(self.describe(name))
        except RemoteMissing:
            return None

    def read_from(self, name: str, offset: int) -> bytes:
        """Return the bytes of a file after an offset. Nothing is fetched at its end."""
        found = self._objects.find(self.describe(name))
        if found is None or found.size_bytes <= offset:
            return b""
        return (self.read(name) or b"")[offset:]

    def version(self, name: str) -> str | None:
        """Return the store's version of a file without fetching it."""
        found = self._objects.find(self.describe(name))
        return None if found is None else found.version

    def list(self, prefix: str) -> list[str]:
        """Return the names of the files below a folder, sorted."""
        is_checkpoint = prefix.startswith(CHECKPOINTS)
        place = self.describe(CHECKPOINTS if is_checkpoint else prefix).rstrip("/")
        names = {stored.uri[len(self._root) + 1 :] for stored in self._objects.list(place)}
        steps = rank_folders(names)
        self._folders |= {f"{CHECKPOINTS}step-{step:06d}": folder for folder, step in steps.items()}
        shown = {folder: name for name, folder in self._folders.items()}
        found = []
        for name in names:
            folder = _folder_of(name)
            if folder not in steps:
                found.append(name)
            elif folder in shown:
                found.append(shown[folder] + name.removeprefix(folder))
        return sorted(name for name in found if not is_checkpoint or name.startswith(join_uri(prefix, "")))

    def describe(self, name: str) -> str:
        """Return a file's URI."""
        folder = _folder_of(name)
        name = self._folders.get(folder, folder) + name.removeprefix(folder)
        return join_uri(self._root, name) if name else self._root


def _folder_of(name: str) -> str:
    """Return the first two parts of a name: the folder of a checkpoint, if it is in one."""
    return "/".join(name.split("/")[:2])


@dataclass(frozen=True, kw_only=True, slots=True)
class NewLines:
    """The lines of a file since the last read."""

    is_restarted: bool
    """Whether all earlier lines are obsolete: the file was cut back, replaced or removed."""
    lines: list[bytes]
    """Complete lines without their ends, in order."""


class LineFollower:
    """Reads the complete lines of one file as it grows; a last line without its end waits until it has one.

    A run that resumes from a checkpoint cuts its files back, and a reader that waits for growth alone would
    read nothing more. So the last line that was read is compared with the file: if it differs, the earlier
    lines are obsolete, and the file is read from its beginning.
    """

    def __init__(self, record: RecordFiles, name: str, offset: int = 0) -> None:
        """`offset`: bytes that were read before, up to the end of a line."""
        self._record, self._name = record, name
        self._offset = offset
        # Of the line before another reader's offset, only its end is known.
        self._last = b"\n" if offset else b""
        self._version: str | None = None

    @property
    def offset(self) -> int:
        """Bytes of the file that were returned as lines, for another reader to continue from."""
        return self._offset

    def read_new(self) -> NewLines:
        """Return the lines since the last call; an unchanged file is not read.

        Raises: StoreError if the read fails; the next call then returns the same lines.
        """
        # Before the read: lines that are written meanwhile show as another version at the next call.
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
        """Return `NewLines.is_restarted`, and the new lines as objects.

        Raises: StoreError if the read fails; CorruptRecord for a line that is no record.
        """
        new, place = self.read_new(), f"{self._record.describe(self._name)}, a new line"
        return new.is_restarted, [parse_line(line, place) for line in new.lines]

    def _read_from(self, offset: int) -> bytes:
        parts: list[bytes] = []
        while part := self._record.read_from(self._name, offset + sum(map(len, parts))):
            parts.append(part)
        return b"".join(parts)


_NAME = re.compile(r"examples-(\d{6,})-(\d{6,})\.parquet")


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """A range of examples, at least one."""

    examples: range
    """Positions among the examples of the evaluation, which fix their order only."""

    @property
    def file_name(self) -> str:
        """First and last position, for example 'examples-000000-000031.parquet'."""
        return f"examples-{self.examples[0]:06d}-{self.examples[-1]:06d}.parquet"

    @classmethod
    def of_file(cls, path: Path) -> Self | None:
        """Return the shard that a file of this name holds; None for any other name."""
        match = _NAME.fullmatch(path.name)
        examples = range(int(match[1]), int(match[2]) + 1) if match else range(0)
        return cls(examples=examples) if examples else None


def list_shards(folder: Path) -> list[Path]:
    """Return the shards in a folder in the order of their examples, none if there is no such folder."""
    shards = {path: Shard.of_file(path) for path in (folder.iterdir() if folder.is_dir() else ())}
    firsts = {path: shard.examples[0] for path, shard in shards.items() if shard is not None}
    return sorted(firsts, key=lambda path: (firsts[path], path.name))
