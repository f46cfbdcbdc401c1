"""Files of data sets on this machine, by the names that a run file has for them.

A hub id is looked up in the store under datasets/ID, and on the hub; an s3:// URI is a record, a folder that
another tool filled, or a single file. What is fetched is noted for `collect_data_files`.
Not here: which files a task wants, and reading them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from strop.errors import RemoteMissing
from strop.io.atomic import MANIFEST_NAME
from strop.store.hub import list_cached_files, list_dataset_files, names_in
from strop.store.opening import open_store
from strop.store.policy import read_policy
from strop.store.resolve import Wanted, from_store, in_order, is_local, local_copies, resolve
from strop.store.uris import is_remote
from strop.user_code import find_moved


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFile:
    """A file of a data set that is on this disk."""

    source: str
    """As the run file names it."""
    name: str
    """Path within the data set, with forward slashes."""
    path: Path


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


def fetch_data_files(source: str, files: Sequence[str]) -> list[Path]:
    """Return the local copies of files of a hub's data set.

    Raises: as `resolve`.
    """
    label = f"{', '.join(files)} of {source}"
    wanted = Wanted(folder="datasets", only=tuple(files), needed=tuple(files), label=label)
    folder = resolve(source, wanted).path
    return [note_data_file(DataFile(source=source, name=file, path=folder / file)) for file in files]


def list_data_files(source: str) -> tuple[str, ...]:
    """Return the names of all files of a hub's data set, as `fetch_data_files` takes them, sorted.

    Raises: as `resolve`.
    """
    wanted, uri = Wanted(folder="datasets"), read_policy().dataset_uri(source)

    def in_store() -> tuple[str, ...]:
        if not is_local():
            return open_store(str(uri)).list_names(str(uri))
        names = {name for copy in local_copies(str(uri), wanted) for name in names_in(copy)} - {MANIFEST_NAME}
        if not names:
            raise RemoteMissing(f"{uri} has no copy here")
        return tuple(sorted(names))

    def on_hub() -> tuple[str, ...]:
        if not is_local():
            return list_dataset_files(source)
        if names := list_cached_files(source):
            return names
        raise RemoteMissing(f"{source} is not in the hub client's cache")

    return in_order(source, wanted, None if uri is None else in_store, on_hub)


def fetch_saved_split(source: str, names: Sequence[str]) -> Path | None:
    """Return the local copy of a split that the store has as datasets/NAME with one of these names.

    That is where other launchers keep what the datasets library saved. None: the store has no such split, or
    has the data set under its hub id.
    Raises: StoreErrors as `RecordStore.get`.
    """
    policy = read_policy()
    own, *places = (policy.dataset_uri(name) for name in (source, *names))
    if own is None or (not is_local() and next(iter(open_store(own).list(own)), None) is not None):
        return None
    for place in filter(None, places):
        try:
            # The first place would need a record, also in a directory.
            path = from_store((own, place), Wanted(folder="datasets")).path
        except RemoteMissing:
            continue
        for file in names_in(path):
            if file != MANIFEST_NAME:
                note_data_file(DataFile(source=place, name=file, path=path / file))
        return path
    return None


def locate_named(source: str) -> Path:
    """Return the file or folder that a setting names by a path or a URI, which is fetched.

    A file is noted for `collect_data_files`; the reader of a folder notes the files that it needs. The
    reader, which knows the setting, also checks that the path exists.
    Raises: as `resolve`.
    """
    if is_remote(source):
        path = resolve(source, Wanted(folder="datasets")).path
    else:
        path = find_moved(Path(source).expanduser())
    if path.is_file():
        note_data_file(DataFile(source=source, name=path.name, path=path))
    return path
