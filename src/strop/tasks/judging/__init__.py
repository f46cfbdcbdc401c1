"""Where replies are judged: in this process, or in worker processes that are killed at their limit.

`open_judge` gives a task the judge that it asks for. A verifier that hangs, crashes or raises costs its
own rollout, which then has no score; nobody waits for it. Workers are forked from a process that has
loaded what the verifier needs, so that a new one costs milliseconds.
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
