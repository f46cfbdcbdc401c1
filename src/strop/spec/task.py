"""What the model practises: one section per built-in task, told apart by `task.name`, and one for the user's.

Building the task from its section is `tasks`' business; nothing here reads data.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Discriminator, Field, Tag

from strop.spec.blend import BlendPart, BlendSpec
from strop.spec.code_tasks import AppsSpec, HumanEvalSpec, MbppSpec
from strop.spec.generated_tasks import ArithmeticSpec, DummySpec, ReasoningGymSpec, ReverseTextSpec
from strop.spec.instruction_tasks import IfBenchSpec, IfEvalSpec, IfMultiSpec, RlvrIfevalSpec
from strop.spec.judge_tasks import ROLE, LlmJudgeSpec
from strop.spec.math_tasks import (
    AimeSpec,
    DeepscalerSpec,
    Gsm8kSpec,
    Math500Spec,
    MathSpec,
    MmluChoiceSpec,
    MmluSpec,
    RlvrMixedSpec,
)
from strop.spec.mixture import MixturePart, MixtureSpec
from strop.spec.parts import BuiltInTask, PlainTask
from strop.spec.rows_task import RowsSpec
from strop.spec.sft_task import SftJsonlSpec
from strop.spec.user_task import BUILT_IN, USER_TASK, UserTaskSpec, tell_apart

BoxedMathSpec = MathSpec | Math500Spec | DeepscalerSpec
"""The tasks that compare formulas."""
RowTaskSpec = (
    BoxedMathSpec
    | AimeSpec
    | Gsm8kSpec
    | MmluSpec
    | MmluChoiceSpec
    | RlvrMixedSpec
    | MbppSpec
    | HumanEvalSpec
    | AppsSpec
    | IfEvalSpec
    | IfBenchSpec
    | RlvrIfevalSpec
    | IfMultiSpec
    | SftJsonlSpec
    | RowsSpec
)
"""The tasks whose problems are the rows of a data set."""
TaskSpec = Annotated[
    Annotated[BuiltInTask | MixtureSpec | BlendSpec, Field(discriminator="name"), Tag(BUILT_IN)]
    | Annotated[UserTaskSpec, Tag(USER_TASK)],
    Discriminator(tell_apart),
]
"""One of the task sections, told apart by `name`."""


def judge_sections(task: TaskSpec) -> list[LlmJudgeSpec]:
    """Return the sections of all judges that a task asks, itself or in its parts."""
    return [section for section in plain_sections(task) if isinstance(section, LlmJudgeSpec)]


def role_judges(task: TaskSpec) -> list[LlmJudgeSpec]:
    """Return the sections of the judges that a run starts itself."""
    return [judge for judge in judge_sections(task) if judge.judge_url == ROLE]


def plain_sections(task: TaskSpec) -> list[PlainTask]:
    """Return the sections of the tasks that a task is made of: its own, or its parts'."""
    if isinstance(task, MixtureSpec | BlendSpec):
        return [part.task for part in task.read_parts().values()]
    return [task]


__all__ = [
    "AimeSpec",
    "AppsSpec",
    "ArithmeticSpec",
    "BlendPart",
    "BlendSpec",
    "BoxedMathSpec",
    "DeepscalerSpec",
    "DummySpec",
    "Gsm8kSpec",
    "HumanEvalSpec",
    "IfBenchSpec",
    "IfEvalSpec",
    "IfMultiSpec",
    "LlmJudgeSpec",
    "Math500Spec",
    "MathSpec",
    "MbppSpec",
    "MixturePart",
    "MixtureSpec",
    "MmluChoiceSpec",
    "MmluSpec",
    "PlainTask",
    "ReasoningGymSpec",
    "ReverseTextSpec",
    "RlvrIfevalSpec",
    "RlvrMixedSpec",
    "RowTaskSpec",
    "RowsSpec",
    "SftJsonlSpec",
    "TaskSpec",
    "UserTaskSpec",
    "judge_sections",
    "plain_sections",
    "role_judges",
]
