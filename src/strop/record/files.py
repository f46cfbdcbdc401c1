"""A run's directory and its logs, read wherever they are: on a disk that is seen here, or in a store.

`LineFollower` reads a growing file of lines; `Shard` names the files of an evaluation's rollouts, by the
examples, in a row, that each is about.
"""

from __future__ import annotations

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
    """A run's directory, wherever it is: on a disk that is seen here, or mirrored in a store."""

    def read(self, name: str) -> bytes | None:
        """Return a file's bytes, None if there is none. Raises: StoreError if the place does not answer."""

    def read_from(self, name: str, offset: int) -> bytes:
        """Return what a file has from a byte on, or the beginning of it; empty where there is no more."""

    def version(self, name: str) -> str | None:
        """Return a word that is another one when the file has changed; None if there is none."""

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

    def version(self, name: str) -> str | None:
        """Return a word for the state of a file. Raises: StoreError if the disk fails."""
        try:
            found = (self.path / name).stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise self._failed(name, error) from error
        return f"{found.st_ino}-{found.st_size}-{found.st_mtime_ns}"

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
    """Return the steps of complete checkpoints, in order. Raises: StoreError if the place does not answer."""
    found = (_INSIDE.fullmatch(name) for name in record.list(CHECKPOINTS.rstrip("/")))
    return sorted(int(match[1]) for match in found if match is not None and match[2] == MANIFEST_NAME)


def step_of(name: str) -> int | None:
    """Return the step of the checkpoint that a file of a record belongs to."""
    match = _INSIDE.fullmatch(name)
    return None if match is None else int(match[1])


_CHECKPOINT = re.compile(rf"{CHECKPOINTS}step-(?P<step>\d+)(?P<rest>/.*)?")


class ReadableObjects(Protocol):
    """As much of a store's `Objects` as a record is read with."""

    def find(self, uri: str) -> StoredObject | None:
        """Return what is known about one object, or None."""

    def read(self, uri: str) -> bytes:
        """Return a small object. Raises: RemoteMissing."""

    def list(self, uri: str) -> Iterator[StoredObject]:
        """Yield all objects below a URI, by name."""


class StoreRecord:
    """`RecordFiles` of a run that is mirrored to a store. Every read asks the store anew.

        <root>/traces/<name>                          everything but checkpoints
        <root>/<run>_step<N>[-<fence>]/<name>         checkpoints/step-00000N/<name>

    Of several records of one step, the complete one with the highest fence is shown. A file is read whole, so
    a checkpoint's largest file has to fit into memory.
    """

    def __init__(self, objects: ReadableObjects, root: str, *, run: str, traces: str = TRACES) -> None:
        self._objects, self._root, self._run, self._traces = objects, root.rstrip("/"), run, traces
        self._folders: dict[int, str] = {}
        """Step to the name of its record, as the last listing showed it."""

    def read(self, name: str) -> bytes | None:
        """Return a file's bytes, None if there is none. Raises: StoreError if the store does not answer."""
        try:
            return self._objects.read(self.describe(name))
        except RemoteMissing:
            return None

    def read_from(self, name: str, offset: int) -> bytes:
        """Return what a file has from a byte on. Nothing travels where there is no more."""
        found = self._objects.find(self.describe(name))
        if found is None or found.size_bytes <= offset:
            return b""
        return (self.read(name) or b"")[offset:]

    def version(self, name: str) -> str | None:
        """Return the store's version of a file, without its content. Raises: StoreError as `read`."""
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
        return join_uri(self._root, *filter(None, [self._traces, name]))

    def _list_checkpoints(self) -> Sequence[str]:
        if not self._traces:
            return []
        files: dict[RecordName, list[str]] = {}
        for stored in self._objects.list(self._root):
            folder, _, name = stored.uri[len(self._root) + 1 :].partition("/")
            record = RecordName.parse(folder, self._run)
            if record is not None and name:
                files.setdefault(record, []).append(name)
        # An incomplete record counts for less than any complete one of its step.
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
    """What a file has that was not read yet."""

    is_restarted: bool
    """Whether all lines that were given before count no more: the file was cut back, replaced or removed."""
    lines: list[bytes]
    """Complete ones, without their ends, in order."""


class LineFollower:
    """Reads the complete lines of one file as it grows; a last line without its end waits until it has one.

    A run that goes on from a checkpoint cuts its files back, and a reader that waits for growth alone would
    hear nothing more. So the last line that was read is compared with what stands in the file: where another
    one is there, what was read before counts no more, and the file is read anew.
    """

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
    """Some examples in a row, at least one."""

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
    """Return the shards in a folder, in the order of their examples; none where it is no folder."""
    found = {path: Shard.of_file(path) for path in (folder.iterdir() if folder.is_dir() else ())}
    firsts = {path: shard.examples[0] for path, shard in found.items() if shard is not None}
    return sorted(firsts, key=lambda path: (firsts[path], path.name))
