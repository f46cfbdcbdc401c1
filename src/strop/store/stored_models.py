"""Models that a store keeps: fetched into strop's cache, verified, and used like any directory."""

from __future__ import annotations

import hashlib
from pathlib import Path

from strop.errors import RemoteMissing
from strop.store.model_files import check_model_dir
from strop.store.opening import open_record_store


def stored_path(uri: str, cache: Path) -> Path:
    """Return where the local copy of a stored model is kept."""
    name = uri.rstrip("/").rpartition("/")[2]
    key = hashlib.sha256(uri.rstrip("/").encode()).hexdigest()[:8]
    return cache / "models" / f"stored-{name}-{key}"


def fetch_stored_model(uri: str, cache: Path) -> Path:
    """Return the local copy of a model that a store keeps, fetched if the store has another one.

    Raises: RemoteMissing if there is no complete record; ConfigError if it is no model; StoreErrors as
        `Store.get`.
    """
    path = stored_path(uri, cache)
    open_record_store(uri).get(uri, path, replace=True)
    check_model_dir(path)
    return path


def find_stored_model(uri: str | None, cache: Path) -> Path | None:
    """Return the local copy of a model if the store has it, or None if it does not, or there is no store.

    Raises: as `fetch_stored_model`, but for a record that is not there.
    """
    if uri is None:
        return None
    try:
        return fetch_stored_model(uri, cache)
    except RemoteMissing:
        return None
