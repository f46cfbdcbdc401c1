"""The interface of stores: `Store` for callers, `Objects` for those who add another kind of place.

A record is a directory whose manifest COMPLETE was written last (`io/atomic.py`), here or in a
store. A directory without it does not exist for a reader, so a transfer may stop at any moment.
Single objects appear whole or not at all in every store that strop knows.
Not here: which source is asked first (`policy.py`), names of models and data sets in a store.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from strop.io.atomic import Manifest


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredObject:
    """One object in a store."""

    uri: str
    size_bytes: int
    version: str
    """Changes when the content does: an ETag, a modification time, a commit. No digest of the content."""
    sha256: str | None = None
    """Of the content, where the store keeps it; set when strop wrote the object."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """The files that a call moved, and those that were there already."""

    uri: str
    manifest: Manifest
    moved: tuple[str, ...] = field(default=())
    """Names of the files that were sent or fetched; all others of the manifest were there."""

    @property
    def moved_bytes(self) -> int:
        """Bytes that were sent or fetched."""
        return sum(self.manifest.files[name].size_bytes for name in self.moved)


class Store(Protocol):
    """Records and single files under URIs. Every call may be repeated, and goes on where it stopped.

    All raise RemoteMissing, RemoteDenied or RemoteUnreachable (StoreErrors) with the URI, the cause
    and what to do.
    """

    def get(self, uri: str, path: Path, *, replace: bool = False) -> Transfer:
        """Bring a record, or a single object, to a local path, with digests verified.

        `replace`: another complete record may stand at the path. A record that is the same is verified
        and kept.
        Raises: StoreError if the path is taken, or the record is incomplete; CorruptRecord if its bytes
            are not the promised ones.
        """
        ...

    def put(self, path: Path, uri: str, *, facts: Mapping[str, Any] | None = None) -> Transfer:
        """Send a file or a directory; files that are there with the same digest are not sent again.

        Raises: StoreError if another complete record is there.
        """
        ...

    def sync(self, path: Path, uri: str, *, facts: Mapping[str, Any] | None = None) -> Transfer:
        """Send like `put`; a complete record that is there is replaced, and incomplete meanwhile."""
        ...

    def list(self, uri: str) -> Iterator[StoredObject]:
        """Yield all objects below a URI by name, unfinished records included; none is no error."""
        ...

    def exists(self, uri: str) -> bool:
        """Whether a complete record or a single object is there."""
        ...


class Objects(Protocol):
    """What a place must offer for `RecordStore` to keep records in it. Safe for several threads."""

    def find(self, uri: str) -> StoredObject | None:
        """Return what is known about one object, or None."""
        ...

    def list(self, uri: str) -> Iterator[StoredObject]:
        """Yield all objects below a URI, by name."""
        ...

    def read(self, uri: str) -> bytes:
        """Return a small object. Raises: RemoteMissing."""
        ...

    def read_versioned(self, uri: str) -> tuple[bytes, str] | None:
        """Return a small object and its version for `write_if`, or None."""
        ...

    def write(self, uri: str, data: bytes) -> None:
        """Write a small object; it appears whole or not at all."""
        ...

    def write_if(self, uri: str, data: bytes, version: str | None) -> bool:
        """Write a small object if its version is still that one (None: it is not there); tell if it was."""
        ...

    def upload(self, path: Path, uri: str, sha256: str) -> None:
        """Send a file; what arrived is proven to have that digest before this returns."""
        ...

    def download(self, stored: StoredObject, path: Path, sha256: str | None) -> str:
        """Write an object to a new local file and return its digest.

        Raises: CorruptRecord if `sha256` is given and the content is another after several attempts.
        """
        ...

    def digest(self, uri: str) -> str | None:
        """Return the SHA-256 of an object as far as the place can tell without a transfer, else None."""
        ...

    def remove(self, uri: str) -> None:
        """Remove one object; none is no error."""
        ...

    def remove_below(self, uri: str) -> None:
        """Remove all objects below a URI; none is no error."""
        ...

    def list_folders(self, uri: str) -> Iterator[str]:
        """Yield the names directly below a URI that have objects below them; none is no error."""
        ...

    def give_up_uploads(self, uri: str) -> None:
        """Clear what unfinished uploads below a URI left, other writers' too: for its only writer."""
        ...
