"""Tasks: one object that poses and judges problems for training, evaluation and sampling.

A task renders its problems, limits and ends the reply, and judges it; `build_task` makes one from its section
of the run spec. Data and optional packages are loaded when examples are first needed, never on import.
Not here: worlds with more than one turn (`environments`), and who generates (`engine`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop import bring_when_asked

if TYPE_CHECKING:
    from strop.tasks.prompt import PromptFormat, render_prompt, resolve_prompt_format
    from strop.tasks.registry import build_task, build_warm_task, task_builder
    from strop.tasks.task import Task, TaskLimits, describe_counts
else:
    # Processes that judge have a use for few of these.
    __getattr__ = bring_when_asked(
        __name__,
        {
            "strop.tasks.task": "Task TaskLimits describe_counts",
            "strop.tasks.prompt": "PromptFormat render_prompt resolve_prompt_format",
            "strop.tasks.registry": "build_task build_warm_task task_builder",
        },
    )

__all__ = [
    "PromptFormat",
    "Task",
    "TaskLimits",
    "build_task",
    "build_warm_task",
    "describe_counts",
    "render_prompt",
    "resolve_prompt_format",
    "task_builder",
]
