"""One task's problems judged by several verifiers: the reward is the weighted sum of their scores.

R = sum of w_i * s_i, where s_i is a part's reward as a share of its full marks. If a part with a weight
cannot score a reply, the reply has no score. A part of weight 0 is only recorded. The first part poses,
limits and ends the problems and decides which replies are correct; the others only judge.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, Self

from pydantic import Field, JsonValue, model_validator

from strop import __version__
from strop.errors import DataError, StropError
from strop.rollout import Example, FailureOwner, Message, Outcome, Split
from strop.spec.base import SpecConflict
from strop.spec.parts import PartedSection, TaskPart, read_part, refuse_same_names
from strop.spec.task import PROMPTING
from strop.tasks.contract import Task, TaskLimits, within_bounds
from strop.tasks.failures import catch_failure
from strop.tasks.llm_judge.task import LlmJudge
from strop.tasks.traits import (
    ProgramForm,
    counts_of,
    group_verifier_of,
    judge_digests_of,
    limits_of,
    problem_of,
    program_form_of,
    row_keys_of,
    variant_of,
)
from strop.tasks.version import hashed_limits

_VERIFIER = "blend-2"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    label: str
    task: Task
    weight: float
    settings: str
    """Its task's settings as JSON: they identify a verifier that poses no problems."""


class BlendPart(TaskPart):
    """One verifier of a blend."""

    weight: float = Field(
        default=1.0, ge=0.0, le=1e3, description="What full marks of it add to the reward. 0 only records it."
    )


class BlendSpec(PartedSection):
    """One task's problems, judged by its own verifier and by others, and the weighted sum of their scores."""

    name: Literal["blend"]
    parts: dict[str, dict[str, JsonValue]] = Field(
        default={},
        description="The verifiers by label, each a table [task.parts.LABEL] with the settings of a task"
        " (name and its own), and: weight (1) of its score. The problems are those of the first part, which"
        " also says what is solved; the others only judge.",
    )

    @model_validator(mode="after")
    def _check_blend(self) -> Self:
        parts = self.read_parts()
        refuse_same_names({label: part.task for label, part in parts.items()})
        if not any(part.weight for part in parts.values()):
            raise SpecConflict(
                {f"task.parts.{label}.weight": part.weight for label, part in parts.items()}
                or {"task.parts": {}},
                "nothing is left of the reward" if parts else "a blend of nothing",
                allowed="parts, each a table [task.parts.LABEL], one of them with a weight above 0",
                next_step="add a part, or raise a weight",
            )
        for label, part in parts.items():
            for name in part.task.prompting if label != self.data_label else ():
                raise SpecConflict(
                    {f"task.parts.{label}.{name}": part.task.prompting[name]},
                    "this part only judges, and asks the model nothing",
                    allowed=f"{name} in the part that poses the problems",
                    next_step=f"move the setting to [task.parts.{self.data_label}]",
                )
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
        return self

    @property
    def data_label(self) -> str:
        """Label of the part whose problems are posed: the first."""
        return next(iter(self.parts))

    def read_parts(self) -> dict[str, BlendPart]:
        """Return the parts by label, checked.

        Raises: SpecConflict naming the setting that is wrong.
        """
        return {label: read_part(BlendPart, label, table) for label, table in self.parts.items()}

    def posed_parts(self) -> dict[str, BlendPart]:
        """Return the part whose problems are posed; the others only judge."""
        return {self.data_label: self.read_parts()[self.data_label]}


class Blend:
    """One task with the data, and the verifiers that judge its replies."""

    name = "blend"

    def __init__(self, spec: BlendSpec, tasks: Mapping[str, Task]) -> None:
        self._parts = [
            _Part(
                label=label,
                task=tasks[label],
                weight=part.weight,
                settings=part.task.model_dump_json(exclude=set(PROMPTING)),
            )
            for label, part in spec.read_parts().items()
        ]
        self._data = self._parts[0]
        self._full_marks = math.fsum(part.weight for part in self._parts)
        self.limits = self._blend_limits(self._data.task.limits)
        self._checked: dict[Split, Sequence[Example]] = {}

    def _blend_limits(self, own: TaskLimits) -> TaskLimits:
        """Return the limits of the part with the data, with the marks and the time of all parts."""
        limits = [part.task.limits for part in self._parts]
        verify_limits_s = [limit.verify_limit_s for limit in limits if limit.verify_limit_s is not None]
        chances = [part.weight * part.task.limits.chance for part in self._parts]
        return replace(
            own,
            max_reward=self._full_marks,
            min_reward=math.fsum(
                part.weight * part.task.limits.min_reward / part.task.limits.max_reward
                for part in self._parts
            ),
            chance=math.fsum(chances) / self._full_marks,
            # One verifier after the other, in one process.
            verify_limit_s=math.fsum(verify_limits_s) if verify_limits_s else None,
            verify_keeps_time=bool(verify_limits_s)
            and all(limit.verify_keeps_time for limit in limits if limit.verify_limit_s is not None),
        )

    @cached_property
    def version(self) -> str:
        """Hash over the weights, the version of the part with the data, and the other parts' verifiers."""
        parts = []
        for part in self._parts:
            # The data of parts that only judge is not read.
            identity = f"strop {__version__} {part.settings}"
            if part is self._data:
                identity = part.task.version
            elif isinstance(part.task, LlmJudge):
                identity = part.task.judge_digest
            parts.append([part.label, part.weight, identity])
        text = json.dumps([_VERIFIER, parts, hashed_limits(self.limits)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def judge_digests(self) -> Sequence[str]:
        """Hashes of the models that judge the parts."""
        return judge_digests_of(*(part.task for part in self._parts))

    @property
    def variant(self) -> str | None:
        """The variant of the part with the data."""
        return variant_of(self._data.task)

    @property
    def counts(self) -> Mapping[str, int]:
        """The counts of the part with the data."""
        return counts_of(self._data.task)

    def program_form(self, example: Example) -> ProgramForm | None:
        """Return how the part with the data uses the program of a reply."""
        return program_form_of(self._data.task, example)

    def examples(self, split: Split) -> Sequence[Example]:
        """Return the problems of the part with the data.

        Raises: DataError as that part does, or naming an example that another part cannot judge.
        """
        if split not in self._checked:
            examples = self._data.task.examples(split)
            for part in self._parts:
                self._require_judgeable(part, examples)
            self._checked[split] = examples
        return self._checked[split]

    def limits_of(self, example: Example) -> TaskLimits:
        """Return the example's limits in its own task, with the marks and the time of all parts."""
        return self._blend_limits(limits_of(self._data.task, example))

    def row_keys(self) -> Mapping[str, str | None]:
        """Return which example each row of the part with the data became."""
        return row_keys_of(self._data.task)

    def problem_of(self, example: Example) -> str | None:
        """Return the problem that the part with the data counts the example to."""
        return problem_of(self._data.task, example)

    def render(self, example: Example) -> tuple[Message, ...]:
        """Pose the example as its own task does."""
        return self._data.task.render(example)

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        """Return the gold replies of the example's own task."""
        return self._data.task.gold_replies(example)

    def verify(self, example: Example, text: str) -> Outcome:
        """Let every part judge, and add the scores up.

        Raises: any exception of a verifier that has a weight.
        """
        outcomes = {part.label: self._judge(part, example, text) for part in self._parts}
        own = outcomes[self._data.label]
        parts: dict[str, float | None] = {}
        metrics: dict[str, float] = {}
        for part in self._parts:
            outcome = outcomes[part.label]
            metrics |= {**outcome.metrics, **metrics}
            score = None if outcome.reward is None else outcome.reward / part.task.limits.max_reward
            if score is not None:
                metrics[f"score_{part.label}"] = score
            if part.weight != 0.0:
                parts[part.label] = None if score is None else part.weight * score
        forms = [outcome.format_ok for outcome in outcomes.values() if outcome.format_ok is not None]
        lost = next((label for label in outcomes if label in parts and parts[label] is None), None)
        return Outcome(
            parts=parts,
            is_correct=own.is_correct,
            format_ok=all(forms) if forms else None,
            timed_out=any(outcome.timed_out for outcome in outcomes.values()),
            extracted=own.extracted,
            isolation=next((o.isolation for o in outcomes.values() if o.isolation is not None), None),
            metrics=metrics,
            failure=None if lost is None else outcomes[lost].failure,
        )

    def _judge(self, part: _Part, example: Example, text: str) -> Outcome:
        example_of_part = self._part_example(part, example)
        limits = limits_of(part.task, example) if part is self._data else part.task.limits
        # Bounds are checked per part: a small weight would hide an impossible score in the sum.
        if part.weight != 0.0:
            return within_bounds(part.task.verify(example_of_part, text), limits)
        with catch_failure(FailureOwner.TASK):
            return within_bounds(part.task.verify(example_of_part, text), limits)
        return Outcome(parts={})

    def _part_example(self, part: _Part, example: Example) -> Example:
        """Return the example in a part's form: an LLM judge needs the rendered question."""
        if part is self._data or not isinstance(part.task, LlmJudge):
            return example
        prompt = "\n\n".join(message.text for message in self.render(example))
        return part.task.as_question(prompt, example.answer, example.fields)

    def _require_judgeable(self, part: _Part, examples: Sequence[Example]) -> None:
        """Refuse examples that a part cannot judge, before any reply to them is lost.

        A verifier with a time limit is not tried here; the gate's self-test does that.
        Raises: DataError naming the example and the part.
        """
        if any(
            group_verifier_of(part.task, self._part_example(part, one)) is not None for one in examples[:1]
        ):
            raise DataError(
                f"part {part.label} of the blend compares the replies of a group",
                allowed="parts that judge each reply alone",
                next_step="name all rewards in task.reward of one task rows, which may compare replies",
            )
        if part is self._data:
            return
        for example in examples:
            try:
                if isinstance(part.task, LlmJudge):
                    part.task.require_judgeable(self._part_example(part, example))
                elif part.task.limits.verify_limit_s is None:
                    part.task.verify(example, "")
            except (StropError, LookupError, TypeError, ValueError) as error:
                raise DataError(
                    f"part {part.label} of the blend cannot judge example {example.example_id} of task"
                    f" {example.task} ({type(error).__name__}: {error})",
                    allowed="parts whose verifier knows the columns of the data",
                    next_step=f"remove task.parts.{part.label}, or name another verifier there",
                ) from error
