"""Atomic files and directories, locks, and the addresses of a run's servers.

With `write_bytes_atomically` and `AtomicDirectory` a reader finds everything or nothing; `remove_leftovers`
removes unfinished files of killed writers. `FileLock` ends with its process and names its holder.
`user_cache_dir` is the folder for data that can be recomputed. `strop.io.endpoints` passes the addresses and
keys of a run's servers to their clients.
Not here: storage other than this disk (store), the layout of a run (record).
"""

from strop.io.atomic import (
    AtomicDirectory,
    FileRecord,
    Manifest,
    is_complete,
    read_manifest,
    remove_directory,
    verify_directory,
    write_bytes_atomically,
)
from strop.io.leftovers import remove_leftovers
from strop.io.lock import FileLock, LockHolder
from strop.io.variables import user_cache_dir

__all__ = [
    "AtomicDirectory",
    "FileLock",
    "FileRecord",
    "LockHolder",
    "Manifest",
    "is_complete",
    "read_manifest",
    "remove_directory",
    "remove_leftovers",
    "user_cache_dir",
    "verify_directory",
    "write_bytes_atomically",
]
