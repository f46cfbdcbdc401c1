"""Bringing a publication of weights from a store to this machine's memory, for as long as it is loaded."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from strop.errors import StoreError, WeightMismatch, explain_refusal
from strop.hardware.owned_dirs import SHARED_MEMORY


def memory_dir() -> str | None:
    """Return a folder in memory, where the system has one."""
    return str(SHARED_MEMORY) if os.access(SHARED_MEMORY, os.W_OK) else None


def fetch_object(uri: str, target: Path) -> None:
    """Download a publication: an object, or the record of an adapter.

    Raises: WeightMismatch if it is not there, or not what was sent.
    """
    from strop.store.opening import open_store

    try:
        open_store(uri).get(uri, target)
    except StoreError as error:
        raise WeightMismatch(
            explain_refusal(
                f"the weights at {uri} did not come ({error})",
                allowed="a publication that both sides reach",
                next_step="the engine keeps its old weights; start the run again to publish anew",
            )
        ) from error


@contextmanager
def fetched(uri: str) -> Iterator[str]:
    """Yield the path of a copy of an object. Raises: WeightMismatch, see `fetch_object`."""
    with TemporaryDirectory(prefix="strop-weights-", dir=memory_dir()) as folder:
        target = Path(folder) / uri.rpartition("/")[2]
        fetch_object(uri, target)
        yield str(target)
