"""Which signs of trouble a run watches for, and what it does when it sees one."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from strop.spec.base import Section

_FRAC = " A share in [0, 1] of one step; above it is an alarm. none = not watched."


class TripwireSpec(Section):
    """Limits that a healthy run keeps."""

    max_zero_variance_frac: float | None = Field(
        default=0.95,
        ge=0.0,
        le=1.0,
        description="Groups whose rewards are all equal, so that nothing is learned from them." + _FRAC,
    )
    max_duplicate_frac: float | None = Field(
        default=0.95,
        ge=0.0,
        le=1.0,
        description="Rollouts whose tokens equal those of an earlier one in their group, if they have one."
        + _FRAC,
    )
    max_truncated_frac: float | None = Field(
        default=0.5, ge=0.0, le=1.0, description="Replies cut at their token limit." + _FRAC
    )
    max_failed_frac: float | None = Field(
        default=0.1, ge=0.0, le=1.0, description="Rollouts that could not be scored." + _FRAC
    )
    max_drift_nats: float | None = Field(
        default=0.06,
        gt=0.0,
        description="Mean absolute difference between the engine's and the trainer's log-probability of a"
        " sampled token, in nats. none = not watched.",
    )
    min_entropy_nats: float | None = Field(
        default=0.005,
        ge=0.0,
        description="Mean entropy of the policy over sampled tokens, in nats; below it is an alarm."
        " none = not watched.",
    )
    max_length_ratio: float | None = Field(
        default=4.0,
        gt=1.0,
        description="How many times shorter or longer than in the first 8 steps the mean reply may get"
        " while the reward is no better than there. none = not watched.",
    )
    max_grad_norm_ratio: float | None = Field(
        default=20.0,
        gt=1.0,
        description="Gradient norm before clipping, as a multiple of the median of the last 16 steps with a"
        " gradient. Above it is an alarm. none = not watched.",
    )
    min_reward_kept_frac: float | None = Field(
        default=0.5,
        gt=0.0,
        le=1.0,
        description="Share of the mean reward of its best 8 steps in a row that a run keeps; 8 steps in a row"
        " below it are an alarm. none = not watched.",
    )
    max_common_reply_frac: float | None = Field(
        default=0.25,
        ge=0.0,
        le=1.0,
        description="Replies that are one and the same text, not right, and given to different prompts; a"
        " share in [0, 1], over 8 steps. Above it, and above twice the first 8 steps' while right replies get"
        " no more frequent, is an alarm. none = not watched.",
    )
    max_unearned_ratio: float | None = Field(
        default=2.0,
        ge=1.0,
        description="How many times as much as in the first 8 steps wrong replies may earn over the last 8"
        " while right ones get no more frequent. none = not watched: for rewards that grade partial work.",
    )
    min_entropy_kept_frac: float | None = Field(
        default=0.5,
        gt=0.0,
        le=1.0,
        description="Share of the first 8 steps' entropy that the last 8 keep while neither reward nor"
        " accuracy gets better, or different prompts get one reply. Below it is an alarm. none = not"
        " watched.",
    )
    max_runaway_frac: float | None = Field(
        default=0.3,
        ge=0.0,
        le=1.0,
        description="Replies that go on to another question behind their answer." + _FRAC,
    )
    min_used_length_ratio: float | None = Field(
        default=0.9,
        gt=0.0,
        le=1.0,
        description="Mean length of the replies that came in time, as a share of that of all that were"
        " dispatched, over 8 steps. Below it is an alarm: long replies are evicted. none = not watched.",
    )
    max_term_norm_ratio: float | None = Field(
        default=100.0,
        gt=1.0,
        description="Gradient norm of one term of the loss as a multiple of another's in the same step, where"
        " train.terms names several. Above it is an alarm. none = not watched.",
    )
    max_memory_growth_bytes: int | None = Field(
        default=1 << 20,
        ge=0,
        description="Bytes that the resident memory of the trainer may grow per step, steadily, after its"
        " first 8 steps. none = not watched.",
    )
    max_stall_s: float | None = Field(
        default=600.0,
        gt=0.0,
        description="Seconds without progress of any stage. none = not watched.",
    )
    max_slowdown_ratio: float | None = Field(
        default=5.0,
        gt=1.0,
        description="How many times longer than `strop plan` predicts generating, learning or publishing may"
        " take, step after step; twice as many where the machine's speed was never measured (`strop doctor`)."
        " none = not watched.",
    )
    on_alarm: Literal["warn", "stop-on-collapse", "stop"] = Field(
        default="stop-on-collapse",
        description="What an alarm does beside being recorded and shown. 'stop' ends the run, with its last"
        " checkpoint intact; 'stop-on-collapse' does so where the signs of a collapse come together for 5"
        " steps in a row; 'warn' goes on in any case.",
    )
