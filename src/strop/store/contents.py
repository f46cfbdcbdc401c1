"""The contents of a store: a listing by name, and its models, fetched into the cache and verified."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from strop.errors import ConfigError, RemoteMissing, given_of, split_error
from strop.io.atomic import MANIFEST_NAME, is_complete, write_bytes_atomically
from strop.io.notices import tell
from strop.store.listed import fetch_listed_model
from strop.store.model_files import check_model_dir
from strop.store.opening import open_store
from strop.store.policy import URI_VARIABLE, read_policy, require_root
from strop.store.uris import is_remote, normalize_uri


def stored_path(uri: str, cache: Path) -> Path:
    """Return the path of the local copy of a stored model."""
    name = uri.rstrip("/").rpartition("/")[2]
    key = hashlib.sha256(uri.rstrip("/").encode()).hexdigest()[:8]
    return cache / "models" / f"stored-{name}-{key}"


def fetch_stored_model(uri: str, cache: Path) -> Path:
    """Return the local copy of a stored model; fetch it if the store's differs.

    Raises: RemoteMissing if there is neither a complete record nor a listing that proves the model complete;
        ConfigError if it is no model; StoreErrors as `Store.get`.
    """
    path, store = stored_path(uri, cache), open_store(uri)
    if uri.startswith("s3://") and store.find_manifest(uri) is None:
        fetch_listed_model(uri, path)
    else:
        store.get(uri, path, replace=True)
    check_model_dir(path)
    return path


def find_stored_model(places: Sequence[str], repo: str, cache: Path) -> Path:
    """Return a hub's model from the first of these places in a store that has it.

    Raises: RemoteMissing naming every place; ConfigError as `_refuse_namesake`; otherwise as
        `fetch_stored_model`.
    """
    errors: list[RemoteMissing] = []
    for place in places:
        try:
            path = _find_in_folder(place) if place != places[0] else None
            path = path or fetch_stored_model(place, cache)
        except RemoteMissing as error:
            errors.append(error)
            continue
        if place != places[0]:
            _refuse_namesake(repo, place, path, cache)
        return path
    _, allowed, next_step = split_error(str(errors[0]))
    raise RemoteMissing("; ".join(map(given_of, errors)), allowed=allowed, next_step=next_step)


def _find_in_folder(place: str) -> Path | None:
    """Return a model that another tool put into models/NAME of a directory; it is used in place.

    strop itself writes only to models/org/name, so this is no unfinished record of strop.
    """
    path = Path(place)
    if is_remote(place) or is_complete(path) or not path.is_dir():
        return None
    check_model_dir(path)
    tell(f"{place} has no COMPLETE: another tool filled it, and it is used as it is")
    return path


def _refuse_namesake(repo: str, uri: str, path: Path, cache: Path) -> None:
    """Refuse a model stored without its organisation if it belongs, or was resolved before, to another one.

    Raises: ConfigError naming both.
    """
    try:
        name = str(json.loads((path / "config.json").read_bytes()).get("_name_or_path", ""))
    except (ValueError, AttributeError):
        name = ""
    memory_path = cache / "models" / f"{stored_path(uri, cache).name}.repo"
    resolved = memory_path.read_text("utf-8") if memory_path.is_file() else repo
    is_namesake = name != repo and name.count("/") == 1 and name.rpartition("/")[2] == repo.rpartition("/")[2]
    other = name if is_namesake else resolved
    if other != repo:
        raise ConfigError(
            f"{uri} stands for {other} {'as its config.json says' if is_namesake else 'on this machine'}, and"
            f" {repo} is asked for: two organisations have a model of one name",
            allowed="a place for each organisation, such as models/org/name; or the URI itself",
            next_step=f"send yours to models/{repo}; or, if it is the one you mean, write {uri} into the run"
            " file",
        )
    memory_path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes_atomically(memory_path, repo.encode())


_DEPTH = 3
"""Folder depth at which files without a record are grouped: models/org/name, checkpoints/job/traces."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredItem:
    """One item of a store: a record, a folder that another tool sent, or a single file."""

    name: str
    """Relative to the root."""
    uri: str
    state: Literal["record", "no COMPLETE", "file"]
    num_files: int
    size_bytes: int


def list_contents(root: str | None = None) -> list[StoredItem]:
    """Return the items below a root, sorted by name; by default the root of this process's store.

    Raises: ConfigError if there is no store, or the root is invalid; StoreErrors as `Store.list`.
    """
    root = root or read_policy().root
    if root is None:
        raise ConfigError(
            "no store is named",
            allowed=f"a place such as s3://bucket/prefix or /mnt/store, or the variable {URI_VARIABLE}",
            next_step="name it: strop ls s3://bucket/prefix",
        )
    place = normalize_uri(root)
    require_root(place)
    objects = open_store(place).list(place)
    sizes = {stored.uri.removeprefix(f"{place}/"): stored.size_bytes for stored in objects}
    records = {name.removesuffix(f"/{MANIFEST_NAME}") for name in sizes if name.endswith(f"/{MANIFEST_NAME}")}
    groups: dict[str, list[str]] = {}
    for name in sizes:
        groups.setdefault(_group_of(name, records), []).append(name)
    return [
        StoredItem(
            name=group,
            uri=f"{place}/{group}",
            state="record" if group in records else "file" if names == [group] else "no COMPLETE",
            num_files=len(names),
            size_bytes=sum(sizes[name] for name in names),
        )
        for group, names in sorted(groups.items())
    ]


def _group_of(name: str, records: set[str]) -> str:
    """Return the item that a file belongs to: its record, else its folder at `_DEPTH`, else itself."""
    parts = name.split("/")
    inside = ("/".join(parts[:length]) for length in range(1, len(parts)))
    record = next((folder for folder in inside if folder in records), None)
    if record is not None:
        return record
    return name if len(parts) <= _DEPTH - 1 else "/".join(parts[: min(_DEPTH, len(parts) - 1)])
