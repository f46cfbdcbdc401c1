"""Who acts, if not the loop: a program of the user's, as it is, that asks the model over OpenAI's protocol.

`task.agent` names a command, or a function as `FILE.py:NAME`. Each attempt has an address and a key of its
own (`Face`); what goes through it is recorded as exact ids, and the program's answer is judged by the task
(`AgentTask`).
Not here: how calls become the turns of a rollout (`environments.recording`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop import bring_when_asked

if TYPE_CHECKING:
    from strop.agents.face import Face
    from strop.agents.task import AgentTask
else:
    # The process of an attempt that calls a function of the user's has a use for neither.
    __getattr__ = bring_when_asked(__name__, {"strop.agents.face": "Face", "strop.agents.task": "AgentTask"})

__all__ = ["AgentTask", "Face"]
