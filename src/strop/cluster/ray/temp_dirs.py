"""Where a Ray node puts its sockets and logs: a path that is short enough."""

from __future__ import annotations

import os
import secrets
import tempfile
from pathlib import Path

from strop.cluster.ray.settings import MAX_TEMP_DIR_BYTES
from strop.errors import ConfigError, explain_refusal
from strop.hardware.leases import leases_dir, open_folder
from strop.hardware.owned_dirs import PREFIX, SHARED_MEMORY
from strop.io.atomic import explain_write_failure


def choose_temp_dir(configured: Path | None = None) -> Path:
    """Return the path of a directory that is to be made, below the one that the run file names if it does.

    Else below this user's own folder of this machine, TMPDIR, or in memory: the first that is short enough.
    Raises: ConfigError if the named one is too long for a socket; StoreError if nobody can write there.
    """
    name = PREFIX + secrets.token_hex(4)
    if configured is None:
        # For this user alone, and made as leases make it.
        usual = open_folder(leases_dir()).parent
        places = [usual, Path(tempfile.gettempdir()), SHARED_MEMORY]
        chosen = next((place for place in places if _is_short(place / name)), places[-1])
        return _require_writable(chosen.absolute() / name)
    path = configured.absolute() / name
    if not _is_short(path):
        allowed = MAX_TEMP_DIR_BYTES - len(name) - 1
        raise ConfigError(
            explain_refusal(
                f"ray.temp_dir is {configured}, {len(os.fsencode(configured.absolute()))} bytes long",
                allowed=f"{allowed} bytes at most: paths of sockets end at 107, and Ray adds the rest",
                next_step="name a shorter one, or leave it out",
            )
        )
    return _require_writable(path)


def _is_short(path: Path) -> bool:
    return len(os.fsencode(path.absolute())) <= MAX_TEMP_DIR_BYTES


def _require_writable(path: Path) -> Path:
    """Raise StoreError if a directory cannot be made there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            return path
    except OSError as error:
        raise explain_write_failure(error, path) from error
