"""Where bytes live: complete or absent, with digests, on disk or from a hub.

Writing: `write_bytes_atomically`, `AtomicDirectory`, `verify_directory`, `remove_leftovers`.
Sharing: `FileLock`, which dies with its process and names its holder.
Models: `get_model` turns a directory, hub id or package into a directory that loads; `list_models`.
This room lies under `record` and `hardware` and knows nothing of runs.
"""

from strop.store.atomic import (
    AtomicDirectory,
    FileRecord,
    Manifest,
    is_complete,
    read_manifest,
    remove_directory,
    verify_directory,
    write_bytes_atomically,
)
from strop.store.cache import user_cache_dir
from strop.store.leftovers import remove_leftovers
from strop.store.lock import FileLock, LockHolder
from strop.store.models import CachedModel, ModelHandle, get_model, list_models

__all__ = [
    "AtomicDirectory",
    "CachedModel",
    "FileLock",
    "FileRecord",
    "LockHolder",
    "Manifest",
    "ModelHandle",
    "get_model",
    "is_complete",
    "list_models",
    "read_manifest",
    "remove_directory",
    "remove_leftovers",
    "user_cache_dir",
    "verify_directory",
    "write_bytes_atomically",
]
