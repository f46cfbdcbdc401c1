"""Records in a store: files in parallel, the manifest COMPLETE last, nothing moved twice.

Sending: a file that the store has with the promised digest is kept; after the last file, COMPLETE is written.
Fetching: files go to `NAME.incoming` beside the target; when all have their digests, the directory is sealed
and renamed. Either way a kill leaves a state that readers refuse and that the same call completes. The rules
are the same for every storage, so they are written once, over `Objects`.

A folder that another tool filled, such as `aws s3 sync`, has no COMPLETE and no digests: it is fetched as
listed, with a notice. The copy is a record that notes the version of each object.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from strop.errors import RemoteMissing, StoreError
from strop.io.atomic import (
    MANIFEST_NAME,
    FileRecord,
    Manifest,
    explain_write_failure,
    hash_files,
    is_complete,
    make_directory,
    parse_manifest,
    publish_directory,
    read_manifest,
    seal_directory,
    verify_directory,
)
from strop.io.leftovers import partial_path_of, remove_leftovers
from strop.io.lock import FileLock
from strop.io.notices import tell
from strop.store.contract import StoredObject, Transfer
from strop.store.local_objects import LocalObjects
from strop.store.s3_objects import S3Objects
from strop.store.uris import join_uri, normalize_uri

Objects = LocalObjects | S3Objects
NUM_FILES_AT_ONCE = 4
INCOMING_SUFFIX = ".incoming"
_VERSIONS = "versions"
"""The fact of a copy of another tool's folder: the version of each object that was fetched."""


class RecordStore:
    """Records and single files under URIs. Every call may be repeated, and resumes where it stopped.

    All calls raise RemoteMissing, RemoteDenied or RemoteUnreachable (StoreErrors) with the URI, the cause
    and the next step.
    """

    def __init__(self, objects: Objects) -> None:
        self.objects = objects

    def get(self, uri: str, path: Path, *, only: Sequence[str] = ()) -> Transfer:
        """Fetch a record, another tool's folder or a single object to a local path, and verify its digests.

        An identical copy is verified and kept, another complete record at the path is replaced.
        `only`: patterns of the files to fetch, whose * match no slash; the copy has these alone.
        Raises: StoreError if something else is at the path, or the record is incomplete; CorruptRecord if a
            size or a digest is wrong.
        """
        manifest = self.find_manifest(uri)
        if manifest is None:
            if (stored := self.objects.find(uri)) is not None:
                return self._get_object(stored, path)
            manifest = self._describe_foreign(uri)
            tell(f"{uri} has no {MANIFEST_NAME}: another tool filled it, and it is used as it is")
        manifest = _select(manifest, only)
        if not manifest.files:
            raise self._not_there(join_uri(uri, *only[:1]))
        make_directory(path.parent)
        with FileLock(path.with_name(f"{path.name}.lock")):
            remove_leftovers(path.parent)
            if path.exists() and _is_same_record(path, manifest):
                return Transfer(uri=uri, manifest=read_manifest(path))
            incoming, files = path.with_name(path.name + INCOMING_SUFFIX), manifest.files
            make_directory(incoming)
            for entry in incoming.rglob("*"):
                # Left by an interrupted call for another record.
                if entry.is_file() and entry.relative_to(incoming).as_posix() not in files:
                    entry.unlink()
            moved = tuple(name for name in sorted(files) if not _is_kept(incoming / name, files[name]))

            def fetch(name: str) -> None:
                record = files[name]
                stored = StoredObject(uri=join_uri(uri, name), size_bytes=record.size_bytes, version="")
                self._download(stored, incoming / name, record.sha256 or None)

            side_by_side(fetch, moved)
            if _VERSIONS in manifest.facts and _select(self._describe_foreign(uri), only) != manifest:
                raise StoreError(
                    f"{uri} changed while it was read: somebody still sends to it",
                    allowed="a directory that nobody writes to meanwhile",
                    next_step="start the same command again when the sender is done",
                )
            known = {name: record.sha256 for name, record in files.items() if record.sha256}
            try:
                sealed = seal_directory(incoming, facts=manifest.facts, known_sha256=known)
                publish_directory(incoming, path, replace=True)
            except OSError as error:
                raise explain_write_failure(error, path) from error
        return Transfer(uri=uri, manifest=sealed, moved=moved)

    def put(
        self, path: Path, uri: str, *, facts: Mapping[str, Any] | None = None, replace: bool = False
    ) -> Transfer:
        """Send a directory as a record; files that the store has with the same digest are not sent again.

        `replace`: send over a complete record of other content, which is incomplete in the meantime.
        Raises: StoreError if another complete record is there.
        """
        manifest, paths = describe_directory(path, facts)
        return self.put_described(paths, uri, manifest, replace=replace)

    def sync(self, path: Path, uri: str, *, facts: Mapping[str, Any] | None = None) -> Transfer:
        """Send like `put`, and replace what is there."""
        return self.put(path, uri, facts=facts, replace=True)

    def put_described(
        self,
        paths: Mapping[str, Path],
        uri: str,
        manifest: Manifest,
        *,
        replace: bool = True,
        is_whole: bool = True,
        before_complete: Callable[[], None] = lambda: None,
    ) -> Transfer:
        """Send files that `describe_files` has described, then the manifest.

        `is_whole`: the record has exactly these files; otherwise other files of the one that is there stay.
        `before_complete` is called after the last file; if it raises, COMPLETE is not written.
        Raises: StoreError if the record has other content, unless `replace` is set.
        """
        old = self.find_manifest(uri)
        if old is not None and not replace:
            mine, theirs = manifest.sha256_by_name, old.sha256_by_name
            for name in sorted(mine.keys() | theirs.keys() if is_whole else mine.keys() & theirs.keys()):
                if mine.get(name) != theirs.get(name):
                    raise _other_record(uri, name)
        if old is not None and not is_whole:
            manifest = Manifest(files={**old.files, **manifest.files}, facts={**old.facts, **manifest.facts})
        names = self._names_to_send(uri, manifest, paths)
        is_complete_already = old is not None and old.sha256_by_name == manifest.sha256_by_name
        if old is not None and any(name in old.files for name in names):
            # A file is damaged or about to change: until it is sent, readers must refuse the record.
            self.objects.remove(join_uri(uri, MANIFEST_NAME))
            is_complete_already = False
        side_by_side(lambda name: self._upload(paths[name], join_uri(uri, name), manifest.files[name]), names)
        if not is_complete_already:
            before_complete()
            self.objects.write(join_uri(uri, MANIFEST_NAME), manifest.to_bytes())
        return Transfer(uri=uri, manifest=manifest, moved=names)

    def put_file(self, path: Path, uri: str) -> None:
        """Send one file without asking what it replaces."""
        self._upload(path, uri, describe_files({path.name: path})[path.name])

    def remove_record(self, uri: str) -> None:
        """Remove a record and all below it, COMPLETE first: a kill leaves no record that lacks files."""
        self.objects.remove(join_uri(uri, MANIFEST_NAME))
        self.objects.remove_below(uri)

    def plan_put(self, paths: Mapping[str, Path], uri: str) -> Transfer:
        """Return what `put_described` would send. Sends nothing."""
        manifest = Manifest(files=describe_files(paths))
        return Transfer(uri=uri, manifest=manifest, moved=self._names_to_send(uri, manifest, paths))

    def get_object(self, uri: str, path: Path) -> bool:
        """Fetch the current version of a single object; return False if the local copy has it already.

        Raises: StoreError if it changes meanwhile; RemoteMissing if it does not exist.
        """
        stored = self.objects.find(uri)
        if stored is None:
            raise self._not_there(uri)
        return bool(self._get_object(stored, path).moved)

    def find_manifest(self, uri: str) -> Manifest | None:
        """Return the manifest of a complete record, or None.

        Raises: CorruptRecord if it cannot be read.
        """
        place = join_uri(uri, MANIFEST_NAME)
        try:
            return parse_manifest(self.objects.read(place), place)
        except RemoteMissing:
            return None

    def list_names(self, uri: str) -> tuple[str, ...]:
        """Return the names of the files of a record, or of a folder that another tool filled.

        Raises: RemoteMissing if it is neither.
        """
        return tuple(sorted((self.find_manifest(uri) or self._describe_foreign(uri)).files))

    def verify(self, uri: str) -> Manifest:
        """Check that a record has every file it promises, with its size and known digest; moves nothing.

        Raises: RemoteMissing for the first file that does not.
        """
        manifest = self.find_manifest(uri)
        if manifest is None:
            raise self._not_there(uri)
        for name in self._names_to_send(uri, manifest, manifest.files):
            raise self._not_there(join_uri(uri, name))
        return manifest

    def list(self, uri: str) -> Iterator[StoredObject]:
        """Yield all objects below a URI."""
        return self.objects.list(uri)

    def _describe_foreign(self, uri: str) -> Manifest:
        """Describe a folder that another tool filled: its files without digests, and their versions.

        Raises: RemoteMissing if nothing is there, or it has digests: then strop sent it, and did not finish.
        """
        root = normalize_uri(uri)
        listed = {stored.uri.removeprefix(f"{root}/"): stored for stored in self.objects.list(uri)}
        smallest = min(listed.values(), key=lambda stored: stored.size_bytes, default=None)
        if smallest is None or self.objects.digest(smallest.uri) is not None:
            raise self._not_there(uri)
        files = {
            name: FileRecord(size_bytes=stored.size_bytes, sha256="", mtime_ns=0)
            for name, stored in listed.items()
        }
        versions = {name: stored.version for name, stored in listed.items()}
        return Manifest(files=files, facts={"uri": uri, _VERSIONS: versions})

    def _download(self, stored: StoredObject, path: Path, sha256: str | None) -> str:
        make_directory(path.parent)
        partial_path = partial_path_of(path)
        try:
            digest = self.objects.download(stored, partial_path, sha256)
            os.replace(partial_path, path)
        except OSError as error:
            raise explain_write_failure(error, path) from error
        finally:
            partial_path.unlink(missing_ok=True)
        return digest

    def _get_object(self, stored: StoredObject, path: Path) -> Transfer:
        remove_leftovers(path.parent)
        sha256 = stored.sha256 or self.objects.digest(stored.uri)
        is_kept = path.is_file() and hash_files(path.parent, [path.name])[path.name] == sha256
        if not is_kept:
            sha256 = self._download(stored, path, sha256)
        record = FileRecord(
            size_bytes=stored.size_bytes, sha256=sha256 or "", mtime_ns=path.stat().st_mtime_ns
        )
        manifest = Manifest(files={path.name: record})
        return Transfer(uri=stored.uri, manifest=manifest, moved=() if is_kept else (path.name,))

    def _names_to_send(self, uri: str, manifest: Manifest, names: Iterable[str]) -> tuple[str, ...]:
        """Return the names, sorted, whose objects lack the promised size or digest."""
        sizes = {stored.uri: stored.size_bytes for stored in self.objects.list(uri)}
        root = normalize_uri(uri)
        candidates = {name: join_uri(root, name) for name in sorted(names)}
        promised = manifest.files
        fitting = [
            name for name, place in candidates.items() if sizes.get(place) == promised[name].size_bytes
        ]
        found = side_by_side(lambda name: self.objects.digest(candidates[name]), fitting)
        digests = dict(zip(fitting, found, strict=True))
        return tuple(name for name in candidates if digests.get(name) != promised[name].sha256)

    def _upload(self, path: Path, uri: str, record: FileRecord) -> None:
        self.objects.upload(path, uri, record.sha256)
        stat = path.stat()
        if (stat.st_size, stat.st_mtime_ns) != (record.size_bytes, record.mtime_ns):
            self.objects.remove(uri)
            raise StoreError(
                f"{path} changed while it was sent to {uri}",
                allowed="files that no program writes to meanwhile",
                next_step="start the same command again when the writer is done",
            )

    def _not_there(self, uri: str) -> RemoteMissing:
        has_objects = next(iter(self.objects.list(uri)), None) is not None
        why = (
            f"it has objects and no {MANIFEST_NAME}" if has_objects else "it is not there as it was promised"
        )
        return RemoteMissing(
            f"{uri} is not in the store: {why}",
            allowed=f"a record that was sent whole, whose {MANIFEST_NAME} came last, or a single object",
            next_step="send it, or go on sending it, with `strop stage RUN.toml`",
        )


def describe_directory(
    path: Path, facts: Mapping[str, Any] | None = None
) -> tuple[Manifest, dict[str, Path]]:
    """Return the manifest of a directory, and its files by name.

    A complete record is verified, and its manifest is returned. Otherwise all files count, links followed.
    Raises: CorruptRecord if a complete record is damaged.
    """
    if is_complete(path):
        sealed = verify_directory(path, can_trust_mtime=True)
        paths = {name: path / name for name in sealed.files}
        # A copied record has the digests of its manifest but other times, which `_upload` compares.
        files = {
            name: replace(record, mtime_ns=paths[name].stat().st_mtime_ns)
            for name, record in sealed.files.items()
        }
        return Manifest(files=files, facts={**sealed.facts, **(facts or {})}), paths
    paths = {
        entry.relative_to(path).as_posix(): entry for entry in sorted(path.rglob("*")) if entry.is_file()
    }
    if not paths:
        raise _no_source(path)
    return Manifest(files=describe_files(paths), facts=dict(facts or {})), paths


def describe_files(paths: Mapping[str, Path]) -> dict[str, FileRecord]:
    """Hash files, and return their manifest entries by name."""
    # Times first: a later change is then noticed when the file has been sent.
    stats = {name: path.stat() for name, path in paths.items()}
    digests = hash_files(Path("/"), [str(path.absolute()) for path in paths.values()])
    return {
        name: FileRecord(
            size_bytes=stats[name].st_size,
            sha256=digests[str(path.absolute())],
            mtime_ns=stats[name].st_mtime_ns,
        )
        for name, path in paths.items()
    }


def _select(manifest: Manifest, only: Sequence[str]) -> Manifest:
    """Return the part of a manifest that matches one of some patterns; without patterns all of it."""
    files = {
        name: record
        for name, record in manifest.files.items()
        if not only or any(name.count("/") == one.count("/") and fnmatchcase(name, one) for one in only)
    }
    versions = manifest.facts.get(_VERSIONS)
    chosen = {} if versions is None else {_VERSIONS: {name: versions[name] for name in files}}
    return Manifest(files=files, facts={**manifest.facts, **chosen})


def _is_kept(path: Path, promised: FileRecord) -> bool:
    """Whether an interrupted call has already fetched this whole file."""
    if not path.is_file() or path.stat().st_size != promised.size_bytes:
        return False
    return hash_files(path.parent, [path.name])[path.name] == promised.sha256


def _is_same_record(path: Path, manifest: Manifest) -> bool:
    """Whether the record at the target is the wanted one, undamaged; False: it is replaced."""
    if not is_complete(path):
        raise StoreError(
            f"{path} exists already and is no record",
            allowed="a name that is free, or a complete record",
            next_step=f"choose another name or remove {path.name} first",
        )
    try:
        here = verify_directory(path, can_trust_mtime=True)
    except StoreError:
        return False
    if _VERSIONS in manifest.facts:
        return bool(here.facts.get(_VERSIONS) == manifest.facts[_VERSIONS])
    return here.sha256_by_name == manifest.sha256_by_name


def side_by_side(action: Callable[[str], Any], names: Iterable[str]) -> list[Any]:
    """Call an action with every name, a few at a time, and return the results; the first error ends it."""
    with ThreadPoolExecutor(NUM_FILES_AT_ONCE, thread_name_prefix="strop-store") as pool:
        futures = [pool.submit(action, name) for name in names]
        try:
            return [future.result() for future in futures]
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _other_record(uri: str, name: str) -> StoreError:
    return StoreError(
        f"{uri} holds a complete record of other content: {name} differs",
        allowed="a place that is free, or that has these very files",
        next_step="pin the revision that is there, or replace it with `strop stage RUN.toml --replace`",
    )


def _no_source(path: Path) -> StoreError:
    return StoreError(
        f"{path} cannot be sent: there is no file",
        allowed="a file, or a directory with at least one",
        next_step="correct the path",
    )
