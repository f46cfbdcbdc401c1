"""The task of a run: a union of one section per built-in task, tagged by `task.name`, and one for user code.

Building the task from its section is `tasks`' business; nothing here reads data.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    Discriminator,
    Field,
    JsonValue,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)

from strop.errors import ConfigError
from strop.spec.base import Section, SpecConflict, check_free_table, expert
from strop.spec.builtin_tasks import (
    AimeSpec,
    AppsSpec,
    ArithmeticSpec,
    DeepscalerSpec,
    DummySpec,
    Gsm8kSpec,
    HumanEvalSpec,
    IfBenchSpec,
    IfEvalSpec,
    IfMultiSpec,
    Math500Spec,
    MathSpec,
    MbppSpec,
    MmluChoiceSpec,
    MmluSpec,
    ReasoningGymSpec,
    ReverseTextSpec,
    RlvrIfevalSpec,
    RlvrMixedSpec,
)
from strop.spec.own_tasks import (
    BUILT_IN,
    ROLE,
    USER_TASK,
    LlmJudgeSpec,
    RowsSpec,
    SftJsonlSpec,
    UserTaskSpec,
    tell_apart,
)
from strop.spec.task_base import TaskSection

BoxedMathSpec = MathSpec | Math500Spec | DeepscalerSpec
"""The tasks that compare formulas."""


# The built-in tasks. `tasks.registry` says for each name what it is and which class it is.
BuiltInTask = (
    ArithmeticSpec
    | DummySpec
    | ReverseTextSpec
    | ReasoningGymSpec
    | Gsm8kSpec
    | MathSpec
    | Math500Spec
    | DeepscalerSpec
    | AimeSpec
    | MmluSpec
    | MmluChoiceSpec
    | MbppSpec
    | HumanEvalSpec
    | AppsSpec
    | IfEvalSpec
    | IfBenchSpec
    | RlvrIfevalSpec
    | IfMultiSpec
    | LlmJudgeSpec
    | SftJsonlSpec
    | RlvrMixedSpec
    | RowsSpec
)
"""A task of strop's own that is not made of others."""
PlainTask = BuiltInTask | UserTaskSpec
"""A task that is not made of others."""
PartTask = Annotated[
    Annotated[BuiltInTask, Field(discriminator="name"), Tag(BUILT_IN)]
    | Annotated[UserTaskSpec, Tag(USER_TASK)],
    Discriminator(tell_apart),
]
"""The same, read from a table."""
AnyPart = TypeVar("AnyPart", bound=Section)


class PartedSection(TaskSection):
    """What the tasks share whose problems and settings are their parts'; each names its `parts` itself."""

    @field_validator("parts", mode="before", check_fields=False)
    @classmethod
    def _check_parts(cls, parts: Any) -> Any:
        check_free_table(("task", "parts"), parts)
        return parts

    @model_validator(mode="after")
    def _check_asking(self) -> Self:
        given = dict(self.prompting)
        if self.thinking != "model_default":
            given["thinking"] = self.thinking
        for name, value in given.items():
            raise SpecConflict(
                {f"task.{name}": value},
                "each part says for itself how the model is asked",
                allowed=f"{name} in [task.parts.LABEL]",
                next_step="move the setting into the parts",
            )
        return self

    @property
    def num_train(self) -> int | None:
        """None: only the parts' data can tell."""
        return None

    @property
    def num_held_out(self) -> int | None:
        """None: only the parts' data can tell."""
        return None


def read_part(kind: type[AnyPart], label: str, table: dict[str, JsonValue]) -> AnyPart:
    """Return a part of a task that is made of others; what `kind` does not name is its task's.

    Raises: SpecConflict naming the setting that is wrong.
    """
    names = [name for name in kind.model_fields if name != "task"]
    own = {key: value for key, value in table.items() if key in names}
    settings = {key: value for key, value in table.items() if key not in names}
    try:
        return kind.model_validate({**own, "task": settings})
    except ValidationError as error:
        first = error.errors()[0]
        cause = first.get("ctx", {}).get("error")
        if isinstance(cause, SpecConflict):
            inside = f"task.parts.{label}."
            given = {key.replace("task.", inside, 1): value for key, value in cause.given.items()}
            raise SpecConflict(given, cause.why, allowed=cause.allowed, next_step=cause.next_step) from error
        if isinstance(cause, ConfigError):
            raise cause from error
        # Without the name of the section and of the task, which pydantic puts in between.
        where = [
            str(part)
            for part in first["loc"]
            if part not in ("task", settings.get("name"), BUILT_IN, USER_TASK)
        ]
        raise SpecConflict(
            {".".join(["task.parts", label, *where]): first["input"]},
            first["msg"],
            allowed=f"the settings of the part's task, and {', '.join(names[:-1])} and {names[-1]}",
            next_step="correct the setting; `strop explain task` lists those of every task",
        ) from error


def refuse_same_names(parts: Mapping[str, PlainTask]) -> None:
    """Refuse two classes of one name: results would not tell their examples apart.

    Raises: SpecConflict naming both.
    """
    known: dict[str, str] = {}
    for label, task in parts.items():
        if not isinstance(task, UserTaskSpec):
            continue
        other = known.setdefault(task.ref.name, label)
        if parts[other].name != task.name:
            raise SpecConflict(
                {f"task.parts.{one}.name": parts[one].name for one in (other, label)},
                f"two tasks are called {task.ref.name}",
                allowed="a name of its own for each class",
                next_step="rename one of the classes",
            )


class MixturePart(Section):
    """One part of a mixture: a task, and how much of it."""

    task: PartTask = Field(description="What the part asks.")
    weight: float = Field(
        default=1.0, gt=0.0, le=1e6, description="Share of its draws, relative to the other parts'."
    )
    count: int | None = Field(
        default=None, ge=1, le=10**7, description="Training examples used, from the first. none = all."
    )
    repeat: int = Field(default=1, ge=1, le=1000, description="How often each comes in an epoch.")


class MixtureSpec(PartedSection):
    """Several tasks trained as one."""

    name: Literal["mixture"] = Field(description="Which task: several tasks mixed.")
    mode: Literal["weighted", "proportional", "sequential"] = Field(
        default="weighted",
        description="How the parts' examples follow each other in an epoch: drawn by weight until all are"
        " used up, drawn by the parts' sizes, or one part after the other.",
        json_schema_extra=expert("published scores differ by how an answer is found"),
    )
    parts: dict[str, dict[str, JsonValue]] = Field(
        default={},
        description="The parts by label, each a table [task.parts.LABEL] with the settings of a task (name"
        " and its own), and: weight (1) of its draws, count (all) of its training examples, repeat (1)"
        " times in an epoch.",
    )

    @model_validator(mode="after")
    def _check_mixture(self) -> Self:
        if not self.parts:
            raise SpecConflict(
                {"task.parts": self.parts},
                "a mixture of nothing",
                allowed="one part or more, each a table [task.parts.LABEL] with the name of a task",
                next_step="add the parts",
            )
        if self.max_reply_tokens is not None:
            raise SpecConflict(
                {"task.max_reply_tokens": self.max_reply_tokens},
                "each part has its own limit",
                allowed="task.parts.LABEL.max_reply_tokens",
                next_step="move the setting into the parts",
            )
        refuse_same_names({label: part.task for label, part in self.read_parts().items()})
        return self

    def read_parts(self) -> dict[str, MixturePart]:
        """Return the parts by label, checked.

        Raises: SpecConflict naming the setting that is wrong.
        """
        return {label: read_part(MixturePart, label, table) for label, table in self.parts.items()}


MAX_FORMAT_WEIGHT = 0.1


class BlendPart(Section):
    """One verifier of a blend."""

    task: PartTask = Field(description="Whose verifier judges.")
    weight: float = Field(
        default=1.0, ge=0.0, le=1e3, description="What full marks of it add to the reward. 0 only records it."
    )
    optional: bool = Field(
        default=False,
        description="Whether a reply that it cannot score is scored by the others, with weights that add up"
        " to the same; else such a reply has no score.",
    )


class BlendSpec(PartedSection):
    """One task's problems, judged by its own verifier and by others, and the weighted sum of their scores."""

    name: Literal["blend"] = Field(description="Which task: one task judged by several verifiers.")
    data: str | None = Field(
        default=None,
        min_length=1,
        description="Label of the part whose problems are posed, and which says what is solved. The other"
        " parts only judge. none = the first part.",
        json_schema_extra=expert("one part's data are judged by all parts"),
    )
    alpha: float | None = Field(
        default=None,
        ge=0.0,
        le=1.0,
        description="For two parts, one of them llm-judge: the reward is alpha times the verifier's score and"
        " 1 - alpha times the judge's. none = the parts' weights.",
        json_schema_extra=expert("published mixtures weigh a verifier and a judge by one number"),
    )
    format_weight: float = Field(
        default=0.0,
        ge=0.0,
        le=1.0,
        description="Added for a wrong reply that all parts call well-formed, never beyond full marks.",
        json_schema_extra=expert("format is paid for apart from the answer"),
    )
    max_format_weight: float = Field(
        default=MAX_FORMAT_WEIGHT,
        ge=0.0,
        le=1.0,
        description="Largest task.format_weight; raise it to pay more for form than is wise.",
        json_schema_extra=expert("format must not outweigh the answer"),
    )
    parts: dict[str, dict[str, JsonValue]] = Field(
        default={},
        description="The verifiers by label, each a table [task.parts.LABEL] with the settings of a task"
        " (name and its own), and: weight (1) of its score, optional (false).",
    )

    @model_validator(mode="after")
    def _check_blend(self) -> Self:
        parts = self.read_parts()
        refuse_same_names({label: part.task for label, part in parts.items()})
        if self.data_label not in parts:
            raise SpecConflict(
                {"task.data": self.data, "task.parts": list(parts)},
                "no part has this label" if parts else "a blend of nothing",
                allowed="one part or more, each a table [task.parts.LABEL], and the label of one of them",
                next_step="add the part, or correct the label",
            )
        for label, part in parts.items():
            self._check_asking_of(label, part)
            if part.task.order_file is not None:
                raise SpecConflict(
                    {f"task.parts.{label}.order_file": part.task.order_file},
                    "the order of a blend is its own",
                    allowed="task.order_file",
                    next_step="move the setting, with the bounds that belong to it, to the blend",
                )
        if self.max_reply_tokens is not None:
            raise SpecConflict(
                {"task.max_reply_tokens": self.max_reply_tokens},
                "the part that poses the problems has its own limit",
                allowed=f"task.parts.{self.data_label}.max_reply_tokens",
                next_step="move the setting into that part",
            )
        if self.format_weight > self.max_format_weight:
            raise SpecConflict(
                {"task.format_weight": self.format_weight, "task.max_format_weight": self.max_format_weight},
                "a policy would be paid for form rather than for being right",
                allowed="a format weight that is at most the largest one",
                next_step="lower task.format_weight, or raise task.max_format_weight if it is meant",
            )
        self._check_weights(parts)
        return self

    def _check_asking_of(self, label: str, part: BlendPart) -> None:
        for name in part.task.prompting if label != self.data_label else ():
            raise SpecConflict(
                {f"task.parts.{label}.{name}": part.task.prompting[name], "task.data": self.data_label},
                "this part only judges, and asks the model nothing",
                allowed=f"{name} in the part that poses the problems",
                next_step=f"move the setting to [task.parts.{self.data_label}]",
            )

    def _check_weights(self, parts: dict[str, BlendPart]) -> None:
        weights = {f"task.parts.{label}.weight": part.weight for label, part in parts.items()}
        if self.alpha is None:
            if not any(weights.values()):
                raise SpecConflict(
                    weights,
                    "nothing is left of the reward",
                    allowed="at least one weight above 0",
                    next_step="raise a weight",
                )
            return
        num_judges = sum(isinstance(part.task, LlmJudgeSpec) for part in parts.values())
        given = {key: weight for key, weight in weights.items() if weight != 1.0}
        if len(parts) != 2 or num_judges != 1 or given:
            raise SpecConflict(
                {"task.alpha": self.alpha, "task.parts": list(parts), **given},
                "alpha weighs one verifier against one judge, and nothing else does",
                allowed="two parts without weights, one of them llm-judge; or weights and no alpha",
                next_step="remove task.alpha, or the other weights and parts",
            )

    @property
    def data_label(self) -> str:
        """Label of the part whose problems are posed; '' where there is none."""
        return self.data if self.data is not None else next(iter(self.parts), "")

    def read_parts(self) -> dict[str, BlendPart]:
        """Return the parts by label, checked.

        Raises: SpecConflict naming the setting that is wrong.
        """
        return {label: read_part(BlendPart, label, table) for label, table in self.parts.items()}

    def read_weights(self) -> dict[str, float]:
        """Return what full marks of each part add to the reward."""
        parts = self.read_parts()
        if self.alpha is None:
            return {label: part.weight for label, part in parts.items()}
        return {
            label: 1.0 - self.alpha if isinstance(part.task, LlmJudgeSpec) else self.alpha
            for label, part in parts.items()
        }


TaskSpec = Annotated[
    Annotated[BuiltInTask | MixtureSpec | BlendSpec, Field(discriminator="name"), Tag(BUILT_IN)]
    | Annotated[UserTaskSpec, Tag(USER_TASK)],
    Discriminator(tell_apart),
]
"""Any task section; its tag is `name`."""


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
    "RowsSpec",
    "SftJsonlSpec",
    "TaskSpec",
    "UserTaskSpec",
    "judge_sections",
    "plain_sections",
    "role_judges",
]
