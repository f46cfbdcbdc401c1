"""Writes that are complete or absent, and directories that prove their own completeness.

A file is written under a temporary name, fsynced and renamed. A directory is filled under a temporary name,
every part is fsynced, a manifest named COMPLETE with sizes and digests is written last, and one rename
publishes it. A kill at any moment leaves the old state, the new state, or a `.partial-` leftover that nothing
reads (`strop.io.leftovers` removes those).

Covered: kill at any point, power loss after return, full disk, flipped or missing bytes.
Not covered: file systems whose rename is not atomic; two writers of one directory (take a
`FileLock` first); files added to a complete directory by hand, which are ignored.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from stat import S_ISREG
from typing import Any

from strop.errors import CorruptRecord, StoreError
from strop.io.leftovers import partial_path_of

MANIFEST_NAME = "COMPLETE"
# Torch and safetensors report a full disk as text or not at all, so the free space is checked too.
_FULL_BELOW_BYTES = 1 << 20
_FULL_DISK = frozenset({errno.ENOSPC, errno.EDQUOT})
_RENAME_EXCHANGE, _AT_FDCWD = 2, -100
"""From <linux/fs.h> and <fcntl.h>."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """A manifest's record of one file."""

    size_bytes: int
    sha256: str
    mtime_ns: int
    """Modification time at sealing; a repeated check may skip unchanged files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The content of a COMPLETE file."""

    files: Mapping[str, FileRecord]
    """By path relative to the directory, with forward slashes."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Facts for readers; JSON values."""

    @property
    def digest(self) -> str:
        """SHA-256 over the sorted names and digests of all files."""
        return digest_of_files(self.sha256_by_name)

    @property
    def size_bytes(self) -> int:
        """Total size of all files."""
        return sum(record.size_bytes for record in self.files.values())

    @property
    def sha256_by_name(self) -> dict[str, str]:
        """The digest of every file."""
        return {name: record.sha256 for name, record in self.files.items()}

    def to_bytes(self) -> bytes:
        """Return the content of the COMPLETE file."""
        files = {name: asdict(record) for name, record in sorted(self.files.items())}
        return json.dumps({"format": 1, "files": files, "facts": dict(self.facts)}, indent=1).encode()


def digest_of_files(sha256_by_name: Mapping[str, str]) -> str:
    """Return one SHA-256 for a set of named file digests, independent of their order."""
    lines = [f"{sha256_by_name[name]}  {name}\n" for name in sorted(sha256_by_name)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def write_bytes_atomically(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Write a file so that a reader finds the old bytes or all of the new ones.

    Raises: StoreError if the bytes cannot be written; the old file stays and nothing else is left.
    """
    partial_path = partial_path_of(path)
    try:
        with os.fdopen(os.open(partial_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        # os.replace, not remove and rename: a reader in between would find no file.
        os.replace(partial_path, path)
        fsync_directory(path.parent)
    except OSError as error:
        raise explain_write_failure(error, path) from error
    finally:
        with suppress(OSError):
            partial_path.unlink()


class AtomicDirectory:
    """Fill a directory that appears under its name complete, or not at all.

    Use: `with AtomicDirectory(target) as partial: (partial / "x").write_bytes(...)`. Leaving the
    block seals and publishes; an exception inside removes everything and is re-raised, as StoreError
    if the disk was the cause.
    """

    def __init__(self, path: Path, *, facts: Mapping[str, Any] | None = None, replace: bool = False) -> None:
        self.path = path
        self.facts = dict(facts or {})
        """Further contents of the manifest; may be extended until the directory is published."""
        self._replace = replace
        self._partial_path = partial_path_of(path)

    def __enter__(self) -> Path:
        """Create the temporary directory and return it.

        Raises: StoreError if the target exists and may not be replaced, or cannot be created.
        """
        if self.path.exists() and not self._replace:
            raise StoreError(
                f"{self.path} exists already",
                allowed="a name that is free, since a complete record is never overwritten",
                next_step=f"choose another name or remove {self.path.name} first",
            )
        make_directory(self._partial_path)
        return self._partial_path

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Publish, or clean up after an error."""
        try:
            if error is None:
                seal_directory(self._partial_path, facts=self.facts)
                publish_directory(self._partial_path, self.path, replace=self._replace)
            # Before the clean-up, which frees space again.
            elif isinstance(error, Exception) and _is_disk_full(error, self.path.parent):
                raise explain_write_failure(OSError(errno.ENOSPC, str(error)), self.path) from error
        except OSError as failure:
            raise explain_write_failure(failure, self.path) from failure
        finally:
            shutil.rmtree(self._partial_path, ignore_errors=True)


def seal_directory(
    path: Path, *, facts: Mapping[str, Any] | None = None, known_sha256: Mapping[str, str] | None = None
) -> Manifest:
    """Make every file of a directory durable and write its manifest last.

    `known_sha256`: digests by name that the caller has just computed; these files are not read.

    Raises: StoreError for a link or another file that is not regular; OSError as is.
    """
    entries = [entry for entry in sorted(path.rglob("*")) if entry.is_symlink() or not entry.is_dir()]
    for entry in entries:
        if entry.is_symlink() or not entry.is_file():
            raise StoreError(
                f"{entry} is not a plain file, so its bytes cannot be promised",
                allowed="plain files and directories",
                next_step="copy the file that it points to",
            )
        with entry.open("rb") as file:
            os.fsync(file.fileno())
    names, known = [entry.relative_to(path).as_posix() for entry in entries], known_sha256 or {}
    digests = {**known, **hash_files(path, [name for name in names if name not in known])}
    stats = {name: (path / name).stat() for name in names}
    files = {
        name: FileRecord(size_bytes=stat.st_size, sha256=digests[name], mtime_ns=stat.st_mtime_ns)
        for name, stat in stats.items()
    }
    manifest = Manifest(files=files, facts=dict(facts or {}))
    for directory, _, _ in os.walk(path, topdown=False):
        fsync_directory(Path(directory))
    write_bytes_atomically(path / MANIFEST_NAME, manifest.to_bytes())
    return manifest


def publish_directory(partial_path: Path, path: Path, *, replace: bool) -> None:
    """Rename a finished directory to its name, durably; with `replace`, an older one there is removed.

    Raises: OSError if the name is taken and may not be replaced.
    """
    old_path = partial_path if replace and path.exists() else None
    if old_path is None:
        partial_path.rename(path)
    elif not _exchange(partial_path, path):
        # No atomic exchange here (macOS, some network file systems). A kill between the two renames leaves no
        # directory under the name, and the old one as a leftover.
        old_path = partial_path.with_name(partial_path.name + "-old")
        path.rename(old_path)
        partial_path.rename(path)
    fsync_directory(path.parent)
    if old_path is not None:
        shutil.rmtree(old_path, ignore_errors=True)


def _exchange(first_path: Path, second_path: Path) -> bool:
    """Swap two directories in one step; False where the system cannot."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if sys.platform == "linux" else None
    first, second = os.fsencode(first_path), os.fsencode(second_path)
    return call is not None and call(_AT_FDCWD, first, _AT_FDCWD, second, _RENAME_EXCHANGE) == 0


def remove_directory(path: Path) -> None:
    """Remove a directory so that a kill in between leaves no incomplete one under its name.

    Raises: StoreError if it cannot be renamed.
    """
    aside_path = partial_path_of(path)
    try:
        path.rename(aside_path)
    except OSError as error:
        raise explain_write_failure(error, path) from error
    shutil.rmtree(aside_path, ignore_errors=True)


def is_complete(path: Path) -> bool:
    """Whether a directory has its completeness marker. Reads no file; see `verify_directory`."""
    return (path / MANIFEST_NAME).is_file()


def read_manifest(path: Path, remedy: str | None = None) -> Manifest:
    """Read the manifest of a complete directory without checking the files.

    Raises: StoreError if there is none; CorruptRecord if it cannot be read.
    """
    try:
        data = (path / MANIFEST_NAME).read_bytes()
    except OSError as error:
        raise StoreError(
            f"{path} is incomplete: it has no readable {MANIFEST_NAME} ({error.strerror})",
            allowed=f"a directory whose {MANIFEST_NAME} was written last",
            next_step="use an earlier complete one, or write it again",
        ) from error
    return parse_manifest(data, str(path / MANIFEST_NAME), remedy)


def parse_manifest(data: bytes, place: str, remedy: str | None = None) -> Manifest:
    """Parse the content of a COMPLETE file; `place` is its path, for messages.

    Raises: CorruptRecord if it is no manifest, or lists a file outside its own directory.
    """
    try:
        content = json.loads(data)
        files = {name: FileRecord(**record) for name, record in content["files"].items()}
        manifest = Manifest(files=files, facts=content["facts"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _corrupt(place, f"is not a manifest ({error})", remedy) from error
    for name in files:
        # Others may write to its store, so a name must not lead out of the directory.
        if not is_inner_name(name):
            raise _corrupt(place, f"promises {name!r}, which is no file below the directory", remedy)
    return manifest


def is_inner_name(name: str) -> bool:
    """Whether a name in a record stays below its directory, and is not the manifest's."""
    return not ({"", ".", ".."} & set(name.split("/"))) and "\0" not in name and name != MANIFEST_NAME


def verify_directory(path: Path, *, can_trust_mtime: bool = False, remedy: str | None = None) -> Manifest:
    """Compare every file of a directory with its manifest and return the manifest.

    With `can_trust_mtime`, a file with its sealed size and modification time is not read.
    `remedy`: the advice for a damaged directory; None: remove it, or fetch it again.

    Raises: StoreError if the directory is incomplete; CorruptRecord naming the first bad file.
    """
    manifest = read_manifest(path, remedy)
    names_to_read = []
    for name, record in sorted(manifest.files.items()):
        try:
            info = (path / name).stat()
        except OSError as error:
            raise _corrupt(path / name, f"cannot be read ({error.strerror})", remedy) from error
        if info.st_size != record.size_bytes:
            fault = f"has {info.st_size} bytes, and its manifest promises {record.size_bytes}"
            raise _corrupt(path / name, fault, remedy)
        if not (can_trust_mtime and info.st_mtime_ns == record.mtime_ns):
            names_to_read.append(name)
    for name, sha256 in hash_files(path, names_to_read).items():
        if sha256 != manifest.files[name].sha256:
            raise _corrupt(path / name, f"has SHA-256 {sha256[:12]}, and its manifest another", remedy)
    return manifest


def hash_files(directory: Path, names: Sequence[str]) -> dict[str, str]:
    """Return the SHA-256 of files by name, two at a time, since hashing releases the interpreter lock.

    Raises: CorruptRecord if one cannot be read.
    """

    def hash_file(name: str) -> str:
        try:
            with (directory / name).open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise _corrupt(directory / name, f"cannot be read ({error.strerror})") from error

    with ThreadPoolExecutor(max_workers=2) as pool:
        return dict(zip(names, pool.map(hash_file, names), strict=True))


def walk_files(root: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield every file below a directory with its status, sorted by path; skip files removed meanwhile.

    Not `Path.rglob`, which in Python 3.11 and 3.12 raises FileNotFoundError if a directory is removed
    meanwhile.
    """
    for path in sorted(Path(parent) / name for parent, _, names in os.walk(root) for name in names):
        with suppress(OSError):
            info = path.stat()
            if S_ISREG(info.st_mode):
                yield path, info


def make_directory(path: Path) -> None:
    """Make a directory with its parents if it is missing. Raises: StoreError if it cannot be made."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise explain_write_failure(error, path) from error


def fsync_directory(path: Path) -> None:
    """Make the entries of a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def nearest_existing(path: Path) -> Path:
    """Return the path if it exists, else its nearest existing parent."""
    absolute = path.absolute()
    return next(place for place in (absolute, *absolute.parents) if place.exists())


def explain_write_failure(error: OSError, path: Path) -> StoreError:
    """Build the StoreError for a write of `path` that failed."""
    if error.errno in _FULL_DISK:
        existing = nearest_existing(path)
        free_bytes = shutil.disk_usage(existing).free
        return StoreError(
            f"the disk is full: {path} could not be written "
            f"({free_bytes / 1e6:.1f} MB free under {existing})",
            allowed="room for the whole record; what was there before is intact",
            next_step="free space there or keep runs on another disk, then start the same command again",
        )
    return StoreError(
        f"{path} could not be written ({error})",
        allowed="a place that this user may write to",
        next_step="mend the permissions or choose another place (STROP_CACHE moves the cache); what was there"
        " before is intact",
    )


def _is_disk_full(error: Exception, directory: Path) -> bool:
    if isinstance(error, StoreError):
        return False  # It has its own message.
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _FULL_DISK
    is_said = os.strerror(errno.ENOSPC) in str(error)
    return is_said or shutil.disk_usage(directory).free < _FULL_BELOW_BYTES


def _corrupt(place: Path | str, fault: str, remedy: str | None = None) -> CorruptRecord:
    folder = str(place).rpartition("/")[0]
    return CorruptRecord(
        f"{place} {fault}",
        allowed="every file as the manifest of its directory promises it",
        next_step=remedy or f"use another complete record and remove {folder}, or fetch it again",
    )
