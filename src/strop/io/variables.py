"""Environment variables that hold for a while: for this process and all that it starts meanwhile."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def set_variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the length of a block; afterwards each is what it was, or not set.

    The environment is the whole process's: threads that must not see it take a lock around the block.
    """
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def user_cache_dir() -> Path:
    """Return STROP_CACHE, else strop under XDG_CACHE_HOME, else ~/.cache/strop. Creates nothing."""
    if named := os.environ.get("STROP_CACHE"):
        return Path(named).expanduser().absolute()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser().absolute() / "strop"
    return Path.home() / ".cache" / "strop"
