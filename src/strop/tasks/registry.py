"""From a task's section of the run spec to the task, and the list of what there is."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import assert_never

from strop.spec.task import ArithmeticSpec, Gsm8kSpec, ReasoningGymSpec, ReverseTextSpec, TaskSpec
from strop.tasks.arithmetic import Arithmetic
from strop.tasks.contract import Task
from strop.tasks.gsm8k import Gsm8k
from strop.tasks.reasoning_gym import ReasoningGym
from strop.tasks.reverse_text import ReverseText

TASK_SUMMARIES: Mapping[str, str] = MappingProxyType(
    {
        "arithmetic": "What is a + b? Ranges are settings; needs no data.",
        "reverse-text": "Write a short text backwards; graded by similarity; needs no data.",
        "reasoning-gym": "Any data set of the reasoning-gym package (extra: tasks).",
        "gsm8k": "Grade-school word problems from a hub, Parquet or JSONL.",
    }
)
"""What each built-in task is, by name."""


def build_task(spec: TaskSpec) -> Task:
    """Build the task that a spec names; no data is read yet.

    Raises: ConfigError if a setting cannot work with this task.
    """
    match spec:
        case ArithmeticSpec():
            return Arithmetic(spec)
        case ReverseTextSpec():
            return ReverseText(spec)
        case ReasoningGymSpec():
            return ReasoningGym(spec)
        case Gsm8kSpec():
            return Gsm8k(spec)
        case _:
            assert_never(spec)
