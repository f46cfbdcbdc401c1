"""What a store holds: records, and what other tools put there, with their sizes. Only names are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from strop.errors import ConfigError
from strop.io.atomic import MANIFEST_NAME
from strop.store.opening import open_record_store
from strop.store.policy import URI_VARIABLE, read_policy, require_root
from strop.store.uris import normalize_uri

_DEPTH = 3
"""Folders down to which things without a record are told apart: models/org/name, checkpoints/job/traces."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredItem:
    """One thing in a store: a record, a folder that another tool sent, or a single file."""

    name: str
    """Below the root."""
    uri: str
    state: Literal["record", "no COMPLETE", "file"]
    num_files: int
    size_bytes: int


def list_contents(root: str | None = None) -> list[StoredItem]:
    """Return what is below a place, by name; by default below the root of this process's store.

    Raises: ConfigError if there is no store, or the place is none; StoreErrors as `Store.list`.
    """
    root = root or read_policy().root
    if root is None:
        raise ConfigError(
            "no store is named",
            allowed=f"a place such as s3://bucket/prefix or /mnt/store, or the variable {URI_VARIABLE}",
            next_step="name it: strop store ls s3://bucket/prefix",
        )
    place = normalize_uri(root)
    require_root(place)
    sizes = {
        one.uri.removeprefix(f"{place}/"): one.size_bytes for one in open_record_store(place).list(place)
    }
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
    """Return the record that a file is of, the folder that it is told by, or itself."""
    parts = name.split("/")
    inside = ("/".join(parts[:length]) for length in range(1, len(parts)))
    record = next((folder for folder in inside if folder in records), None)
    if record is not None:
        return record
    return name if len(parts) <= _DEPTH - 1 else "/".join(parts[: min(_DEPTH, len(parts) - 1)])
