"""Atomic files and directories, locks, and the addresses of a run's servers.

With `write_bytes_atomically` and `AtomicDirectory` a reader finds everything or nothing. `FileLock` ends with
its process and names its holder. `user_cache_dir` is the folder for data that can be recomputed.
Not here: storage other than this disk (store), the layout of a run (record).
"""

from strop.io.atomic import (
    AtomicDirectory,
    is_complete,
    remove_directory,
    verify_directory,
    write_bytes_atomically,
)
from strop.io.lock import FileLock
from strop.io.variables import user_cache_dir

__all__ = [
    "AtomicDirectory",
    "FileLock",
    "is_complete",
    "remove_directory",
    "user_cache_dir",
    "verify_directory",
    "write_bytes_atomically",
]
