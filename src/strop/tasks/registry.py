"""From a task's section of the run spec to the task, and the list of what there is."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import assert_never

from strop.rollout import Split
from strop.spec.task import (
    AppsSpec,
    ArithmeticSpec,
    Gsm8kSpec,
    HumanEvalSpec,
    MbppSpec,
    MixtureSpec,
    ReasoningGymSpec,
    ReverseTextSpec,
    TaskSpec,
)
from strop.tasks.apps import Apps
from strop.tasks.arithmetic import Arithmetic
from strop.tasks.contract import Task
from strop.tasks.curriculum import Curriculum
from strop.tasks.gsm8k import Gsm8k
from strop.tasks.humaneval import HumanEval
from strop.tasks.mbpp import Mbpp
from strop.tasks.mixture import Mixture
from strop.tasks.reasoning_gym import ReasoningGym
from strop.tasks.reverse_text import ReverseText

TASK_SUMMARIES: Mapping[str, str] = MappingProxyType(
    {
        "arithmetic": "What is a + b? Ranges are settings; needs no data.",
        "reverse-text": "Write a short text backwards; graded by similarity; needs no data.",
        "reasoning-gym": "Any data set of the reasoning-gym package (extra: tasks).",
        "mixture": "Several tasks trained as one, by weight, by size or in sequence.",
        "gsm8k": "Grade-school word problems from a hub, Parquet or JSONL.",
        "mbpp": "Short Python functions with tests, run in a sandbox.",
        "humaneval": "Python functions to complete, run in a sandbox; for evaluation only.",
        "apps": "Programming contests: programs and functions, run in a sandbox.",
    }
)
"""What each built-in task is, by name."""


def build_task(spec: TaskSpec) -> Task:
    """Build the task that a spec names; no data is read yet.

    Raises: ConfigError if a setting cannot work with this task.
    """
    task = _build_plain(spec)
    return task if spec.order_file is None else Curriculum(task, spec)


def _build_plain(spec: TaskSpec) -> Task:  # noqa: PLR0911  one line for each task
    """Build the task without regard to the order of its examples."""
    match spec:
        case ArithmeticSpec():
            return Arithmetic(spec)
        case ReverseTextSpec():
            return ReverseText(spec)
        case ReasoningGymSpec():
            return ReasoningGym(spec)
        case Gsm8kSpec():
            return Gsm8k(spec)
        case MixtureSpec():
            return Mixture(spec, {label: build_task(part.task) for label, part in spec.read_parts().items()})
        case MbppSpec():
            return Mbpp(spec)
        case HumanEvalSpec():
            return HumanEval(spec)
        case AppsSpec():
            return Apps(spec)
        case _:
            assert_never(spec)


def build_warm_task(spec: TaskSpec) -> Task:
    """Build a task that has loaded what its verifier needs: processes forked from here find it there.

    Raises: like `build_task`, and like `examples` where judging needs the data.
    """
    task = build_task(spec)
    if isinstance(spec, ReasoningGymSpec | MixtureSpec):
        # Its scorer wants the generated problem; a mixture must know whose an example is.
        for example in task.examples(Split.HELD_OUT)[:1]:
            task.gold_replies(example)
    return task
