"""What a policy is taught by a model that answers beside it."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from strop.spec.base import Section
from strop.spec.template import refuse_malformed


class TeacherSpec(Section):
    """A teacher, and how the policy is made to answer like it."""

    source: Literal["none", "model", "initial", "current"] = Field(
        default="none",
        description="Who teaches: 'model' the one of teacher.model, 'initial' the weights that the run starts"
        " from, 'current' the weights being trained, without gradient. 'none' = nobody.",
    )
    model: str | None = Field(
        default=None,
        min_length=1,
        description="Where the teacher comes from, like model.uri; its vocabulary must be the policy's. none"
        " = only where teacher.source is not 'model'.",
    )
    context: str | None = Field(
        default=None,
        min_length=1,
        description="What the teacher reads behind the last message of the prompt and the policy does not;"
        " {answer} stands for the example's answer, {NAME} for its field of that name. none = the same"
        " prompt.",
    )
    form: Literal["exact", "sampled"] = Field(
        default="exact",
        description="'exact' compares whole distributions at every position of a reply; 'sampled' makes the"
        " teacher's log-probability of each sampled token, minus the policy's, its advantage.",
    )
    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = Field(
        default="jsd",
        description="Of 'exact': KL(teacher || policy), KL(policy || teacher), or the Jensen-Shannon"
        " divergence between both.",
    )
    jsd_beta: float = Field(
        default=0.5,
        ge=0.0,
        le=1.0,
        description="Share of the teacher in the mixture of 'jsd'. 0 is defined as the forward KL, 1 as the"
        " reverse one.",
    )
    top_k: int | None = Field(
        default=None,
        ge=1,
        le=10**6,
        description="Compare only this many of the teacher's most likely tokens. none = all.",
    )
    rest: Literal["tail", "renorm"] = Field(
        default="tail",
        description="What becomes of the others under top_k: 'tail' compares what is left of both in one"
        " bucket, 'renorm' scales both up to 1.",
    )
    student_frac: float = Field(
        default=1.0,
        ge=0.0,
        le=1.0,
        description="Share of steps on the policy's own replies; the other steps take the demonstrations of"
        " sft.source.",
    )
    rows: Literal["all", "unsolved"] = Field(
        default="all",
        description="Which of the policy's own replies are taught: all, or those that did not solve the"
        " task.",
    )
    weight: float = Field(
        default=1.0,
        gt=0.0,
        le=1e6,
        description="Factor of the term; beside rewards (train.terms = 'rl') that of the teacher's part of"
        " the advantage.",
    )

    @model_validator(mode="after")
    def _check_context(self) -> Self:
        if self.context is not None:
            refuse_malformed("teacher.context", self.context)
        return self
