"""Files of data sets: from a store or a hub by the policy, into this machine's cache, verified.

A hub id is looked up on the hub and under datasets/ID in the store, in the policy's order; in the store also
under datasets/NAME_SPLIT, where other launchers keep splits that the datasets library saved. An s3:// URI of
a record, of a directory that a listing proves complete (`listed`), or of a file is fetched from there only.
Not here: which files a task wants, and reading them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from strop.errors import HubUnreachable, RemoteMissing, StoreError, given_of
from strop.io.atomic import MANIFEST_NAME
from strop.io.lock import FileLock
from strop.io.variables import user_cache_dir
from strop.store.hub import ask_hub, find_cached_file, list_dataset_files, offline_refusal, probe_hub
from strop.store.listed import fetch_listed_data
from strop.store.opening import open_store
from strop.store.policy import SourcePolicy, is_offline, read_policy
from strop.store.uris import is_remote, normalize_uri
from strop.user_code import find_moved

Origin = Literal["store", "hub", "disk"]
_PREFIX_SUFFIX = "-all"
"""Suffix of the cache folder of a prefix without a manifest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFile:
    """A file of a data set that is on this disk."""

    source: str
    """As the run file names it."""
    name: str
    """Path within the data set, with forward slashes."""
    path: Path
    origin: Origin


_local_only: ContextVar[list[str] | None] = ContextVar("only local data", default=None)
_collected: ContextVar[list[DataFile] | None] = ContextVar("collected data files", default=None)


@contextmanager
def collect_data_files() -> Iterator[list[DataFile]]:
    """Yield a list that collects every data file requested inside the block, in this thread."""
    files: list[DataFile] = []
    token = _collected.set(files)
    try:
        yield files
    finally:
        _collected.reset(token)


def note_data_file(file: DataFile) -> Path:
    """Add the file to the lists of `collect_data_files`, and return its path."""
    collected = _collected.get()
    if collected is not None:
        collected.append(file)
    return file.path


@contextmanager
def only_local_data() -> Iterator[list[str]]:
    """Use only data on this disk inside the block, in this thread: no store or hub is asked.

    Yields a list that collects the names of missing data; nested blocks share one list. Local copies are not
    compared with their sources.
    """
    outer = _local_only.get()
    missing: list[str] = [] if outer is None else outer
    token = _local_only.set(missing)
    try:
        yield missing
    finally:
        _local_only.reset(token)


def fetch_data_file(source: str, file: str) -> Path:
    """Return the local copy of a file of a hub's data set.

    Raises: RemoteMissing if no allowed source has it; HubUnreachable if the hub was asked and did not answer;
        RemoteDenied, RemoteUnreachable or CorruptRecord if the store fails.
    """
    missing = _local_only.get()
    if missing is not None:
        return _require_local(missing, source, file)
    policy = read_policy()
    if policy.asks_store_first:
        try:
            return _from_store(policy, source, file)
        except RemoteMissing as first_error:
            if not policy.asks_hub:
                raise
            try:
                return _from_hub(source, file)
            except (RemoteMissing, HubUnreachable) as error:
                raise _in_neither(f"{file} of {source}", first_error, error) from error
    try:
        return _from_hub(source, file)
    except (RemoteMissing, HubUnreachable) as first_error:
        if policy.root is None:
            raise
        try:
            return _from_store(policy, source, file)
        except RemoteMissing as error:
            raise _in_neither(f"{file} of {source}", error, first_error, RemoteMissing) from error


def _in_neither(
    name: str,
    in_store: Exception,
    on_hub: RemoteMissing | HubUnreachable,
    kind: type[StoreError] | None = None,
) -> StoreError:
    """Build the error with the store's key and the hub's answer; `kind` None: the type of `on_hub`."""
    return (kind or type(on_hub))(
        f"{name} is in neither place: {given_of(in_store)}; {given_of(on_hub)}",
        allowed="a data set in the store, in the hub client's cache, or on a hub that answers",
        next_step="run `strop stage RUN.toml` where the hub can be reached, or name a local copy",
    )


def fetch_saved_split(source: str, names: Sequence[str]) -> Path | None:
    """Return the local copy of a split that the store has under one of these names, and not by its hub id.

    None: the store has no such split.
    Raises: StoreErrors as `Store.get`.
    """
    policy, is_local = read_policy(), _local_only.get() is not None
    own, *places = map(policy.dataset_uri, (source, *names))
    if own is None or (not is_local and _is_there(own)):
        return None
    for place in filter(None, places):
        if is_local and is_remote(place):
            path = find_data(place)
        elif _is_there(place):
            # A directory that another tool filled is used in place.
            path = fetch_data_source(place) if is_remote(place) else Path(place)
        else:
            continue
        if path is not None:
            for file in sorted(set(_names_in(path)) - {MANIFEST_NAME}):
                note_data_file(DataFile(source=place, name=file, path=path / file, origin="store"))
            return path
    return None


def _is_there(uri: str) -> bool:
    return next(iter(open_store(uri).list(uri)), None) is not None


def list_data_files(source: str) -> tuple[str, ...]:
    """Return the names of all files of a hub's data set, as `fetch_data_file` takes them, sorted.

    Raises: like `fetch_data_file`.
    """
    missing = _local_only.get()
    if missing is not None:
        folder = find_data(source)
        if folder is None:
            folder = _require_local(missing, source)
        return tuple(sorted(_names_in(folder)))
    policy = read_policy()
    uri = policy.dataset_uri(source)
    manifest = open_store(uri).find_manifest(uri) if uri is not None else None
    if manifest is not None and (policy.asks_store_first or not policy.asks_hub):
        return tuple(sorted(manifest.files))
    if uri is not None and manifest is None and uri.startswith("s3://") and policy.asks_store_first:
        root = normalize_uri(uri)
        listed = sorted(stored.uri.removeprefix(f"{root}/") for stored in open_store(uri).list(uri))
        if listed:
            return tuple(listed)
    if not policy.asks_hub:
        raise RemoteMissing(f"{uri} is not in the store")
    try:
        cached = _find_in_hub_cache(source) if is_offline() else None
        if cached is not None:
            return tuple(sorted(_names_in(cached)))
        return list_dataset_files(source)
    except (RemoteMissing, HubUnreachable) as error:
        if manifest is None and uri is not None:
            raise _in_neither(source, RemoteMissing(f"{uri} is not in the store"), error) from error
        if manifest is None:
            raise
    return tuple(sorted(manifest.files))


def _names_in(folder: Path) -> Iterator[str]:
    return (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def fetch_data_source(uri: str) -> Path:
    """Return the local copy, a directory or a file, of a record, a single file or a whole prefix.

    Raises: StoreErrors as `Store.get`.
    """
    missing = _local_only.get()
    if missing is not None:
        return _require_local(missing, uri)
    name = uri.rstrip("/").rpartition("/")[2]
    store = open_store(uri)
    path = _cache_dir(uri)
    if store.find_manifest(uri) is not None:
        store.get(uri, path, replace=True)
        return path
    if next(iter(store.list(uri)), None) is not None:
        # A trailing slash asks for all files, even of an unfinished transfer.
        path = path.with_name(f"{path.name}{_PREFIX_SUFFIX}")
        fetch_listed_data(uri, path, is_checked=not uri.endswith("/"))
        return path
    # A single file keeps its name: the suffix says how it is read.
    path.parent.mkdir(parents=True, exist_ok=True)
    file_path = path.with_name(f"{path.name}-{name}")
    with FileLock(file_path.with_name(f"{file_path.name}.lock")):
        store.get(uri, file_path, replace=True)
    return file_path


def locate_named(source: str) -> Path:
    """Return the file or folder that a setting names by a path or a URI, which is fetched.

    A file is noted for `collect_data_files`; the reader of a folder notes the files that it needs. The
    reader, which knows the setting, also checks that the path exists.
    Raises: StoreErrors as `Store.get`.
    """
    path = fetch_data_source(source) if is_remote(source) else find_moved(Path(source).expanduser())
    if path.is_file():
        origin: Origin = "store" if is_remote(source) else "disk"
        note_data_file(DataFile(source=source, name=path.name, path=path, origin=origin))
    return path


def find_data(source: str) -> Path | None:
    """Return the folder with the copy of a data set on this disk, or None. Uses no network."""
    policy = read_policy()
    uri = source if "://" in source else policy.dataset_uri(source)
    if uri is not None:
        name = uri.rstrip("/").rpartition("/")[2]
        path = _cache_dir(uri)
        for copy in (path, *(path.with_name(f"{path.name}{end}") for end in (f"-{name}", _PREFIX_SUFFIX))):
            if copy.exists():
                return copy
    return None if "://" in source else _find_in_hub_cache(source)


def _require_local(missing: list[str], source: str, file: str | None = None) -> Path:
    """Return a source's copy on this disk, the store's or the hub's first as the policy orders.

    Raises: RemoteMissing if there is none; its name is added to `missing`.
    """
    policy = read_policy()
    in_store: Path | None = None
    in_hub: Path | None = None
    if file is None:
        in_store = find_data(source)
    elif (uri := policy.dataset_uri(source)) is not None:
        copies = [_cache_dir(uri) / file, _listed_copy(uri, file) / file]
        in_store = next((path for path in copies if path.exists()), None)
    if file is not None and (policy.asks_hub or policy.root is None):
        in_hub = find_cached_file(source, file, None, is_dataset=True)
    found = in_store or in_hub if policy.asks_store_first or file is None else in_hub or in_store
    if found is not None:
        return note_data_file(DataFile(source=source, name=file or found.name, path=found, origin="disk"))
    name = source if file is None else f"{file} of {source}"
    missing.append(name)
    raise RemoteMissing(
        f"{name} is not on this machine",
        allowed="a local copy, because nothing may be asked for here",
        next_step="run `strop train` or `strop eval`, which fetch it",
    )


def _from_store(policy: SourcePolicy, source: str, file: str) -> Path:
    uri = policy.dataset_uri(source)
    assert uri is not None
    folder = _cache_dir(uri)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file
    try:
        with FileLock(folder.with_name(f"{folder.name}.lock")):
            open_store(uri).get_file(uri, file, path)
    except RemoteMissing:
        if not is_remote(uri) or open_store(uri).find_manifest(uri) is not None:
            raise
        fetch_listed_data(uri, _listed_copy(uri, file), name=file)
        path = _listed_copy(uri, file) / file
    return note_data_file(DataFile(source=source, name=file, path=path, origin="store"))


def _listed_copy(uri: str, file: str) -> Path:
    """Return the folder for the copy of one file of a directory without a record."""
    return _cache_dir(f"{uri}/{file}")


def _from_hub(source: str, file: str) -> Path:
    """Get a file from the hub client's cache, else from the hub."""
    name = f"{source}/{file}"
    path = find_cached_file(source, file, None, is_dataset=True)
    if path is None:
        if is_offline():
            raise offline_refusal(name)
        from huggingface_hub import constants, hf_hub_download

        probe_hub(constants.ENDPOINT, name)
        path = Path(ask_hub(name, lambda: hf_hub_download(source, file, repo_type="dataset")))
    return note_data_file(DataFile(source=source, name=file, path=path, origin="hub"))


def _find_in_hub_cache(source: str) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(source, repo_type="dataset", local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, OSError):
        return None


def _cache_dir(uri: str) -> Path:
    """Return the path of a data set's copy, which depends on the whole URI: stores do not collide."""
    name = "--".join(uri.rstrip("/").split("/")[-2:]).replace(":", "")
    key = hashlib.sha256(uri.rstrip("/").encode()).hexdigest()[:8]
    return user_cache_dir() / "datasets" / f"{name}-{key}"
