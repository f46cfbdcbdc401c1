"""Environment variables of this process and its children: temporary ones, the cache, the log level."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def set_variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for a block, and restore them afterwards.

    The environment belongs to the whole process: threads that must not see the change need a lock.
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
    shared = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("STROP_CACHE") or f"{shared}/strop").expanduser().absolute()


# The level of Python's `logging`, which libraries and strop's servers use, to standard error, which is the
# role's log. strop's messages to its user are always shown.
LEVEL_VARIABLE = "STROP_LOG_LEVEL"
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def log_level_of(text: str | None, role: str) -> str | None:
    """Return a role's level from a text such as 'warning,engine=debug'; None if it has none."""
    levels = dict(word.partition("=")[::2] for word in (text or "").split(","))
    default = next((level for level, rest in levels.items() if level and not rest), None)
    return levels.get(role, default)


def level_variables(level: str | None) -> dict[str, str]:
    """Return the variables that set the log level of a child; vLLM has its own."""
    return {} if level is None else {LEVEL_VARIABLE: level, "VLLM_LOGGING_LEVEL": level.upper()}


def log_from(level: str | None) -> None:
    """Set the log level of this process; None: that of its environment, if there is one."""
    import logging  # Imported here, because it would slow down a plan.

    level = level or os.environ.get(LEVEL_VARIABLE)
    if level in ("debug", "info", "warning", "error"):
        logging.basicConfig(format=LOG_FORMAT)
        logging.getLogger().setLevel(level.upper())
