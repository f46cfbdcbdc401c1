"""As much of a store's `Objects` as jobs are sent and read with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from strop.store.contract import StoredObject


class JobObjects(Protocol):
    """Objects of S3, or of folders that stand for its buckets. All raise StoreErrors."""

    def find(self, uri: str) -> StoredObject | None:
        """Return what is known about one object, or None."""

    def list(self, uri: str) -> Iterator[StoredObject]:
        """Yield all objects below a URI, by name."""

    def read(self, uri: str) -> bytes:
        """Return a small object. Raises: RemoteMissing."""

    def write(self, uri: str, data: bytes) -> None:
        """Write a small object; it appears whole or not at all."""

    def upload(self, path: Path, uri: str, sha256: str) -> None:
        """Send a file; what arrived is proven to have that digest before this returns."""

    def download(self, stored: StoredObject, path: Path, sha256: str | None) -> str:
        """Write an object to a new local file and return its digest."""

    def digest(self, uri: str) -> str | None:
        """Return the SHA-256 of an object as far as it is known without a transfer, else None."""

    def remove(self, uri: str) -> None:
        """Remove one object; none is no error."""
