"""Read a run's directory and logs from a local disk or a store.

`LineFollower` reads a growing file of lines; `Shard` names the files of an evaluation's rollouts by the range
of examples in each.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from strop.errors import CorruptRecord, RemoteMissing, StoreError
from strop.io.atomic import MANIFEST_NAME
from strop.record.mirror.layout import TRACES, RecordName
from strop.store.contract import StoredObject
from strop.store.uris import join_uri

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
    """A run's directory, on a local disk or mirrored in a store."""

    def read(self, name: str) -> bytes | None:
        """Return a file's bytes, None if there is no file. Raises: StoreError if the read fails."""

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
        """Return a file's bytes, None if there is no file. Raises: StoreError if the disk fails."""
        try:
            with open(self.path / name, "rb", opener=_open_no_link) as file:
                return file.read()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise self._failed(name, error) from error

    def read_from(self, name: str, offset: int) -> bytes:
        """Return at most 64 MiB of a file after an offset; empty at its end. Raises: StoreError."""
        try:
            with open(self.path / name, "rb", opener=_open_no_link) as file:
                file.seek(offset)
                return file.read(MAX_READ_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            return b""
        except OSError as error:
            raise self._failed(name, error) from error

    def version(self, name: str) -> str | None:
        """Return inode, size and time of a file as a word. Raises: StoreError if the disk fails."""
        try:
            stat = (self.path / name).stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise self._failed(name, error) from error
        return f"{stat.st_ino}-{stat.st_size}-{stat.st_mtime_ns}"

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
            f"{self.path / name} cannot be read ({error.strerror})",
            allowed="a run directory that answers",
            next_step="check the disk or the file server, then ask again",
        )


CHECKPOINTS = "checkpoints/"
_INSIDE = re.compile(rf"{CHECKPOINTS}step-(\d{{6,}})/(.+)")


def find_checkpoints(record: RecordFiles) -> list[int]:
    """Return the steps of complete checkpoints, in order. Raises: StoreError if the record cannot be read."""
    matches = (_INSIDE.fullmatch(name) for name in record.list(CHECKPOINTS.rstrip("/")))
    return sorted(int(match[1]) for match in matches if match is not None and match[2] == MANIFEST_NAME)


def step_of(name: str) -> int | None:
    """Return the step of the checkpoint that a file of a record belongs to."""
    match = _INSIDE.fullmatch(name)
    return None if match is None else int(match[1])


_CHECKPOINT = re.compile(rf"{CHECKPOINTS}step-(?P<step>\d+)(?P<rest>/.*)?")


class ReadableObjects(Protocol):
    """The operations of a store's `Objects` that reading a record needs."""

    def find(self, uri: str) -> StoredObject | None:
        """Return an object's size and version, or None if there is no such object."""

    def read(self, uri: str) -> bytes:
        """Return a small object. Raises: RemoteMissing."""

    def list(self, uri: str) -> Iterator[StoredObject]:
        """Yield all objects below a URI, by name."""


class StoreRecord:
    """`RecordFiles` of a run that is mirrored to a store. Nothing is cached.

        <root>/traces/<name>                          everything but checkpoints
        <root>/<run>_step<N>[-<fence>]/<name>         checkpoints/step-00000N/<name>

    Of several records of one step, the complete one with the highest fence is shown. A file is read whole, so
    a checkpoint's largest file has to fit into memory.
    """

    def __init__(self, objects: ReadableObjects, root: str, *, run: str) -> None:
        self._objects, self._root, self._run = objects, root.rstrip("/"), run
        self._folders: dict[int, str] = {}
        """Step to the name of its record in the last listing."""

    def read(self, name: str) -> bytes | None:
        """Return a file's bytes, None if there is no file. Raises: StoreError if the store fails."""
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
        """Return the store's version of a file without fetching it. Raises: StoreError as `read`."""
        found = self._objects.find(self.describe(name))
        return None if found is None else found.version

    def list(self, prefix: str) -> list[str]:
        """Return the names of the files below a folder, sorted. Raises: StoreError as `read`."""
        prefix = prefix.rstrip("/")
        is_checkpoint = f"{prefix}/".startswith(CHECKPOINTS)
        found: list[str] = []
        if not is_checkpoint:
            place = self.describe(prefix)
            names = (stored.uri[len(place) + 1 :] for stored in self._objects.list(place))
            found += ["/".join(filter(None, [prefix, name])) for name in names]
        inner = self._list_checkpoints() if is_checkpoint or not prefix else ()
        return sorted([*found, *(name for name in inner if not prefix or name.startswith(f"{prefix}/"))])

    def describe(self, name: str) -> str:
        """Return a file's URI."""
        match = _CHECKPOINT.fullmatch(name)
        if match is not None:
            step = int(match["step"])
            folder = self._folders.get(step, f"{self._run}_step{step}")
            return f"{self._root}/{folder}{match['rest'] or ''}"
        return join_uri(self._root, *filter(None, [TRACES, name]))

    def _list_checkpoints(self) -> Sequence[str]:
        files: dict[RecordName, list[str]] = {}
        for stored in self._objects.list(self._root):
            folder, _, name = stored.uri[len(self._root) + 1 :].partition("/")
            record = RecordName.parse(folder, self._run)
            if record is not None and name:
                files.setdefault(record, []).append(name)
        # An incomplete record ranks below any complete one of its step.
        best = sorted(files, key=lambda record: (MANIFEST_NAME in files[record], record))
        self._folders = {record.step: record.uri("", self._run).lstrip("/") for record in best}
        chosen = {record.step: record for record in best}
        return [
            f"{CHECKPOINTS}step-{step:06d}/{name}"
            for step, record in chosen.items()
            for name in files[record]
        ]


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

        Raises: StoreError if the read fails; CorruptRecord for a line that is no JSON object.
        """
        new, records = self.read_new(), []
        for line in new.lines:
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
            records.append(content)
        return new.is_restarted, records

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
