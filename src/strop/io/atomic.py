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
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from stat import S_ISREG
from typing import Any, BinaryIO

from strop.errors import CorruptRecord, StoreError
from strop.io.leftovers import partial_path_of

MANIFEST_NAME = "COMPLETE"
MANIFEST_FORMAT = 1
# Torch and safetensors report a full disk as text or not at all, so the free space is checked too.
FULL_BELOW_BYTES = 1 << 20
FULL_DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT})

FileOpener = Callable[[Path], BinaryIO]


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
        content = {
            "format": MANIFEST_FORMAT,
            "files": {name: asdict(record) for name, record in sorted(self.files.items())},
            "facts": dict(self.facts),
        }
        return json.dumps(content, indent=1).encode()


def digest_of_files(sha256_by_name: Mapping[str, str]) -> str:
    """Return one SHA-256 for a set of named file digests, independent of their order."""
    lines = [f"{sha256_by_name[name]}  {name}\n" for name in sorted(sha256_by_name)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def write_bytes_atomically(path: Path, data: bytes, *, open_file: FileOpener | None = None) -> None:
    """Write a file so that a reader finds the old bytes or all of the new ones.

    `open_file` opens the temporary file: with other permissions, or on a disk that a test lets fail.

    Raises: StoreError if the bytes cannot be written; the old file stays and nothing else is left.
    """
    partial_path = partial_path_of(path)
    try:
        with open_file(partial_path) if open_file else partial_path.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        # os.replace, not remove and rename: a reader in between would find no file.
        os.replace(partial_path, path)
        fsync_directory(path.parent)
    except OSError as error:
        raise explain_write_failure(error, path) from error
    finally:
        partial_path.unlink(missing_ok=True)


class AtomicDirectory:
    """Fill a directory that appears under its name complete, or not at all.

    Use: `with AtomicDirectory(target) as partial: (partial / "x").write_bytes(...)`. Leaving the
    block seals and publishes; an exception inside removes everything and is re-raised, as StoreError
    if the disk was the cause.
    """

    def __init__(self, path: Path, *, facts: Mapping[str, Any] | None = None, replace: bool = False) -> None:
        self.path = path
        self.manifest: Manifest | None = None
        """Set once the directory is published."""
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
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._partial_path.mkdir()
        except OSError as error:
            raise explain_write_failure(error, self.path) from error
        return self._partial_path

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Publish, or clean up after an error."""
        try:
            if error is None:
                self.manifest = seal_directory(self._partial_path, facts=self.facts)
                publish_directory(self._partial_path, self.path, replace=self._replace)
                fsync_directory(self.path.parent)
        except OSError as failure:
            raise explain_write_failure(failure, self.path) from failure
        finally:
            # Checked before the clean-up, which frees space again.
            is_full = isinstance(error, Exception) and is_disk_full(error, self.path.parent)
            shutil.rmtree(self._partial_path, ignore_errors=True)
        if is_full and isinstance(error, Exception) and not isinstance(error, StoreError):
            raise explain_write_failure(error, self.path, is_full=True) from error


def seal_directory(
    path: Path, *, facts: Mapping[str, Any] | None = None, known_sha256: Mapping[str, str] | None = None
) -> Manifest:
    """Make every file of a directory durable and write its manifest last.

    `known_sha256`: digests by name that the caller has just computed; these files are not read.

    Raises: StoreError for a link or another file that is not regular; OSError as is.
    """
    names = []
    for entry in sorted(path.rglob("*")):
        if entry.is_symlink() or not (entry.is_file() or entry.is_dir()):
            raise StoreError(
                f"{entry} is not a plain file, so its bytes cannot be promised",
                allowed="plain files and directories",
                next_step="copy the file that it points to",
            )
        if entry.is_file():
            names.append(entry.relative_to(path).as_posix())
            with entry.open("rb") as file:
                os.fsync(file.fileno())
    known = known_sha256 or {}
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


def is_complete(path: Path) -> bool:
    """Whether a directory has its completeness marker. Reads no file; see `verify_directory`."""
    return (path / MANIFEST_NAME).is_file()


def read_manifest(path: Path, *, remedy: str | None = None) -> Manifest:
    """Read the manifest of a complete directory without checking the files.

    `remedy`: the advice for a damaged one; None: remove it, or fetch it again.

    Raises: StoreError if there is none; CorruptRecord if it cannot be read.
    """
    manifest_path = path / MANIFEST_NAME
    try:
        data = manifest_path.read_bytes()
    except OSError as error:
        raise StoreError(
            f"{path} is incomplete: it has no readable {MANIFEST_NAME} ({error.strerror})",
            allowed=f"a directory whose {MANIFEST_NAME} was written last",
            next_step="use an earlier complete one, or write it again",
        ) from error
    return parse_manifest(data, str(manifest_path), remedy or _remedy(path))


def parse_manifest(data: bytes, place: str, remedy: str | None = None) -> Manifest:
    """Parse the content of a COMPLETE file; `place` is its path, for messages.

    Raises: CorruptRecord if it is no manifest, or lists a file outside its own directory.
    """
    remedy = remedy or _remedy(place.rpartition("/")[0])
    try:
        content = json.loads(data)
        manifest = Manifest(
            files={name: FileRecord(**record) for name, record in content["files"].items()},
            facts=content["facts"],
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _corrupt(place, f"is not a manifest ({error})", "the JSON that strop wrote", remedy) from error
    for name in manifest.files:
        # Others may write to its store, so a name must not lead out of the directory.
        if not is_inner_name(name):
            raise _corrupt(place, f"promises {name!r}", "names of files below the directory", remedy)
    return manifest


def is_inner_name(name: str) -> bool:
    """Whether a name in a record stays below its directory, and is not the manifest's."""
    parts = name.split("/")
    return not ({"", ".", ".."} & set(parts)) and "\0" not in name and name != MANIFEST_NAME


def verify_directory(path: Path, *, can_trust_mtime: bool = False, remedy: str | None = None) -> Manifest:
    """Compare every file of a directory with its manifest and return the manifest.

    With `can_trust_mtime`, a file with its sealed size and modification time is not read.
    `remedy`: the advice for a damaged directory; None: remove it, or fetch it again.

    Raises: StoreError if the directory is incomplete; CorruptRecord naming the first bad file.
    """
    remedy = remedy or _remedy(path)
    manifest = read_manifest(path, remedy=remedy)
    names_to_read = []
    for name, record in sorted(manifest.files.items()):
        try:
            info = (path / name).stat()
        except OSError as error:
            raise _unread(path / name, error, remedy) from error
        if info.st_size != record.size_bytes:
            allowed = f"{record.size_bytes}, as its manifest promises"
            raise _corrupt(path / name, f"has {info.st_size} bytes", allowed, remedy)
        if not (can_trust_mtime and info.st_mtime_ns == record.mtime_ns):
            names_to_read.append(name)
    for name, sha256 in hash_files(path, names_to_read, remedy=remedy).items():
        promised = manifest.files[name].sha256
        if sha256 != promised:
            allowed = f"{promised[:12]}, as its manifest promises"
            raise _corrupt(path / name, f"has SHA-256 {sha256[:12]}", allowed, remedy)
    return manifest


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


def hash_files(directory: Path, names: list[str], *, remedy: str | None = None) -> dict[str, str]:
    """Return the SHA-256 of files by name, two at a time, since hashing releases the interpreter lock.

    Raises: CorruptRecord if one cannot be read.
    """
    remedy = remedy or _remedy(directory)
    with ThreadPoolExecutor(max_workers=2) as pool:
        digests = pool.map(lambda name: _hash_file(directory / name, remedy), names)
        return dict(zip(names, digests, strict=True))


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


def is_disk_full(error: Exception, directory: Path) -> bool:
    """Whether a failed write under `directory` was caused by a full disk."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in FULL_DISK_ERRORS
    if os.strerror(errno.ENOSPC) in str(error):
        return True
    return shutil.disk_usage(directory).free < FULL_BELOW_BYTES


def nearest_existing(path: Path) -> Path:
    """Return the path if it exists, else its nearest existing parent."""
    absolute = path.absolute()
    return next(place for place in (absolute, *absolute.parents) if place.exists())


def explain_write_failure(error: Exception, path: Path, *, is_full: bool = False) -> StoreError:
    """Build the StoreError for a write of `path` that failed."""
    if is_full or (isinstance(error, OSError) and error.errno in FULL_DISK_ERRORS):
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
        next_step="mend the permissions or choose another place; what was there before is intact",
    )


def _hash_file(path: Path, remedy: str) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise _unread(path, error, remedy) from error


def _unread(path: Path, error: OSError, remedy: str) -> CorruptRecord:
    return _corrupt(path, f"cannot be read ({error.strerror})", "every file its manifest promises", remedy)


def _corrupt(place: Path | str, fault: str, allowed: str, remedy: str) -> CorruptRecord:
    return CorruptRecord(f"{place} {fault}", allowed=allowed, next_step=remedy)


def _remedy(directory: Path | str) -> str:
    """Return the advice for a damaged directory, which is one record and is removed as a whole."""
    return f"use another complete record and remove {directory}, or fetch it again"


# From <linux/fs.h> and <fcntl.h>.
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


def publish_directory(partial_path: Path, path: Path, *, replace: bool) -> None:
    """Rename a finished directory to its name; with `replace`, an older one there is removed.

    Raises: OSError if the name is taken and may not be replaced.
    """
    if replace and path.exists():
        if not _exchange(partial_path, path):
            # No atomic exchange here (macOS, some network file systems). A kill between the two
            # renames leaves no directory under the name, and the old one as a leftover.
            aside_path = partial_path.with_name(partial_path.name + "-old")
            path.rename(aside_path)
            partial_path.rename(path)
            partial_path = aside_path
        shutil.rmtree(partial_path, ignore_errors=True)
        return
    partial_path.rename(path)


def _exchange(first_path: Path, second_path: Path) -> bool:
    """Swap two directories in one step; False where the system cannot."""
    if sys.platform != "linux":
        return False
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    first, second = os.fsencode(first_path), os.fsencode(second_path)
    return bool(renameat2(_AT_FDCWD, first, _AT_FDCWD, second, _RENAME_EXCHANGE) == 0)


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
