"""What stores say of objects, and the errors that every kind of store has.

A record is a directory whose manifest COMPLETE was written last (`io/atomic.py`), here or in a
store. A directory without it does not exist for a reader, so a transfer may stop at any moment.
Single objects appear whole or not at all in every store that strop knows.
"""

from __future__ import annotations

from dataclasses import dataclass

from strop.errors import CorruptRecord, RemoteMissing
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


def missing(uri: str, cause: str = "there is no such object") -> RemoteMissing:
    """Build the error for an object that is not there."""
    return RemoteMissing(
        f"{uri} cannot be had: {cause}",
        allowed="an object or a record that was put there",
        next_step="check the URI, or send it there with `strop stage RUN.toml`",
    )


def altered(uri: str, cause: str) -> CorruptRecord:
    """Build the error for an object whose bytes are not those that were promised."""
    return CorruptRecord(
        f"{uri} is not what was promised: {cause}",
        allowed="an object of the promised size and SHA-256",
        next_step="start the same command again; if that fails, send it anew with `strop stage RUN.toml"
        " --replace`, for the store or the way to it is at fault",
    )
