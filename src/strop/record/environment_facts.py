"""What software a run ran with, as text. Holds no environment variables, which may hold secrets."""

from __future__ import annotations

import importlib.metadata
import platform
import sys


def describe_environment() -> str:
    """Return Python, platform and every installed distribution with its version, one per line."""
    packages = sorted(
        {f"{item.name}=={item.version}" for item in importlib.metadata.distributions()}, key=str.lower
    )
    lines = [f"# python {platform.python_version()} at {sys.executable}", f"# platform {platform.platform()}"]
    return "\n".join([*lines, *packages]) + "\n"
