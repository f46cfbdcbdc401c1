"""Walking a directory that others write to: what goes away meanwhile is left out, never an error."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from stat import S_ISREG


def walk_files(root: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield every file below a directory with what is known of it, in order of their paths.

    `Path.rglob` of Python 3.11 and 3.12 ends with FileNotFoundError where a directory is removed under it.
    """
    for path in sorted(Path(parent) / name for parent, _, names in os.walk(root) for name in names):
        with suppress(OSError):
            found = path.stat()
            if S_ISREG(found.st_mode):
                yield path, found
