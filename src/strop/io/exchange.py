"""Moving a finished directory under its final name, also where an older one stands there."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from pathlib import Path

# From <linux/fs.h> and <fcntl.h>.
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


def publish_directory(partial_path: Path, path: Path, *, replace: bool) -> None:
    """Rename a finished directory to its name; with `replace`, an older one there is removed.

    Raises: OSError if the name is taken and may not be replaced.
    """
    if replace and path.exists():
        if not _exchange(partial_path, path):
            # No atomic exchange here (macOS, some network file systems). A kill between the two
            # renames leaves no directory under the name, and the old one as a leftover.
            aside_path = partial_path.with_name(partial_path.name + "-old")
            path.rename(aside_path)
            partial_path.rename(path)
            partial_path = aside_path
        shutil.rmtree(partial_path, ignore_errors=True)
        return
    partial_path.rename(path)


def _exchange(first_path: Path, second_path: Path) -> bool:
    """Swap two directories in one step; False where the system cannot."""
    if sys.platform != "linux":
        return False
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    first, second = os.fsencode(first_path), os.fsencode(second_path)
    return bool(renameat2(_AT_FDCWD, first, _AT_FDCWD, second, _RENAME_EXCHANGE) == 0)
