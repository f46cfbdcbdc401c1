"""Where strop keeps what it can make again: models, digests, measurements of this machine."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache_dir() -> Path:
    """Return STROP_CACHE, else strop under XDG_CACHE_HOME, else ~/.cache/strop. Creates nothing."""
    if named := os.environ.get("STROP_CACHE"):
        return Path(named).expanduser().absolute()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser().absolute() / "strop"
    return Path.home() / ".cache" / "strop"
