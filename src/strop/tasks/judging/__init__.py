"""Judging replies in this process, or in worker processes that are killed at their limit.

`open_judge` returns the judge that a task asks for. A verifier that hangs, crashes or raises costs only its
own rollout, which then has no score. Workers are forked from a process that has loaded what the verifier
needs, so a new one costs milliseconds.
Not here: what a verifier compares (`tasks`), and code that the model wrote (`sandbox`).
"""

from strop.tasks.judging.judge import InlineJudge, Judge, QuickJudge, TimedJudge, WorkerJudge, open_judge
from strop.tasks.judging.pool import CallFailure, WorkerPool

__all__ = [
    "CallFailure",
    "InlineJudge",
    "Judge",
    "QuickJudge",
    "TimedJudge",
    "WorkerJudge",
    "WorkerPool",
    "open_judge",
]
