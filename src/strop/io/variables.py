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


# How much a process logs: what libraries and strop's own servers say through Python's `logging`, to standard
# error, which is the role's log. What strop says to its user is always there.
LEVEL_VARIABLE = "STROP_LOG_LEVEL"
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_LEVELS = ("debug", "info", "warning", "error")


def log_level_of(text: str | None, role: str) -> str | None:
    """Return a role's level in a text such as 'warning,engine=debug'; None where nothing is said about it."""
    named = dict(word.partition("=")[::2] for word in (text or "").split(","))
    of_all = next((level for level, rest in named.items() if level and not rest), None)
    return named.get(role, of_all)


def level_variables(level: str | None) -> dict[str, str]:
    """Return what the environment of a child needs to log from a level on; vLLM has a variable of its own."""
    return {} if level is None else {LEVEL_VARIABLE: level, "VLLM_LOGGING_LEVEL": level.upper()}


def log_from(level: str | None) -> None:
    """Let this process log from a level on; None: from what its environment says, else as before."""
    import logging  # Here: a plan has no time for it.

    named = level or os.environ.get(LEVEL_VARIABLE)
    if named in _LEVELS:
        logging.basicConfig(format=LOG_FORMAT)
        logging.getLogger().setLevel(named.upper())
