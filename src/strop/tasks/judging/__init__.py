"""Judge replies in this process, or in worker processes that are killed at their limit.

`open_judge` returns the judge that a task needs. A verifier that hangs, crashes or raises costs only its
own rollout, which then has no score. Workers are forked from a process that has loaded the verifier, so
starting one takes milliseconds.
Not here: the verifiers (`tasks`), and running code that the model wrote (`sandbox`).
"""

from strop.tasks.judging.judge import (
    InlineJudge,
    Judge,
    TimedJudge,
    WorkerJudge,
    judge_as_attempted,
    open_judge,
)
from strop.tasks.judging.pool import CallFailure, WorkerPool

__all__ = [
    "CallFailure",
    "InlineJudge",
    "Judge",
    "TimedJudge",
    "WorkerJudge",
    "WorkerPool",
    "judge_as_attempted",
    "open_judge",
]
