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
    # A server in a sandbox begins in 10 s of processor time instead of 17. Prices are not looked up.
    first_program="import os; os.environ['LITELLM_LOCAL_MODEL_COST_MAP'] = 'True'"
    "\nimport openhands.agent_server.api",
)
