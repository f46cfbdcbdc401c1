"""`resolve` turns the name of a model or a data set into a folder on this disk.

A hub id is looked for in the store and on the hub, in the policy's order; an s3:// URI in S3 alone. Copies
from a store are records in the user's cache, compared with the store at each call; the hub's are in its
client's cache. Inside `only_local` nobody is asked: the copies of earlier calls are all there is.
Not here: directories, which are used in place; packages of models (`packages`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from strop.errors import HubUnreachable, RemoteMissing, given_of
from strop.io.atomic import MANIFEST_NAME, is_complete
from strop.io.notices import tell
from strop.io.variables import user_cache_dir
from strop.store.hub import fetch_snapshot, find_snapshot
from strop.store.opening import open_store
from strop.store.policy import read_policy
from strop.store.uris import is_remote, join_uri

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """The files that are wanted of a name."""

    folder: Literal["models", "descriptions", "datasets"]
    """Of the cache."""
    only: tuple[str, ...] = ()
    """Patterns of the files, whose * match no slash; empty: all of them."""
    needed: tuple[str, ...] = ()
    """Names of the files without which the name counts as missing."""
    label: str | None = None
    """What messages call it; None: its name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A folder, or a single file, on this disk."""

    path: Path
    source: Literal["directory", "store", "hub", "package"]


_local: ContextVar[list[str] | None] = ContextVar("only local copies", default=None)


@contextmanager
def only_local() -> Iterator[list[str]]:
    """Use only what is on this disk inside the block, in this thread: no store or hub is asked.

    Yields a list that collects the names that were missing; nested blocks share one. Local copies are not
    compared with their sources.
    """
    outer = _local.get()
    missing: list[str] = [] if outer is None else outer
    token = _local.set(missing)
    try:
        yield missing
    finally:
        _local.reset(token)


def is_local() -> bool:
    """Whether nobody may be asked here."""
    return _local.get() is not None


def resolve(
    name: str,
    wanted: Wanted,
    cache: Path | None = None,
    on_hub: Callable[[str, str | None, Wanted], Found] | None = None,
) -> Found:
    """Return the local copy of a hub id org/name[@revision] or an s3:// URI.

    `on_hub` asks the hub; None: `from_hub`.
    Raises: RemoteMissing if no allowed source has it; HubUnreachable if the hub was asked and did not answer;
        other StoreErrors if a source fails.
    """
    if is_remote(name):
        return in_order(name, wanted, lambda: from_store((name,), wanted, cache), None)
    repo, _, revision = name.partition("@")
    policy, ask = read_policy(), on_hub or from_hub
    if wanted.folder == "datasets":
        places = tuple(filter(None, (policy.dataset_uri(repo),)))
    else:
        places = policy.model_uris(repo, revision or None)
    return in_order(
        name,
        wanted,
        (lambda: from_store(places, wanted, cache)) if places else None,
        lambda: ask(repo, revision or None, wanted),
    )


def in_order(
    name: str, wanted: Wanted, in_store: Callable[[], T] | None, on_hub: Callable[[], T] | None
) -> T:
    """Ask store and hub in the policy's order; the second only if the first lacks the name.

    Raises: as `resolve`.
    """
    policy, label = read_policy(), wanted.label or name
    asks = [(in_store, "store"), (on_hub if in_store is None or policy.asks_hub else None, "hub")]
    faults: list[RemoteMissing | HubUnreachable] = []
    for ask, source in asks if policy.asks_store_first or policy.root is None else reversed(asks):
        if ask is None:
            continue
        try:
            found = ask()
        except (RemoteMissing, HubUnreachable) as error:
            faults.append(error)
            continue
        if faults and not is_local():
            tell(f"{given_of(faults[0])}, so {label} was taken from the {source}")
        return found
    missing = _local.get()
    if missing is not None:
        missing.append(label)
        raise RemoteMissing(
            f"{label} is not on this machine",
            allowed="a local copy, because nothing may be asked for here",
            next_step="run `strop train` or `strop eval`, which fetch it",
        )
    if len(faults) == 1:
        raise faults[0]
    raise type(faults[-1])(
        f"{label} is in neither place: {'; '.join(map(given_of, faults))}",
        allowed="a name in the store, in the hub client's cache, or on a hub that answers",
        next_step="run `strop stage RUN.toml` where the hub can be reached, or name a local copy",
    ) from faults[-1]


def from_store(places: Sequence[str], wanted: Wanted, cache: Path | None = None) -> Found:
    """Return the local copy from the first of these places of a store that has the files.

    In a directory only the first place needs a record: elsewhere another tool's folder is used as it stands.
    Raises: RemoteMissing naming every place; otherwise as `RecordStore.get`.
    """
    faults = []
    for place in places:
        path = copy_path(place, wanted, cache)
        if place != places[0] and not is_remote(place) and not is_complete(Path(place)):
            path = Path(place)
        elif not is_local():
            try:
                open_store(place).get(place, path, only=wanted.only)
            except RemoteMissing as error:
                faults.append(given_of(error))
                continue
        absent = [name for name in wanted.needed if path.is_dir() and not (path / name).is_file()]
        if path.exists() and not absent:
            if path == Path(place) and not is_local():
                tell(f"{place} has no {MANIFEST_NAME}: another tool filled it, and it is used as it is")
            return Found(path=path, source="store")
        faults.append(f"{join_uri(place, *absent[:1])} is not in the store")
    raise RemoteMissing(
        "; ".join(faults),
        allowed="a record that was sent whole, or a folder that another tool filled with all that is needed",
        next_step="send it, or go on sending it, with `strop stage RUN.toml`",
    )


def from_hub(repo: str, revision: str | None, wanted: Wanted, *, may_ask: bool = True) -> Found:
    """Return the hub's files from its client's cache, else, where it `may_ask`, from the hub.

    Raises: RemoteMissing if the hub has no such repository or file; HubUnreachable if it does not answer.
    """
    kind: Literal["model", "dataset"] = "dataset" if wanted.folder == "datasets" else "model"
    path = find_snapshot(repo, revision, kind, wanted.only)
    if path is None or not all((path / name).is_file() for name in wanted.needed):
        if is_local() or not may_ask:
            raise RemoteMissing(f"{repo} is not in the hub client's cache")
        path = fetch_snapshot(repo, revision, kind, wanted.only)
    absent = [name for name in wanted.needed if not (path / name).is_file()]
    if absent:
        raise RemoteMissing(
            f"{repo} on the hub has no {', '.join(absent)}",
            allowed="a repository with the files that are asked for",
            next_step="check the spelling, or name another one",
        )
    return Found(path=path, source="hub")


def copy_path(uri: str, wanted: Wanted, cache: Path | None = None) -> Path:
    """Return the path of the copy of a place in a store; stores and choices of files do not collide."""
    texts = (uri.rstrip("/"), "\n".join(wanted.only))
    keys = [hashlib.sha256(text.encode()).hexdigest()[:8] for text in texts]
    name = uri.rstrip("/").rpartition("/")[2]
    return (cache or user_cache_dir()) / wanted.folder / f"{'-'.join(keys)}-{name}"


def local_copies(uri: str, wanted: Wanted, cache: Path | None = None) -> list[Path]:
    """Return the copies of a place, of whatever choice of its files."""
    path = copy_path(uri, wanted, cache)
    start, _, name = path.name.split("-", 2)
    return [one for one in path.parent.glob(f"{start}-*-{name}") if is_complete(one)]
