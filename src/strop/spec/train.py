"""The training loop: its sizes, its optimizer, its evaluations, and its tripwires."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from strop.spec.base import Section, SpecConflict, expert

GATE_CHECKS = (
    *("prompt", "tokenizer", "tensors", "weights", "audit", "judges", "schedule", "overlap"),
    *("room", "kl", "demonstrations", "terminator", "parity"),
)
"""In the order in which they run."""
AUDIT_PROBES = (
    *("empty", "garbage", "echo", "constant", "gold", "near_miss", "label_leak", "trivial_rule"),
    *("determinism", "failure_paths", "forgeries", "cost", "judge_injection", "ceiling"),
)
"""Those of `strop.audit`, which this room cannot import."""


def read_accepted(text: str | None) -> dict[str, str]:
    """Return the accepted checks of a `train.accept`, each with its reason."""
    pairs = [entry.split(":", 1) for entry in text.split(";")] if text else []
    return {name.strip(): reason.strip() for name, reason in pairs}


class TrainSpec(Section):
    """The loop's sizes. A step is one batch of prompts; it takes one optimizer step, or several."""

    terms: Literal["rl", "sft", "rl+sft", "dpo", "distill"] = Field(
        default="rl",
        description="Terms of the loss: 'rl' rollouts of the task and their rewards, 'sft' the demonstrations"
        " of sft.source, 'rl+sft' the sum of both in every step, 'dpo' the pairs of dpo.source, 'distill'"
        " rollouts and a teacher's probabilities.",
    )
    steps: int = Field(default=40, ge=1, le=10**7, description="Number of steps of the run, one batch each.")
    prompts_per_step: int = Field(
        default=8, ge=1, le=10**6, description="Examples drawn per step; each makes one group."
    )
    group_size: int = Field(
        default=8,
        ge=1,
        le=10**5,
        description="Rollouts per example, which are compared with each other; at least 2 for algorithms that"
        " compare them.",
    )
    mini_batches: int = Field(
        default=1,
        ge=1,
        le=10**6,
        description="Equal parts into which a step's batch is split, one optimizer step each. With several,"
        " ratios start at the weights that the batch began with, so that clipping has an effect. It must"
        " divide prompts_per_step.",
        json_schema_extra=expert("PPO-style recipes take several optimizer steps per batch of rollouts"),
    )
    epochs: int = Field(
        default=1,
        ge=1,
        le=1000,
        description="Passes over a step's batch, each in a different order.",
        json_schema_extra=expert("PPO-style recipes go through a batch more than once"),
    )
    max_staleness: int = Field(
        default=0,
        ge=0,
        le=1000,
        description="Steps by which the weights that sampled a rollout may be older than those it updates. 0"
        " samples each step's rollouts with the newest weights; above 0 sampling overlaps with learning, and"
        " the shorter of the two costs no time.",
    )
    deterministic: bool = Field(
        default=False,
        description="Wait for every rollout in flight before weights are published, so that a run with"
        " max_staleness above 0 is reproducible, also after a resume; costs overlap.",
        json_schema_extra=expert("a comparison of asynchronous runs needs the same curve each time"),
    )
    micro_batch_tokens: int | None = Field(
        default=None,
        ge=1,
        le=10**9,
        description="Most tokens in one forward and backward pass; the gradient does not depend on it. none ="
        " 1280 on a CPU; on a GPU as many as fit into half of the memory left by weights and optimizer.",
        json_schema_extra=expert("an estimate of memory can be wrong, and long replies need smaller pieces"),
    )
    activation_checkpointing: bool | None = Field(
        default=None,
        description="Recompute the inside of layers in the backward pass instead of storing it: about a third"
        " more work for a fraction of the memory, and the same gradients. none = only if memory is too small"
        " otherwise.",
        json_schema_extra=expert("an estimate of memory can be wrong"),
    )
    checkpoint_every: int = Field(
        default=20, ge=1, le=10**7, description="Steps between checkpoints. The last step always writes one."
    )
    keep_checkpoints: int = Field(
        default=2,
        ge=1,
        le=10**7,
        description="Number of newest complete checkpoints to keep; older ones are deleted.",
        json_schema_extra=expert("a study of training keeps all checkpoints, a small disk one"),
    )
    accept: str | None = Field(
        default=None,
        pattern=r"^\s*[a-z_.]+(@\w+)?\s*:\s*\S[^;]*(;\s*[a-z_.]+(@\w+)?\s*:\s*\S[^;]*)*$",
        description="Checks of the gate whose refusal is accepted, each with a reason, as 'NAME: reason;"
        " NAME: reason'. 'audit.PROBE' accepts the findings of one probe of the audit, 'audit.PROBE@VERSION'"
        " only while the task's version begins with VERSION. none = every check must pass.",
        json_schema_extra=expert(
            "a check can be wrong about a task, and each refusal must be accepted by name and with a reason"
        ),
    )

    @field_validator("accept")
    @classmethod
    def _check_accept(cls, text: str | None) -> str | None:
        # A probe may be accepted for one version of the task: `audit.PROBE@VERSION`.
        names = (
            name.partition("@")[0] if name.startswith("audit.") else name for name in read_accepted(text)
        )
        allowed = (*GATE_CHECKS, *(f"audit.{probe}" for probe in AUDIT_PROBES))
        if unknown := ", ".join(name for name in names if name not in allowed):
            raise SpecConflict(
                {"train.accept": unknown},
                "the gate has no such check",
                allowed=", ".join(allowed),
                next_step="correct the name",
            )
        return text

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
        return self

    @property
    def steps_per_batch(self) -> int:
        """Optimizer steps per batch."""
        return self.mini_batches * self.epochs

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


class OptimizerSpec(Section):
    """AdamW and its schedule."""

    lr: float = Field(
        default=1e-5, gt=0.0, le=1.0, description="Learning rate after warm-up, before any decay."
    )
    weight_decay: float = Field(
        default=0.0,
        ge=0.0,
        le=1.0,
        description="Decoupled weight decay per step, multiplied by the learning rate. 0 = no decay.",
        json_schema_extra=expert("published recipes of full fine-tuning set it"),
    )
    beta2: float = Field(
        default=0.999,
        ge=0.0,
        lt=1.0,
        description="Decay rate of the second moment.",
        json_schema_extra=expert(
            "published recipes set it: 0.95 and 0.99 are common, and 0.999 is slow to forget a spike"
        ),
    )
    max_grad_norm: float = Field(
        default=1.0,
        gt=0.0,
        description="Gradients with a larger L2 norm over all weights are scaled down to this norm.",
        json_schema_extra=expert("published recipes clip at 0.1 to 1"),
    )
    warmup_steps: int = Field(
        default=0,
        ge=0,
        le=10**7,
        description="Optimizer steps over which the learning rate rises linearly from 0.",
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="linear",
        description="Learning rate after warm-up: linear or cosine decay over all optimizer steps of the run,"
        " or constant, with which the last steps of a short run swing.",
    )
    final_frac: float = Field(
        default=0.0,
        ge=0.0,
        lt=1.0,
        description="Share of the learning rate that 'linear' and 'cosine' reach at the end of the run.",
        json_schema_extra=expert("published schedules end at a tenth of the rate rather than at 0"),
    )

    @model_validator(mode="after")
    def _check_decay(self) -> OptimizerSpec:
        if self.schedule == "constant" and self.final_frac != 0.0:
            raise SpecConflict(
                {"optimizer.schedule": self.schedule, "optimizer.final_frac": self.final_frac},
                "a learning rate that stays never gets there",
                allowed="optimizer.final_frac beside 'linear' or 'cosine'",
                next_step="set optimizer.schedule, or remove optimizer.final_frac",
            )
        return self


class EvalSpec(Section):
    """Evaluation on the held-out split, before the first step and after the last."""

    every: int | None = Field(
        default=None,
        ge=1,
        le=10**7,
        description="Steps between evaluations during training. none = only before and after.",
    )
    num_examples: int | None = Field(
        default=None, ge=1, le=10**7, description="Number of held-out examples, from the first. none = all."
    )
    num_samples: int | None = Field(
        default=4,
        ge=1,
        le=10**5,
        description="Sampled rollouts per example, besides the greedy one. none = greedy only.",
    )
    baselines: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description="Stored results that an evaluation from a file is compared with in its table: NAME=PLACE"
        " or PLACE, where PLACE is a result, a folder of results, a run, a model with results, or the name of"
        " an evaluation. Not used in training.",
        json_schema_extra=expert("most evaluations are compared with nothing"),
    )


_WATCHED = " A larger share is an alarm. none = not watched."


class TripwireSpec(Section):
    """Bounds of a healthy run."""

    max_zero_variance_frac: float | None = Field(
        default=0.95,
        ge=0.0,
        le=1.0,
        description="Largest share of a step's groups whose rewards are all equal, so that"
        " nothing is learned from them." + _WATCHED,
        json_schema_extra=expert("hard tasks start with few groups that differ"),
    )
    max_truncated_frac: float | None = Field(
        default=0.5,
        ge=0.0,
        le=1.0,
        description="Largest share of a step's replies that are truncated at their token limit." + _WATCHED,
        json_schema_extra=expert("tight token limits are sometimes meant"),
    )
    max_failed_frac: float | None = Field(
        default=0.1,
        ge=0.0,
        le=1.0,
        description="Largest share of a step's rollouts that could not be scored." + _WATCHED,
        json_schema_extra=expert("flaky judges lose more rollouts than a healthy one"),
    )
    max_drift_nats: float | None = Field(
        default=0.06,
        gt=0.0,
        description="Mean absolute difference between the engine's and the trainer's log-probability of a"
        " sampled token, in nats. none = not watched.",
        json_schema_extra=expert("quantised engines and asynchronous runs drift further than native ones"),
    )
    min_entropy_nats: float | None = Field(
        default=0.005,
        ge=0.0,
        description="Mean entropy of the policy over sampled tokens, in nats; below it is an alarm."
        " none = not watched.",
        json_schema_extra=expert("tasks of one right answer end with little entropy"),
    )
    max_unearned_ratio: float | None = Field(
        default=2.0,
        ge=1.0,
        description="How many times as much as in the first 8 steps wrong replies may earn over the last 8"
        " while right ones become no more frequent. none = not watched, for rewards that grade partial work.",
        json_schema_extra=expert("rewards that grade partial work rise before answers are right"),
    )
    max_stall_s: float | None = Field(
        default=600.0,
        gt=0.0,
        description="Seconds without progress of any stage. none = not watched.",
        json_schema_extra=expert("a slow judge or a large model may be silent for longer"),
    )
    on_alarm: Literal["warn", "stop-on-collapse", "stop"] = Field(
        default="stop-on-collapse",
        description="Effect of an alarm, besides being recorded and shown. 'stop' ends the run, with its last"
        " checkpoint intact; 'stop-on-collapse' ends it if the signs of a collapse coincide for 5 consecutive"
        " steps; 'warn' never ends it.",
        json_schema_extra=expert(
            "a sweep may stop at the first alarm, and a study of collapses must continue through it"
        ),
    )
