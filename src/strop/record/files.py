"""A run's directory and its logs, read wherever they are: on a disk that is seen here, or in a store.

And how the files of rollouts of an evaluation are named: by the examples, in a row, that each is about.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from strop.errors import RemoteMissing, StoreError
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


_CHECKPOINTS = "checkpoints"
_CHECKPOINT = re.compile(rf"{_CHECKPOINTS}/step-(?P<step>\d+)(?P<rest>/.*)?")


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
        is_checkpoint = prefix.startswith(_CHECKPOINTS)
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
            f"{_CHECKPOINTS}/step-{step:06d}/{name}"
            for step, record in chosen.items()
            for name in files[record]
        ]


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
