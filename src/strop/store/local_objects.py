"""Single objects below a directory: a store on a disk, or on a file system that machines share.

Covered: kill at any moment, full disk, names with spaces. Not covered: two writers of one object.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from strop.errors import RemoteDenied, RemoteMissing, StoreError
from strop.io.atomic import (
    explain_write_failure,
    fsync_directory,
    make_directory,
    walk_files,
    write_bytes_atomically,
)
from strop.io.leftovers import LEFTOVER_PATTERN, partial_path_of, remove_leftovers
from strop.io.lock import FileLock
from strop.store.contract import StoredObject
from strop.store.s3_client import altered, missing
from strop.store.uris import normalize_uri


class LocalObjects:
    """Files, whose URIs are their paths; see `Objects`."""

    def find(self, uri: str) -> StoredObject | None:
        """Stat a file."""
        path = Path(uri)
        return _describe(path, path.stat()) if path.is_file() else None

    def list(self, uri: str) -> Iterator[StoredObject]:
        """Walk a directory; leave out unfinished files."""
        for path, stat in walk_files(Path(normalize_uri(uri))):
            if LEFTOVER_PATTERN.search(path.name) is None:
                yield _describe(path, stat)

    def read(self, uri: str) -> bytes:
        """Read a file."""
        try:
            return Path(uri).read_bytes()
        except OSError as error:
            raise _explain_read(error, uri) from error

    def read_versioned(self, uri: str) -> tuple[bytes, str] | None:
        """Read a file; its version is its digest."""
        try:
            data = self.read(uri)
        except RemoteMissing:
            return None
        return data, hashlib.sha256(data).hexdigest()

    def write_if(self, uri: str, data: bytes, version: str | None) -> bool:
        """Write under a lock beside the file; it holds across machines if the file system's locks do."""
        path = Path(uri)
        make_directory(path.parent)
        with FileLock(path.with_name(f".{path.name}.lock")):
            current = self.read_versioned(uri)
            if (None if current is None else current[1]) != version:
                return False
            write_bytes_atomically(path, data)
        return True

    def write(self, uri: str, data: bytes) -> None:
        """Write a file atomically."""
        make_directory(Path(uri).parent)
        write_bytes_atomically(Path(uri), data)

    def upload(self, path: Path, uri: str, sha256: str) -> None:
        """Copy a file atomically, and check its digest."""
        target = Path(uri)
        make_directory(target.parent)
        remove_leftovers(target.parent)
        partial_path = partial_path_of(target)
        try:
            _copy(path, partial_path, uri, sha256)
            os.replace(partial_path, target)
            fsync_directory(target.parent)
        except OSError as error:
            raise explain_write_failure(error, target) from error
        finally:
            partial_path.unlink(missing_ok=True)

    def download(self, stored: StoredObject, path: Path, sha256: str | None) -> str:
        """Copy a file out."""
        if (found := self.find(stored.uri)) is None or found.size_bytes != stored.size_bytes:
            raise (
                altered(stored.uri, f"it has not {stored.size_bytes} bytes") if found else missing(stored.uri)
            )
        try:
            return _copy(Path(stored.uri), path, stored.uri, sha256)
        except OSError as error:
            raise explain_write_failure(error, path) from error

    def digest(self, uri: str) -> str | None:
        """Hash the file."""
        try:
            return _hash(Path(uri))
        except OSError as error:
            raise _explain_read(error, uri) from error

    def remove(self, uri: str) -> None:
        """Remove the file."""
        try:
            Path(uri).unlink(missing_ok=True)
        except OSError as error:
            raise explain_write_failure(error, Path(uri)) from error

    def remove_below(self, uri: str) -> None:
        """Remove the directory."""
        path = Path(normalize_uri(uri))
        try:
            if path.exists():
                shutil.rmtree(path)
        except OSError as error:
            raise explain_write_failure(error, path) from error

    def list_folders(self, uri: str) -> Iterator[str]:
        """List the directories that are not empty."""
        for path in sorted(Path(normalize_uri(uri)).glob("*/")):
            if path.is_dir() and next(self.list(str(path)), None) is not None:
                yield path.name

    def begin_upload(self, uri: str) -> None:
        """Do nothing: a file is written beside its place and renamed."""

    def give_up_uploads(self, uri: str) -> None:
        """Remove partial files of dead writers; living writers remove their own."""
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


def _explain_read(error: OSError, uri: str) -> StoreError:
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return missing(uri)
    return RemoteDenied(
        f"{uri} cannot be read ({error.strerror})",
        allowed="files that this user may read",
        next_step="mend its permissions, or the disk it lies on",
    )
