"""How long and how wide a run is."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from strop.spec.base import Section, SpecConflict


class TrainSpec(Section):
    """The loop's sizes. One optimizer step per batch of prompts."""

    terms: Literal["rl", "sft", "rl+sft", "dpo", "distill"] = Field(
        default="rl",
        description="What the loss is made of: 'rl' rollouts of the task and their rewards, 'sft' the"
        " demonstrations of sft.source, 'rl+sft' the sum of both in every step, 'dpo' the pairs of"
        " dpo.source, 'distill' rollouts and what the teacher makes of them.",
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
    max_staleness: int = Field(
        default=0,
        ge=0,
        le=1000,
        description="Optimizer steps that the weights which sampled a rollout may be behind those that it"
        " moves. 0 samples each step's rollouts with the newest weights; above 0 sampling goes on while the"
        " learner works, and one step more than sync_every - 1 hides the shorter of the two.",
    )
    sync_every: int = Field(
        default=1, ge=1, le=1000, description="Optimizer steps between publications of weights to the engine."
    )
    deterministic: bool = Field(
        default=False,
        description="Wait for every rollout under way before weights are published, so that a run with"
        " max_staleness above 0 gives the same curve each time, and after a resume; costs overlap.",
    )
    micro_batch_tokens: int | None = Field(
        default=None,
        ge=1,
        le=10**9,
        description="Tokens in one forward and backward pass at most; the gradient does not depend on it."
        " none = 1280 on a CPU; on a GPU what half of the memory holds that weights and optimizer leave.",
    )
    activation_checkpointing: bool | None = Field(
        default=None,
        description="Whether a backward pass computes the inside of layers again instead of keeping it:"
        " about a third more work for a fraction of the memory, and the same gradients. none = only where"
        " memory is too small otherwise.",
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

    @model_validator(mode="after")
    def _check_schedule(self) -> TrainSpec:
        # The engine stays at version v while the learner makes the steps v ... v + sync_every - 1, whose
        # rollouts can only come from v: below the bound each waits for the other.
        if self.max_staleness < self.sync_every - 1:
            raise SpecConflict(
                {"train.max_staleness": self.max_staleness, "train.sync_every": self.sync_every},
                "the learner would wait for rollouts of newer weights, and the engine for newer weights",
                allowed="max_staleness >= sync_every - 1",
                next_step=f"set train.max_staleness to {self.sync_every}, which also hides the shorter stage",
            )
        return self

    @property
    def has_rl(self) -> bool:
        """Whether rollouts are sampled and trained on."""
        return self.terms in ("rl", "rl+sft", "distill")

    @property
    def has_sft(self) -> bool:
        """Whether demonstrations are trained on."""
        return self.terms in ("sft", "rl+sft")
