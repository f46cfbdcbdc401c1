"""The training loop: its sizes, its optimizer, its evaluations, and the trouble that it watches for."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from strop.spec.base import Section, SpecConflict, expert


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
    group_size: int = Field(
        default=8,
        ge=1,
        le=10**5,
        description="Rollouts per example, compared with each other. At least 2: a single rollout has"
        " nothing to be compared with.",
    )
    branches: int = Field(
        default=1,
        ge=1,
        le=10**5,
        description="Rollouts that share their first turns, in an environment: these are played once, and so"
        " many go on from there, each in a copy of the world. What they share is trained once, by the mean of"
        " what they earned, beside the group's other such turns; what follows by its own reward, beside what"
        " followed the same. 1 = none share any. It must divide group_size.",
        json_schema_extra=expert(
            "of a long attempt one turn decides, and attempts that differ there show it"
        ),
    )
    shared_turns: int = Field(
        default=1,
        ge=1,
        le=10_000,
        description="Turns that rollouts share under train.branches; later by a few where programs that the"
        " model started are still running then.",
        json_schema_extra=expert("where attempts of an environment begin to differ is its own"),
    )
    mini_batches: int = Field(
        default=1,
        ge=1,
        le=10**6,
        description="Parts of equally many prompts into which a step's batch is cut, each for one optimizer"
        " step of its own. With several, ratios start from the weights that the batch began with, so that"
        " clip ranges act. It must divide prompts_per_step.",
        json_schema_extra=expert("PPO-style recipes take several optimizer steps per batch of rollouts"),
    )
    epochs: int = Field(
        default=1,
        ge=1,
        le=1000,
        description="How often a step's batch is gone through, in an order of its own each time.",
        json_schema_extra=expert("PPO-style recipes go through a batch more than once"),
    )
    max_kl: float | None = Field(
        default=None,
        gt=0.0,
        description="KL divergence, in nats per token, from the policy that ratios start from: an optimizer"
        " step that begins farther away is left out, and so is the rest of its batch. none = no bound.",
        json_schema_extra=expert(
            "several optimizer steps on one batch may move the policy too far from its samples"
        ),
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
        default=1,
        ge=1,
        le=1000,
        description="Steps between publications of weights to the engine.",
        json_schema_extra=expert("weights that take long to send are worth sending less often"),
    )
    deterministic: bool = Field(
        default=False,
        description="Wait for every rollout under way before weights are published, so that a run with"
        " max_staleness above 0 gives the same curve each time, and after a resume; costs overlap.",
        json_schema_extra=expert("a comparison of asynchronous runs needs the same curve each time"),
    )
    micro_batch_tokens: int | None = Field(
        default=None,
        ge=1,
        le=10**9,
        description="Tokens in one forward and backward pass at most; the gradient does not depend on it."
        " none = 1280 on a CPU; on a GPU what half of the memory holds that weights and optimizer leave.",
        json_schema_extra=expert("an estimate of memory can be wrong, and long replies need smaller pieces"),
    )
    activation_checkpointing: bool | None = Field(
        default=None,
        description="Whether a backward pass computes the inside of layers again instead of keeping it:"
        " about a third more work for a fraction of the memory, and the same gradients. none = only where"
        " memory is too small otherwise.",
        json_schema_extra=expert("an estimate of memory can be wrong"),
    )
    checkpoint_every: int = Field(
        default=20, ge=1, le=10**7, description="Steps between checkpoints. The last step always writes one."
    )
    keep_checkpoints: int = Field(
        default=2,
        ge=1,
        le=10**7,
        description="Newest complete checkpoints kept; older ones are deleted.",
        json_schema_extra=expert("a study of training keeps all checkpoints, a small disk one"),
    )
    accept: str | None = Field(
        default=None,
        pattern=r"^\s*[a-z_.]+(@\w+)?\s*:\s*\S[^;]*(;\s*[a-z_.]+(@\w+)?\s*:\s*\S[^;]*)*$",
        description="Checks of the gate whose refusal is accepted, each with a reason, as"
        " 'NAME: reason; NAME: reason'. 'audit.PROBE' accepts what one probe of the audit found,"
        " 'audit.PROBE@VERSION' as long as the task's version begins so. none = every check must pass.",
        json_schema_extra=expert(
            "a check can be wrong about a task, and a refusal is accepted only by name and with a reason"
        ),
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


class OptimizerSpec(Section):
    """AdamW and its schedule."""

    lr: float = Field(
        default=1e-5, gt=0.0, le=1.0, description="Learning rate after warm-up, from which it decays."
    )
    weight_decay: float = Field(
        default=0.0,
        ge=0.0,
        le=1.0,
        description="Decoupled weight decay per step, multiplied by the learning rate. 0 = no decay.",
        json_schema_extra=expert("published recipes of full fine-tuning set it"),
    )
    beta1: float = Field(
        default=0.9,
        ge=0.0,
        lt=1.0,
        description="Decay of the first moment per step.",
        json_schema_extra=expert("published recipes set it"),
    )
    beta2: float = Field(
        default=0.999,
        ge=0.0,
        lt=1.0,
        description="Decay of the second moment per step.",
        json_schema_extra=expert(
            "published recipes set it: 0.95 and 0.99 are common, and 0.999 is slow to forget a spike"
        ),
    )
    eps: float = Field(
        default=1e-8,
        gt=0.0,
        le=1.0,
        description="Added to the root of the second moment, against 0.",
        json_schema_extra=expert("published recipes set it, and small gradients are damped by it"),
    )
    max_grad_norm: float = Field(
        default=1.0,
        gt=0.0,
        description="Gradients with a larger L2 norm over all weights are scaled down to it.",
        json_schema_extra=expert("published recipes clip at 0.1 to 1"),
    )
    warmup_steps: int = Field(
        default=0,
        ge=0,
        le=10**7,
        description="Optimizer steps over which the learning rate rises linearly from 0.",
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant",
        description="How the learning rate goes on after warm-up: it stays, or falls along a line or half a"
        " cosine over all optimizer steps of the run.",
    )
    final_frac: float = Field(
        default=0.0,
        ge=0.0,
        lt=1.0,
        description="Share of the learning rate to which 'linear' and 'cosine' have brought it when the run"
        " ends.",
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
        default=None, ge=1, le=10**7, description="Held-out examples used, from the first. none = all."
    )
    num_samples: int | None = Field(
        default=4,
        ge=1,
        le=10**5,
        description="Sampled rollouts per example, beside the greedy one. none = greedy only.",
    )
    baselines: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description="What the table of an evaluation by a file stands beside: NAME=PLACE or PLACE, where"
        " PLACE is a result, a folder of results, a run, a model with results, the name of an evaluation, or"
        " a model with published scores. Training has none.",
        json_schema_extra=expert("most evaluations stand beside published scores or nothing"),
    )


_FRAC = " A share in [0, 1] of one step; above it is an alarm. none = not watched."


class TripwireSpec(Section):
    """Limits that a healthy run keeps."""

    max_zero_variance_frac: float | None = Field(
        default=0.95,
        ge=0.0,
        le=1.0,
        description="Groups whose rewards are all equal, so that nothing is learned from them." + _FRAC,
        json_schema_extra=expert("hard tasks begin with few groups that differ"),
    )
    max_duplicate_frac: float | None = Field(
        default=0.95,
        ge=0.0,
        le=1.0,
        description="Rollouts whose tokens equal those of an earlier one in their group, if they have one."
        + _FRAC,
        json_schema_extra=expert("short answers repeat without a collapse"),
    )
    max_truncated_frac: float | None = Field(
        default=0.5,
        ge=0.0,
        le=1.0,
        description="Replies cut at their token limit." + _FRAC,
        json_schema_extra=expert("tight token limits are sometimes meant"),
    )
    max_failed_frac: float | None = Field(
        default=0.1,
        ge=0.0,
        le=1.0,
        description="Rollouts that could not be scored." + _FRAC,
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
    max_length_ratio: float | None = Field(
        default=4.0,
        gt=1.0,
        description="How many times shorter or longer than in the first 8 steps the mean reply may get"
        " while the reward is no better than there. none = not watched.",
        json_schema_extra=expert("reasoning grows long before the reward follows"),
    )
    max_grad_norm_ratio: float | None = Field(
        default=20.0,
        gt=1.0,
        description="Gradient norm before clipping, as a multiple of the median of the last 16 steps with a"
        " gradient. Above it is an alarm. none = not watched.",
        json_schema_extra=expert("small batches have rare large gradients"),
    )
    min_reward_kept_frac: float | None = Field(
        default=0.5,
        gt=0.0,
        le=1.0,
        description="Share of the mean reward of its best 8 steps in a row that a run keeps; 8 steps in a row"
        " below it are an alarm. none = not watched.",
        json_schema_extra=expert("a curriculum that gets harder lowers the reward"),
    )
    max_common_reply_frac: float | None = Field(
        default=0.25,
        ge=0.0,
        le=1.0,
        description="Replies that are one and the same text, not right, and given to different prompts; a"
        " share in [0, 1], over 8 steps. Above it, and above twice the first 8 steps' while right replies get"
        " no more frequent, is an alarm. none = not watched.",
        json_schema_extra=expert("a task may have one most frequent answer"),
    )
    max_unearned_ratio: float | None = Field(
        default=2.0,
        ge=1.0,
        description="How many times as much as in the first 8 steps wrong replies may earn over the last 8"
        " while right ones get no more frequent. none = not watched: for rewards that grade partial work.",
        json_schema_extra=expert("rewards that grade partial work rise before answers are right"),
    )
    min_entropy_kept_frac: float | None = Field(
        default=0.5,
        gt=0.0,
        le=1.0,
        description="Share of the first 8 steps' entropy that the last 8 keep while neither reward nor"
        " accuracy gets better, or different prompts get one reply. Below it is an alarm. none = not"
        " watched.",
        json_schema_extra=expert("imitation lowers the entropy on purpose"),
    )
    max_runaway_frac: float | None = Field(
        default=0.3,
        ge=0.0,
        le=1.0,
        description="Replies that go on to another question behind their answer." + _FRAC,
        json_schema_extra=expert("base models go on behind their answer until they have learned to stop"),
    )
    max_dev_gap: float | None = Field(
        default=0.25,
        ge=0.0,
        le=1.0,
        description="How much more hidden development scores may promise than sealed ones give, as a share of"
        " the way from floor to ceiling, on average over a step's attempts. none = not watched.",
        json_schema_extra=expert("small development data are noisy"),
    )
    min_used_length_ratio: float | None = Field(
        default=0.9,
        gt=0.0,
        le=1.0,
        description="Mean length of the replies that came in time, as a share of that of all that were"
        " dispatched, over 8 steps. Below it is an alarm: long replies are evicted. none = not watched.",
        json_schema_extra=expert("very uneven lengths reach this bound without harm"),
    )
    max_term_norm_ratio: float | None = Field(
        default=100.0,
        gt=1.0,
        description="Gradient norm of one term of the loss as a multiple of another's in the same step, where"
        " train.terms names several. Above it is an alarm. none = not watched.",
        json_schema_extra=expert("a weak term may be meant as a small push"),
    )
    max_memory_growth_bytes: int | None = Field(
        default=1 << 20,
        ge=0,
        description="Bytes that the resident memory of the trainer may grow per step, steadily, after its"
        " first 8 steps. none = not watched.",
        json_schema_extra=expert("libraries that a task brings may cache on purpose"),
    )
    max_stall_s: float | None = Field(
        default=600.0,
        gt=0.0,
        description="Seconds without progress of any stage. none = not watched.",
        json_schema_extra=expert("a slow judge or a large model may be silent for longer"),
    )
    max_slowdown_ratio: float | None = Field(
        default=5.0,
        gt=1.0,
        description="How many times longer than `strop plan` predicts generating, learning or publishing may"
        " take, step after step; twice as many where the machine's speed was never measured (`strop doctor`)."
        " none = not watched.",
        json_schema_extra=expert("a shared machine can be slower than its plan"),
    )
    on_alarm: Literal["warn", "stop-on-collapse", "stop"] = Field(
        default="stop-on-collapse",
        description="What an alarm does beside being recorded and shown. 'stop' ends the run, with its last"
        " checkpoint intact; 'stop-on-collapse' does so where the signs of a collapse come together for 5"
        " steps in a row; 'warn' goes on in any case.",
        json_schema_extra=expert(
            "a sweep stops at the first alarm, and a study of collapses goes on through it"
        ),
    )
