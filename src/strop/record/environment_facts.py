"""What software a run ran with, as text. Holds no environment variables, which may hold secrets."""

from __future__ import annotations

import importlib.metadata
import platform
import sys

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


def describe_environment() -> str:
    """Return Python, platform and every installed distribution with its version, one per line."""
    packages = sorted(
        {f"{item.name}=={item.version}" for item in importlib.metadata.distributions()}, key=str.lower
    )
    lines = [f"# python {platform.python_version()} at {sys.executable}", f"# platform {platform.platform()}"]
    return "\n".join([*lines, *packages]) + "\n"
