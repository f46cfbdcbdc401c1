"""Where bytes live: complete or absent, with digests, on disk or from a hub.

Writing: `write_bytes_atomically`, `AtomicDirectory`, `verify_directory`, `remove_leftovers`.
Sharing: `FileLock`, which dies with its process and names its holder.
Places: `open_store` gives the `Store` of an s3:// or hf:// URI or a directory; `follow_store` says
which one hub ids are looked for in.
Models: `get_model` turns any name of a model into a directory that loads; `list_models`.
Data: `fetch_data_file`, `fetch_data_source`.
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
from strop.store.contract import Store, StoredObject, Transfer
from strop.store.data_files import fetch_data_file, fetch_data_source
from strop.store.leftovers import remove_leftovers
from strop.store.lock import FileLock, LockHolder
from strop.store.models import CachedModel, ModelHandle, get_model, list_models
from strop.store.opening import open_store
from strop.store.policy import SourcePolicy, follow_store, is_offline, read_policy

__all__ = [
    "AtomicDirectory",
    "CachedModel",
    "FileLock",
    "FileRecord",
    "LockHolder",
    "Manifest",
    "ModelHandle",
    "SourcePolicy",
    "Store",
    "StoredObject",
    "Transfer",
    "fetch_data_file",
    "fetch_data_source",
    "follow_store",
    "get_model",
    "is_complete",
    "is_offline",
    "list_models",
    "open_store",
    "read_manifest",
    "read_policy",
    "remove_directory",
    "remove_leftovers",
    "user_cache_dir",
    "verify_directory",
    "write_bytes_atomically",
]
