"""Digests of the inputs of a run, in run.json and each checkpoint, compared when the run is resumed.

A curve over two models, two data sets or two references describes neither. The refusal shows the names of the
parts.
"""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Mapping
from functools import cache

from strop.errors import CheckRefused

PARTS_FACT = "made_of"
"""The fact of run.json that holds them."""
_SHOWN_CHARS = 12


def require_same_parts(place: object, before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Refuse to continue `place` with other parts than it was made of.

    Raises: CheckRefused naming each changed part with both digests.
    """
    # A part that only one of them records is unknown, not changed.
    changed = sorted(name for name in before.keys() & now.keys() if before[name] != now[name])
    if not changed:
        return
    differences = "; another ".join(
        f"{name} ({before[name][:_SHOWN_CHARS]} then, {now[name][:_SHOWN_CHARS]} now)" for name in changed
    )
    raise CheckRefused(
        f"{place} began with another {differences}",
        allowed="the very parts that the run began with: a curve over two says nothing of either",
        next_step="restore what has changed, or start a new run with --new",
    )


# Versions of the installed software. No environment variables, which may hold secrets.

_COMPUTING = ("strop", "torch", "transformers", "tokenizers", "numpy", "vllm")
"""Distributions whose other versions may round differently, or render another prompt."""


def list_changes(before: str) -> list[str]:
    """Return the changed versions of `_COMPUTING` since an output of `describe_environment`."""
    then, now = (_versions(text) for text in (before, describe_environment()))
    return [
        f"{name} {then.get(name, 'none')} is now {now.get(name, 'none')}"
        for name in _COMPUTING
        if then.get(name) != now.get(name)
    ]


def _versions(text: str) -> dict[str, str]:
    pairs = (line.partition("==") for line in text.splitlines() if not line.startswith("#"))
    return {name.lower(): version for name, _, version in pairs}


@cache
def describe_environment() -> str:
    """Return Python, platform and every installed distribution with its version, one per line.

    Read once: this process does not run with what is installed later.
    """
    # Each is parsed whole, so once.
    found = [item.metadata for item in importlib.metadata.distributions()]
    packages = sorted({f"{one['Name']}=={one['Version']}" for one in found}, key=str.lower)
    lines = [f"# python {platform.python_version()} at {sys.executable}", f"# platform {platform.platform()}"]
    return "\n".join([*lines, *packages]) + "\n"
