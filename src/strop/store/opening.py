"""The store of a URI, and what it holds, by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from strop.errors import ConfigError
from strop.io.atomic import MANIFEST_NAME
from strop.store.local_objects import LocalObjects
from strop.store.policy import URI_VARIABLE, read_policy, require_root
from strop.store.record_store import RecordStore
from strop.store.s3_client import S3Settings
from strop.store.s3_objects import S3Objects
from strop.store.uris import is_remote, normalize_uri, require_known_scheme


def open_store(uri: str, settings: S3Settings | None = None) -> RecordStore:
    """Return the store of a URI, in S3 or a directory; no request is made yet.

    Raises: ConfigError for a scheme that strop does not know.
    """
    return RecordStore(open_objects(uri, settings))


def open_objects(uri: str, settings: S3Settings | None = None) -> LocalObjects | S3Objects:
    """Return the objects of S3, or the files of a disk. Raises: ConfigError for another scheme."""
    require_known_scheme(uri)
    return S3Objects(settings) if is_remote(uri) else LocalObjects()


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
