"""Records in a store: files in parallel, the manifest COMPLETE last, nothing moved twice.

Sending: a file that the store has with the promised digest is kept; after the last file, COMPLETE is written.
Fetching: files go to `NAME.incoming` beside the target; when all have their digests, the directory is sealed
and renamed. Either way a kill leaves a state that readers refuse and that the same call completes. The rules
are the same for every storage, so they are written once, over `Objects`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from strop.errors import RemoteMissing, StoreError
from strop.io.atomic import (
    MANIFEST_NAME,
    FileRecord,
    Manifest,
    explain_write_failure,
    fsync_directory,
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
from strop.store.contract import Objects, StoredObject, Transfer
from strop.store.uris import join_uri, normalize_uri

NUM_FILES_AT_ONCE = 4
INCOMING_SUFFIX = ".incoming"


class RecordStore:
    """Records and single files under URIs. Every call may be repeated, and resumes where it stopped.

    All calls raise RemoteMissing, RemoteDenied or RemoteUnreachable (StoreErrors) with the URI, the cause
    and the next step.
    """

    def __init__(self, objects: Objects) -> None:
        self.objects = objects

    def get(self, uri: str, path: Path, *, replace: bool = False) -> Transfer:
        """Fetch a record, or a single object, to a local path and verify its digests.

        `replace`: overwrite another complete record at the path. An identical one is verified and kept.
        Raises: StoreError if the path is taken, or the record is incomplete; CorruptRecord if a digest
            is wrong.
        """
        manifest = self.find_manifest(uri)
        if manifest is None:
            stored = self.objects.find(uri)
            if stored is None:
                raise self._not_there(uri)
            return self._get_object(stored, path, replace=replace)
        make_directory(path.parent)
        with FileLock(path.with_name(f"{path.name}.lock")):
            remove_leftovers(path.parent)
            if path.exists() and _is_same_record(path, manifest, replace=replace):
                return Transfer(uri=uri, manifest=verify_directory(path, can_trust_mtime=True))
            incoming = path.with_name(path.name + INCOMING_SUFFIX)
            make_directory(incoming)
            # Remove what an interrupted call left of another record, its manifest included.
            for entry in incoming.rglob("*"):
                if entry.is_file() and entry.relative_to(incoming).as_posix() not in manifest.files:
                    entry.unlink()
            for entry in [entry for entry in incoming.iterdir() if entry.is_dir()]:
                if not any(below.is_file() for below in entry.rglob("*")):
                    shutil.rmtree(entry)
            files = manifest.files
            moved = tuple(name for name in sorted(files) if not _is_kept(incoming / name, files[name]))
            side_by_side(
                lambda name: self._fetch_file(join_uri(uri, name), incoming / name, files[name]), moved
            )
            try:
                sealed = seal_directory(incoming, facts=manifest.facts, known_sha256=manifest.sha256_by_name)
                publish_directory(incoming, path, replace=replace)
                fsync_directory(path.parent)
            except OSError as error:
                raise explain_write_failure(error, path) from error
        return Transfer(uri=uri, manifest=sealed, moved=moved)

    def get_file(self, uri: str, name: str, path: Path) -> Transfer:
        """Fetch one file of a record; a local copy with the promised digest is kept.

        Raises: RemoteMissing if the record does not exist, is incomplete, or has no such file.
        """
        manifest = self.find_manifest(uri)
        if manifest is None or name not in manifest.files:
            raise self._not_there(uri if manifest is None else join_uri(uri, name))
        promised = manifest.files[name]
        moved = () if _is_kept(path, promised) else (name,)
        if moved:
            self._fetch_file(join_uri(uri, name), path, promised)
        return Transfer(uri=uri, manifest=Manifest(files={name: promised}, facts=manifest.facts), moved=moved)

    def put(self, path: Path, uri: str, *, facts: Mapping[str, Any] | None = None) -> Transfer:
        """Send a file or a directory; files that the store has with the same digest are not sent again.

        Raises: StoreError if another complete record is there.
        """
        return self._send(path, uri, facts, replace=False)

    def sync(self, path: Path, uri: str, *, facts: Mapping[str, Any] | None = None) -> Transfer:
        """Send like `put`, but replace a complete record, which is incomplete in the meantime."""
        return self._send(path, uri, facts, replace=True)

    def put_files(
        self,
        paths: Mapping[str, Path],
        uri: str,
        *,
        facts: Mapping[str, Any] | None = None,
        replace: bool = False,
        is_whole: bool = False,
    ) -> Transfer:
        """Make a record of named files, or add them to an existing record.

        `is_whole`: the record has exactly these files; otherwise its other files stay.
        Raises: StoreError if the record has such a file with other content, unless `replace` is set.
        """
        manifest = Manifest(files=describe_files(paths), facts=dict(facts or {}))
        return self._send_files(paths, uri, manifest, replace=replace, is_whole=is_whole)

    def put_described(
        self,
        paths: Mapping[str, Path],
        uri: str,
        manifest: Manifest,
        *,
        before_complete: Callable[[], None] = lambda: None,
    ) -> Transfer:
        """Make a record of files whose digests are known, and replace another record.

        `before_complete` is called after the last file; if it raises, COMPLETE is not written.
        """
        return self._send_files(
            paths, uri, manifest, replace=True, is_whole=True, before_complete=before_complete
        )

    def put_file(self, path: Path, uri: str) -> None:
        """Send one file without asking what it replaces."""
        self._upload(path, uri, describe_files({path.name: path})[path.name])

    def remove_record(self, uri: str) -> None:
        """Remove a record and all below it, COMPLETE first: a kill leaves no record that lacks files."""
        self.objects.remove(join_uri(uri, MANIFEST_NAME))
        self.objects.remove_below(uri)

    def plan_put(self, paths: Mapping[str, Path], uri: str) -> Transfer:
        """Return what `put_files` would send. Sends nothing."""
        manifest = Manifest(files=describe_files(paths))
        return Transfer(
            uri=uri, manifest=manifest, moved=tuple(self._names_to_send(uri, manifest, list(paths)))
        )

    def get_object(self, uri: str, path: Path) -> bool:
        """Fetch the current version of a single object; return False if the local copy has it already.

        Raises: StoreError if it changes meanwhile; RemoteMissing if it does not exist.
        """
        stored = self.objects.find(uri)
        if stored is None:
            raise self._not_there(uri)
        return bool(self._get_object(stored, path, replace=True).moved)

    def find_manifest(self, uri: str) -> Manifest | None:
        """Return the manifest of a complete record, or None.

        Raises: CorruptRecord if it cannot be read.
        """
        place = join_uri(uri, MANIFEST_NAME)
        try:
            return parse_manifest(self.objects.read(place), place)
        except RemoteMissing:
            return None

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

    def exists(self, uri: str) -> bool:
        """Whether a complete record or an object is there."""
        return self.find_manifest(uri) is not None or self.objects.find(uri) is not None

    def _fetch_file(self, uri: str, path: Path, promised: FileRecord) -> None:
        stored = self.objects.find(uri)
        if stored is None or stored.size_bytes != promised.size_bytes:
            raise self._not_there(uri)
        self._download(stored, path, promised.sha256)

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

    def _get_object(self, stored: StoredObject, path: Path, *, replace: bool) -> Transfer:
        if path.exists() and not replace:
            raise _taken(path)
        remove_leftovers(path.parent)
        promised = stored.sha256 or self.objects.digest(stored.uri)
        is_kept = path.is_file() and hash_files(path.parent, [path.name])[path.name] == promised
        if not is_kept:
            promised = self._download(stored, path, promised)
        assert promised is not None
        record = FileRecord(size_bytes=stored.size_bytes, sha256=promised, mtime_ns=path.stat().st_mtime_ns)
        manifest = Manifest(files={path.name: record})
        return Transfer(uri=stored.uri, manifest=manifest, moved=() if is_kept else (path.name,))

    def _send(self, path: Path, uri: str, facts: Mapping[str, Any] | None, *, replace: bool) -> Transfer:
        if path.is_dir():
            manifest, paths = describe_directory(path, facts)
            return self._send_files(paths, uri, manifest, replace=replace, is_whole=True)
        if not path.is_file():
            raise _no_source(path)
        record = describe_files({path.name: path})[path.name]
        manifest = Manifest(files={path.name: record})
        stored = self.objects.find(uri)
        if stored is not None and self.objects.digest(uri) == record.sha256:
            return Transfer(uri=uri, manifest=manifest)
        if stored is not None and not replace:
            raise _other_record(uri, path.name)
        self._upload(path, uri, record)
        return Transfer(uri=uri, manifest=manifest, moved=(path.name,))

    def _send_files(
        self,
        paths: Mapping[str, Path],
        uri: str,
        manifest: Manifest,
        *,
        replace: bool,
        is_whole: bool,
        before_complete: Callable[[], None] = lambda: None,
    ) -> Transfer:
        """Send what is missing, then the manifest, unless the same one is there already."""
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
        cause = (
            f"{uri} is no complete record: it has objects and no {MANIFEST_NAME}"
            if has_objects
            else f"{uri} is not in the store, or not with its promised size and content"
        )
        return RemoteMissing(
            cause,
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


def _is_kept(path: Path, promised: FileRecord) -> bool:
    """Whether an interrupted call has already fetched this whole file."""
    if not path.is_file() or path.stat().st_size != promised.size_bytes:
        return False
    return hash_files(path.parent, [path.name])[path.name] == promised.sha256


def _is_same_record(path: Path, manifest: Manifest, *, replace: bool) -> bool:
    """Whether the record at the target is the wanted one; False: it may be replaced."""
    if not is_complete(path):
        raise _taken(path)
    is_same = read_manifest(path).sha256_by_name == manifest.sha256_by_name
    if not is_same and not replace:
        raise _taken(path)
    if not replace:
        return True
    try:
        verify_directory(path, can_trust_mtime=True)
    except StoreError:
        return False  # Damaged since; fetched again.
    return is_same


def side_by_side(action: Callable[[str], Any], names: Iterable[str]) -> list[Any]:
    """Call an action with every name, a few at a time, and return the results; the first error ends it."""
    with ThreadPoolExecutor(NUM_FILES_AT_ONCE, thread_name_prefix="strop-store") as pool:
        futures = [pool.submit(action, name) for name in names]
        try:
            return [future.result() for future in futures]
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _taken(path: Path) -> StoreError:
    return StoreError(
        f"{path} exists already and is not the record that was asked for",
        allowed="a name that is free, or that very record, complete",
        next_step=f"choose another name or remove {path.name} first",
    )


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
