"""What each kind of storage gives to `RecordStore`, and what it says of objects.

A record is a directory whose manifest COMPLETE was written last (`io/atomic.py`), here or in a
store. A directory without it does not exist for a reader, so a transfer may stop at any moment.
Single objects appear whole or not at all in every store that strop knows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from strop.io.atomic import Manifest


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredObject:
    """One object in a store."""

    uri: str
    size_bytes: int
    version: str
    """Changes with the content: an ETag or a modification time. Not a digest of the content."""
    sha256: str | None = None
    """SHA-256 of the content, if the store keeps it; strop sets it on the objects that it writes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """The files that a call moved, and those that were there already."""

    uri: str
    manifest: Manifest
    moved: tuple[str, ...] = ()
    """Names of the files that were sent or fetched; all others of the manifest were there."""

    @property
    def moved_bytes(self) -> int:
        """Bytes that were sent or fetched."""
        return sum(self.manifest.files[name].size_bytes for name in self.moved)


class Objects(Protocol):
    """The operations on one kind of storage that `RecordStore` needs. Safe for several threads."""

    def find(self, uri: str) -> StoredObject | None:
        """Return an object's size and version, or None if there is no such object."""

    def list(self, uri: str) -> Iterator[StoredObject]:
        """Yield all objects below a URI, by name."""

    def read(self, uri: str) -> bytes:
        """Return a small object. Raises: RemoteMissing."""

    def read_versioned(self, uri: str) -> tuple[bytes, str] | None:
        """Return a small object and its version for `write_if`, or None."""

    def write(self, uri: str, data: bytes) -> None:
        """Write a small object; it appears whole or not at all."""

    def write_if(self, uri: str, data: bytes, version: str | None) -> bool:
        """Write a small object if it still has this version (None: does not exist); else return False."""

    def upload(self, path: Path, uri: str, sha256: str) -> None:
        """Send a file with this digest, which the store keeps."""

    def download(self, stored: StoredObject, path: Path, sha256: str | None) -> str:
        """Write an object to a new local file and return its digest.

        Raises: CorruptRecord if its size is not the stored one, or `sha256` is given and differs.
        """

    def digest(self, uri: str) -> str | None:
        """Return the SHA-256 of an object if the storage knows it without a transfer, else None."""

    def remove(self, uri: str) -> None:
        """Remove one object, if it exists."""

    def remove_below(self, uri: str) -> None:
        """Remove all objects below a URI, if any."""

    def list_folders(self, uri: str) -> Iterator[str]:
        """Yield the names of the folders directly below a URI that contain objects, if any."""

    def begin_upload(self, uri: str) -> None:
        """Begin an upload that `give_up_uploads` discards: a test of the rights to both."""

    def give_up_uploads(self, uri: str) -> None:
        """Discard unfinished uploads below a URI, other writers' too: call it as its only writer."""
