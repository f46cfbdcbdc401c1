"""Judge Python programs that a model wrote; the tests run in a process that the program cannot reach.

`judge_python` starts a fresh sandbox and in it a runner, which reads the job, runs the tests, and exchanges
only plain values with the program's separate process. Exiting, printing, patching built-ins and objects that
equal everything earn nothing, because no code of the program runs in the runner.
Not here: finding the code in a reply (`tasks.code.extraction`), and the isolation (`sandbox`).
"""

from strop.tasks.code.python_judge.judge import JudgeJob, JudgeVerdict, judge_python

__all__ = ["JudgeJob", "JudgeVerdict", "judge_python"]
