"""OpenHands' client and agent server, in a separate Python environment."""

from __future__ import annotations

from strop.store.python_environment import PythonEnvironment

VERSION = "1.58.0"
"""Newer versions require packages that some mirrors do not have yet; the protocol is the same."""
OPENHANDS = PythonEnvironment(
    name=f"openhands-{VERSION}",
    folder="runtime",
    version=(3, 12),
    pip_steps=(
        tuple(f"openhands-{part}=={VERSION}" for part in ("workspace", "sdk", "agent-server", "tools")),
    ),
    # Compiles its modules, so that a server starts in 10 s of processor time instead of 17. No price look-up.
    first_program="import os; os.environ['LITELLM_LOCAL_MODEL_COST_MAP'] = 'True'"
    "\nimport openhands.agent_server.api",
)
