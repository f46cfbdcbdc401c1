"""One task judged by several verifiers, whose scores are added up."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, JsonValue, model_validator

from strop.spec.base import Section, SpecConflict
from strop.spec.judge_tasks import LlmJudgeSpec
from strop.spec.parts import PartedSection, PartTask, read_part, refuse_same_names

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
    )
    alpha: float | None = Field(
        default=None,
        ge=0.0,
        le=1.0,
        description="For two parts, one of them llm-judge: the reward is alpha times the verifier's score and"
        " 1 - alpha times the judge's. none = the parts' weights.",
    )
    format_weight: float = Field(
        default=0.0,
        ge=0.0,
        le=1.0,
        description="Added for a wrong reply that all parts call well-formed, never beyond full marks.",
    )
    max_format_weight: float = Field(
        default=MAX_FORMAT_WEIGHT,
        ge=0.0,
        le=1.0,
        description="Largest task.format_weight; raise it to pay more for form than is wise.",
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
