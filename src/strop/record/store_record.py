"""A member's record where its run is mirrored to a store: read object by object, as if it were a directory.

    <root>/traces/<name>                          everything but checkpoints
    <root>/<run>_step<N>[-<fence>]/<name>         checkpoints/step-00000N/<name>

Of several records of one step the complete one with the highest fence is shown. A file is read whole, so a
checkpoint's largest file has to fit into memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Protocol

from strop.errors import RemoteMissing
from strop.io.atomic import MANIFEST_NAME
from strop.record.mirror.layout import TRACES, RecordName
from strop.store.contract import StoredObject
from strop.store.uris import join_uri

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
    """`RecordFiles` over the objects of a store. Every read asks the store anew."""

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

    def list(self, prefix: str) -> list[str]:
        """Return the names of the files below a folder, sorted. Raises: StoreError as `read`."""
        prefix = prefix.rstrip("/")
        is_checkpoint = prefix.startswith(_CHECKPOINTS)
        found = () if is_checkpoint else self._list_traces(prefix)
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

    def _list_traces(self, prefix: str) -> Sequence[str]:
        place = self.describe(prefix)
        names = [stored.uri[len(place) + 1 :] for stored in self._objects.list(place)]
        return ["/".join(filter(None, [prefix, name])) for name in names]

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
