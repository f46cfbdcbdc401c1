"""Judge replies in this process, or in worker processes that are killed at their limit.

A verifier that hangs, crashes or raises costs only its own rollout, which then has no score. Workers are
forked from a process that has loaded the verifier, so starting one takes milliseconds.
Not here: the verifiers (`tasks`), and running code that the model wrote (`sandbox`).
"""

from strop.tasks.judging.judge import Judge
from strop.tasks.judging.pool import WorkerPool

__all__ = ["Judge", "WorkerPool"]
