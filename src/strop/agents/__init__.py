"""Who acts, if not the loop: a program of the user's, as it is, that asks the model over OpenAI's protocol.

`task.agent` names a command, or a function as `FILE.py:NAME`. Each attempt has an address and a key of its
own (`Face`); what goes through it is recorded as exact ids, and the program's answer is judged by the task
(`AgentTask`).
Not here: how calls become the turns of a rollout (`environments.recording`).
"""

from strop.agents.face import Face
from strop.agents.task import AgentTask

__all__ = ["AgentTask", "Face"]
