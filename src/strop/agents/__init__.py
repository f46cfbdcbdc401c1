"""Agent programs of users, which run unmodified and ask the model over OpenAI's protocol.

`task.agent` names a command, or a function as `FILE.py:NAME`. Each attempt has a separate address and key
(`Face`). Its calls are recorded as exact ids, and the task judges the program's answer (`AgentTask`).
Not here: how calls become the turns of a rollout (`environments.recording`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop import bring_when_asked

if TYPE_CHECKING:
    from strop.agents.face import Face
    from strop.agents.task import AgentTask
else:
    # The process that calls a user's function (`calling`) needs neither.
    __getattr__ = bring_when_asked(__name__, {"strop.agents.face": "Face", "strop.agents.task": "AgentTask"})

__all__ = ["AgentTask", "Face"]
