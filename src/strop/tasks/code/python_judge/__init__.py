"""Judging Python programs that a model wrote: the tests run where the program cannot reach them.

`judge_python` starts a fresh sandbox and in it a runner, which reads the job, keeps the tests to itself
and talks with the program, in a process of its own, in plain values only. Exiting, printing, patching
built-ins and objects that equal everything earn nothing, because nothing of that runs in the runner.
Not here: finding the code in a reply (`tasks.code.extraction`), and what contains the program (`sandbox`).
"""

from strop.tasks.code.python_judge.judge import JudgeJob, JudgeMode, JudgeVerdict, judge_for, judge_python

__all__ = ["JudgeJob", "JudgeMode", "JudgeVerdict", "judge_for", "judge_python"]
