"""How bytes reach a disk safely: complete or absent, locked, and found again after a kill.

`write_bytes_atomically` and `AtomicDirectory` show a reader all of a file or nothing; `remove_leftovers`
clears what killed writers left unfinished. `FileLock` dies with its process and names its holder.
`user_cache_dir` is where strop keeps what it can make again. `strop.io.endpoints` hands the servers of a run,
with their keys, to the processes that ask them.
Not here: other places than this disk (store), the layout of a run (record).
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
