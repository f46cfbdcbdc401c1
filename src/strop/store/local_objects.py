"""Single objects below a directory: a store on a disk, or on a file system that machines share.

Covered: kill at any moment, full disk, names with spaces. Not covered: two writers of one object.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from strop.errors import RemoteDenied, RemoteMissing
from strop.io.atomic import (
    explain_write_failure,
    fsync_directory,
    make_directory,
    walk_files,
    write_bytes_atomically,
)
from strop.io.leftovers import LEFTOVER_PATTERN, partial_path_of, remove_leftovers
from strop.io.lock import FileLock
from strop.store.contract import StoredObject, altered, missing
from strop.store.uris import normalize_uri


class LocalObjects:
    """Files, whose URIs are their paths. Safe for several threads; all methods raise StoreErrors."""

    def find(self, uri: str) -> StoredObject | None:
        """Return an object's size and version, or None if there is no such object."""
        path = Path(uri)
        return _describe(path, path.stat()) if path.is_file() else None

    def list(self, uri: str) -> Iterator[StoredObject]:
        """Yield all objects below a URI, by name."""
        for path, stat in walk_files(Path(normalize_uri(uri))):
            if LEFTOVER_PATTERN.search(path.name) is None:
                yield _describe(path, stat)

    def read(self, uri: str) -> bytes:
        """Return a small object. Raises: RemoteMissing."""
        with _errors_explained(uri):
            return Path(uri).read_bytes()

    def read_versioned(self, uri: str) -> tuple[bytes, str] | None:
        """Return a small object and its version for `write_if`, or None."""
        try:
            data = self.read(uri)
        except RemoteMissing:
            return None
        return data, hashlib.sha256(data).hexdigest()

    def write_if(self, uri: str, data: bytes, version: str | None) -> bool:
        """Write a small object if it still has this version (None: does not exist); else return False.

        The lock beside the file holds across machines if the file system's locks do.
        """
        path = Path(uri)
        make_directory(path.parent)
        with FileLock(path.with_name(f".{path.name}.lock")):
            current = self.read_versioned(uri)
            if (None if current is None else current[1]) != version:
                return False
            write_bytes_atomically(path, data)
        return True

    def write(self, uri: str, data: bytes) -> None:
        """Write a small object; it appears whole or not at all."""
        make_directory(Path(uri).parent)
        write_bytes_atomically(Path(uri), data)

    def upload(self, path: Path, uri: str, sha256: str) -> None:
        """Send a file with this digest, which the store keeps."""
        target = Path(uri)
        make_directory(target.parent)
        remove_leftovers(target.parent)
        partial_path = partial_path_of(target)
        try:
            with _errors_explained(uri):
                _copy(path, partial_path, uri, sha256)
                os.replace(partial_path, target)
                fsync_directory(target.parent)
        finally:
            partial_path.unlink(missing_ok=True)

    def download(self, stored: StoredObject, path: Path, sha256: str | None) -> str:
        """Write an object to a new local file and return its digest.

        Raises: CorruptRecord if its size is not the stored one, or `sha256` is given and differs.
        """
        if (found := self.find(stored.uri)) is None or found.size_bytes != stored.size_bytes:
            raise (
                altered(stored.uri, f"it has not {stored.size_bytes} bytes") if found else missing(stored.uri)
            )
        with _errors_explained(str(path)):
            return _copy(Path(stored.uri), path, stored.uri, sha256)

    def digest(self, uri: str) -> str | None:
        """Return the SHA-256 of an object if the storage knows it without a transfer, else None."""
        with _errors_explained(uri):
            return _hash(Path(uri))

    def remove(self, uri: str) -> None:
        """Remove one object, if it exists."""
        with _errors_explained(uri):
            Path(uri).unlink(missing_ok=True)

    def remove_below(self, uri: str) -> None:
        """Remove all objects below a URI, if any."""
        with _errors_explained(uri):
            if Path(uri).exists():
                shutil.rmtree(uri)

    def list_folders(self, uri: str) -> Iterator[str]:
        """Yield the names of the folders directly below a URI that contain objects, if any."""
        for path in sorted(Path(normalize_uri(uri)).glob("*/")):
            if path.is_dir() and next(self.list(str(path)), None) is not None:
                yield path.name

    def begin_upload(self, uri: str) -> None:
        """Begin an upload in parts that `give_up_uploads` discards: a test of the rights to both."""

    def give_up_uploads(self, uri: str) -> None:
        """Discard unfinished uploads below a URI: call it as its only writer."""
        for parent, _, _ in os.walk(normalize_uri(uri)):
            remove_leftovers(Path(parent))


def _describe(path: Path, stat: os.stat_result) -> StoredObject:
    return StoredObject(uri=str(path), size_bytes=stat.st_size, version=str(stat.st_mtime_ns))


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _copy(source: Path, target: Path, uri: str, sha256: str | None) -> str:
    """Copy a file durably and return its digest. Raises: CorruptRecord if it differs; OSError."""
    shutil.copyfile(source, target)
    with target.open("rb") as file:
        os.fsync(file.fileno())
    found = _hash(target)
    if sha256 not in {None, found}:
        target.unlink()
        raise altered(uri, f"its SHA-256 begins {found[:12]}")
    return found


@contextmanager
def _errors_explained(uri: str) -> Iterator[None]:
    """Raise strop's errors instead of the system's."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise missing(uri) from error
    except PermissionError as error:
        raise RemoteDenied(
            f"{uri} is refused ({error})",
            allowed="files that this user may read and write",
            next_step="mend its permissions, or the disk it lies on",
        ) from error
    except OSError as error:
        raise explain_write_failure(error, Path(uri)) from error
