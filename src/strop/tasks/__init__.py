"""What is asked, and how it is judged: one object for training, evaluation and sampling.

A task renders its problems, limits and ends the reply, and judges it; `build_task` makes one from
its section of the run spec. `self_test` shows before training that a verifier tells right from
wrong. Data and optional packages are read when examples are first asked for, never on import.
Not here: worlds with more than one turn (`environments`), and who generates (`engine`).
"""

from strop.tasks.contract import Task, TaskLimits
from strop.tasks.prompt import PromptFormat, render_prompt, resolve_prompt_format
from strop.tasks.registry import TASK_SUMMARIES, build_task, build_warm_task, task_builder
from strop.tasks.selftest import SelfTestFinding, describe_findings, self_test
from strop.tasks.traits import (
    Ordered,
    choices_of,
    describe_counts,
    limits_of,
    part_of,
    problem_of,
    variant_of,
)

__all__ = [
    "TASK_SUMMARIES",
    "Ordered",
    "PromptFormat",
    "SelfTestFinding",
    "Task",
    "TaskLimits",
    "build_task",
    "build_warm_task",
    "choices_of",
    "describe_counts",
    "describe_findings",
    "limits_of",
    "part_of",
    "problem_of",
    "render_prompt",
    "resolve_prompt_format",
    "self_test",
    "task_builder",
    "variant_of",
]
