"""A member's record where its run is mirrored to a store: read object by object, as if it were a directory.

<root>/traces/<name>                     everything but checkpoints
<root>/<run>_step<N>/<name>              checkpoints/step-00000N/<name>
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Protocol

from strop.errors import RemoteMissing
from strop.store.contract import StoredObject
from strop.store.uris import join_uri

TRACES = "traces"
_CHECKPOINT = re.compile(r"checkpoints/step-(?P<step>\d+)(?P<rest>/.*)?")


class ReadableObjects(Protocol):
    """As much of a store's `Objects` as a record is read with."""

    def read(self, uri: str) -> bytes:
        """Return a small object. Raises: RemoteMissing."""

    def list(self, uri: str) -> Iterator[StoredObject]:
        """Yield all objects below a URI, by name."""


class StoreRecord:
    """`RecordFiles` over the objects of a store. Every read asks the store anew."""

    def __init__(self, objects: ReadableObjects, root: str, *, run: str, traces: str = TRACES) -> None:
        self._objects, self._root, self._run, self._traces = objects, root.rstrip("/"), run, traces

    def read(self, name: str) -> bytes | None:
        """Return a file's bytes, None if there is none. Raises: StoreError if the store does not answer."""
        try:
            return self._objects.read(self.describe(name))
        except RemoteMissing:
            return None

    def read_from(self, name: str, offset: int) -> bytes:
        """Return what a file has from a byte on. The whole object travels: its mirror is replaced whole."""
        return (self.read(name) or b"")[offset:]

    def list(self, prefix: str) -> list[str]:
        """Return the names of the files below a folder, sorted. Raises: StoreError as `read`."""
        place = self.describe(prefix.rstrip("/")) if prefix else join_uri(self._root, self._traces)
        folder = prefix.rstrip("/")
        found = self._objects.list(place)
        return sorted("/".join(filter(None, [folder, stored.uri[len(place) + 1 :]])) for stored in found)

    def describe(self, name: str) -> str:
        """Return a file's URI."""
        match = _CHECKPOINT.fullmatch(name)
        if match is not None:
            return f"{self._root}/{self._run}_step{int(match['step'])}{match['rest'] or ''}"
        return join_uri(self._root, *filter(None, [self._traces]), name)
