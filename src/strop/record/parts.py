"""Digests of the inputs of a run, in run.json and each checkpoint, compared when the run is resumed.

A curve over two models, two data sets or two references describes neither. The names of the parts are words
for people: the refusal shows them.
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
    """Refuse to go on with other parts than those that `place` was made of.

    Raises: CheckRefused naming each that changed, with both digests.
    """
    # What only one of the two states is unknown, and no change.
    changed = sorted(name for name in before.keys() & now.keys() if before[name] != now[name])
    if not changed:
        return
    told = "; another ".join(
        f"{name} ({before[name][:_SHOWN_CHARS]} then, {now[name][:_SHOWN_CHARS]} now)" for name in changed
    )
    raise CheckRefused(
        f"{place} began with another {told}",
        allowed="the very parts that the run began with: a curve over two says nothing of either",
        next_step="restore what has changed, or start a new run with --new",
    )


# Versions of the installed software. No environment variables, which may hold secrets.

_COMPUTING = ("strop", "torch", "transformers", "tokenizers", "numpy", "vllm")
"""Distributions of which another version may round otherwise, or render another prompt."""


def list_changes(before: str) -> list[str]:
    """Return which software that computes has another version than a text of `describe_environment` says."""
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

    Read once: what is installed later is not what this process runs with.
    """
    packages = sorted(
        {f"{item.name}=={item.version}" for item in importlib.metadata.distributions()}, key=str.lower
    )
    lines = [f"# python {platform.python_version()} at {sys.executable}", f"# platform {platform.platform()}"]
    return "\n".join([*lines, *packages]) + "\n"
