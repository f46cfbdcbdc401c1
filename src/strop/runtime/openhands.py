"""OpenHands' own client and agent server, in an environment of their own."""

from __future__ import annotations

from strop.store.python_environment import PythonEnvironment

VERSION = "1.58.0"
"""Newer ones ask for packages that are newer than some mirrors keep; the protocol is the same."""
OPENHANDS = PythonEnvironment(
    name=f"openhands-{VERSION}",
    folder="runtime",
    version=(3, 12),
    pip_steps=(
        tuple(f"openhands-{part}=={VERSION}" for part in ("workspace", "sdk", "agent-server", "tools")),
    ),
)
