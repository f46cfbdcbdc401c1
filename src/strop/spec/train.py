"""How long and how wide a run is."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from strop.spec.base import Section


class TrainSpec(Section):
    """The loop's sizes. One optimizer step per batch of prompts."""

    terms: Literal["rl", "sft", "rl+sft"] = Field(
        default="rl",
        description="What the loss is made of: 'rl' rollouts of the task and their rewards, 'sft' the"
        " demonstrations of sft.source, 'rl+sft' the sum of both in every step.",
    )
    steps: int = Field(default=40, ge=1, le=10**7, description="Optimizer steps until the run is done.")
    prompts_per_step: int = Field(
        default=8, ge=1, le=10**6, description="Examples drawn per step; each makes one group."
    )
    rollouts_per_prompt: int = Field(
        default=8,
        ge=1,
        le=10**5,
        description="Rollouts per example, compared with each other. At least 2: a single rollout has"
        " nothing to be compared with.",
    )
    micro_batch_tokens: int | None = Field(
        default=None,
        ge=1,
        le=10**9,
        description="Tokens in one forward and backward pass at most; the gradient does not depend on it."
        " none = derived from the memory of the machine.",
    )
    checkpoint_every: int = Field(
        default=20, ge=1, le=10**7, description="Steps between checkpoints. The last step always writes one."
    )
    keep_checkpoints: int = Field(
        default=2, ge=1, le=10**7, description="Newest complete checkpoints kept; older ones are deleted."
    )
    accept: str | None = Field(
        default=None,
        pattern=r"^\s*[a-z_.]+(@\w+)?\s*:\s*\S[^;]*(;\s*[a-z_.]+(@\w+)?\s*:\s*\S[^;]*)*$",
        description="Checks of the gate whose refusal is accepted, each with a reason, as"
        " 'NAME: reason; NAME: reason'. 'audit.PROBE' accepts what one probe of the audit found,"
        " 'audit.PROBE@VERSION' as long as the task's version begins so. none = every check must pass.",
    )

    @property
    def has_rl(self) -> bool:
        """Whether rollouts are sampled and trained on."""
        return self.terms != "sft"

    @property
    def has_sft(self) -> bool:
        """Whether demonstrations are trained on."""
        return self.terms != "rl"
