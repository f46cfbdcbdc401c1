"""s3:// URIs whose buckets are folders here: rehearsals without S3."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from strop.errors import RemoteMissing
from strop.store.contract import StoredObject
from strop.store.local_objects import LocalObjects
from strop.store.uris import parse_s3


class FolderObjects:
    """`JobObjects` of buckets below a folder."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        self._inner = LocalObjects()

    def path_of(self, uri: str) -> Path:
        """Return the file that stands for an object. Raises: ConfigError if it is no URI of S3."""
        place = parse_s3(uri)
        return self._root / place.bucket / place.key

    def find(self, uri: str) -> StoredObject | None:
        """Return what is known about one object, or None."""
        found = self._inner.find(str(self.path_of(uri)))
        return None if found is None else self._named(found)

    def list(self, uri: str) -> Iterator[StoredObject]:
        """Yield all objects below a URI, by name."""
        for stored in self._inner.list(str(self.path_of(uri))):
            yield self._named(stored)

    def read(self, uri: str) -> bytes:
        """Return a small object. Raises: RemoteMissing."""
        return self._inner.read(str(self.path_of(uri)))

    def write(self, uri: str, data: bytes) -> None:
        """Write a small object; it appears whole or not at all."""
        self._inner.write(str(self.path_of(uri)), data)

    def upload(self, path: Path, uri: str, sha256: str) -> None:
        """Send a file."""
        self._inner.upload(path, str(self.path_of(uri)), sha256)

    def download(self, stored: StoredObject, path: Path, sha256: str | None) -> str:
        """Write an object to a new local file and return its digest."""
        return self._inner.download(replace(stored, uri=str(self.path_of(stored.uri))), path, sha256)

    def digest(self, uri: str) -> str | None:
        """Return the digest of an object, None if there is none."""
        try:
            return self._inner.digest(str(self.path_of(uri)))
        except RemoteMissing:
            return None

    def remove(self, uri: str) -> None:
        """Remove one object; none is no error."""
        self._inner.remove(str(self.path_of(uri)))

    def _named(self, stored: StoredObject) -> StoredObject:
        return replace(stored, uri=f"s3://{Path(stored.uri).relative_to(self._root).as_posix()}")
