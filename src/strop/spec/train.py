"""How long and how wide a run is."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from strop.spec.base import Section, SpecConflict


class TrainSpec(Section):
    """The loop's sizes. A step is one batch of prompts; it takes one optimizer step, or several."""

    terms: Literal["rl", "sft", "rl+sft", "dpo", "distill"] = Field(
        default="rl",
        description="What the loss is made of: 'rl' rollouts of the task and their rewards, 'sft' the"
        " demonstrations of sft.source, 'rl+sft' the sum of both in every step, 'dpo' the pairs of"
        " dpo.source, 'distill' rollouts and what the teacher makes of them.",
    )
    steps: int = Field(
        default=40, ge=1, le=10**7, description="Steps until the run is done, each with a batch of its own."
    )
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
    mini_batches: int = Field(
        default=1,
        ge=1,
        le=10**6,
        description="Parts of equally many prompts into which a step's batch is cut, each for one optimizer"
        " step of its own. With several, ratios start from the weights that the batch began with, so that"
        " clip ranges act. It must divide prompts_per_step.",
    )
    epochs: int = Field(
        default=1,
        ge=1,
        le=1000,
        description="How often a step's batch is gone through, in an order of its own each time.",
    )
    max_kl: float | None = Field(
        default=None,
        gt=0.0,
        description="KL divergence, in nats per token, from the policy that ratios start from: an optimizer"
        " step that begins farther away is left out, and so is the rest of its batch. none = no bound.",
    )
    max_staleness: int = Field(
        default=0,
        ge=0,
        le=1000,
        description="Steps that the weights which sampled a rollout may be behind those that it moves. 0"
        " samples each step's rollouts with the newest weights; above 0 sampling goes on while the learner"
        " works, and one step more than sync_every - 1 hides the shorter of the two.",
    )
    sync_every: int = Field(
        default=1, ge=1, le=1000, description="Steps between publications of weights to the engine."
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

    @model_validator(mode="after")
    def _check_mini_batches(self) -> TrainSpec:
        given = {"train.mini_batches": self.mini_batches, "train.epochs": self.epochs}
        if self.steps_per_batch > 1 and self.terms != "rl":
            raise SpecConflict(
                {"train.terms": self.terms, **given},
                "only a batch of rollouts alone is gone through several times",
                allowed="train.terms = 'rl', or one mini-batch and one epoch",
                next_step="remove train.mini_batches and train.epochs",
            )
        if self.prompts_per_step % self.mini_batches:
            raise SpecConflict(
                {"train.prompts_per_step": self.prompts_per_step, "train.mini_batches": self.mini_batches},
                "the parts of a batch would differ in size, and their optimizer steps in weight",
                allowed="a train.mini_batches that divides train.prompts_per_step",
                next_step="change one of the two",
            )
        if self.max_kl is not None and self.steps_per_batch == 1:
            raise SpecConflict(
                {"train.max_kl": self.max_kl, **given},
                "the only optimizer step of a batch begins where the batch began",
                allowed="train.max_kl beside several mini-batches or epochs",
                next_step="set train.mini_batches, or remove train.max_kl",
            )
        return self

    @property
    def steps_per_batch(self) -> int:
        """Optimizer steps that a batch takes."""
        return self.mini_batches * self.epochs

    @property
    def steps_per_window(self) -> int:
        """Optimizer steps between two publications: all on rollouts of the weights before the first."""
        return self.sync_every * self.steps_per_batch

    @property
    def num_optimizer_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.steps * self.steps_per_batch

    @property
    def has_rl(self) -> bool:
        """Whether rollouts are sampled and trained on."""
        return self.terms in ("rl", "rl+sft", "distill")

    @property
    def has_sft(self) -> bool:
        """Whether demonstrations are trained on."""
        return self.terms in ("sft", "rl+sft")
