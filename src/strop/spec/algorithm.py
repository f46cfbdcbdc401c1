"""What counts as better. The entries behind the names are `algorithm`'s business."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from strop.spec.base import Section


class AlgorithmSpec(Section):
    """Which advantage and which loss turn rewards into gradients."""

    name: Literal["grpo", "dr_grpo", "dapo", "rloo"] = Field(
        default="grpo",
        description="Which algorithm. All four compare the rollouts of one prompt with each other.",
    )
    clip_low: float | None = Field(
        default=None,
        gt=0.0,
        lt=1.0,
        description="How far the probability ratio may fall below 1 before its gradient stops."
        " none = the algorithm's own.",
    )
    clip_high: float | None = Field(
        default=None,
        gt=0.0,
        le=100.0,
        description="How far the probability ratio may rise above 1 before its gradient stops."
        " none = the algorithm's own.",
    )
    zero_variance: Literal["skip", "keep", "drop"] | None = Field(
        default=None,
        description="What happens to a group whose rewards are all equal. 'skip' leaves its computation out"
        " and keeps its tokens in the normaliser (same gradient, less work), 'keep' computes it, 'drop'"
        " takes it out of the normaliser too. none = the algorithm's own.",
    )
    overlong: Literal["keep", "mask"] = Field(
        default="keep",
        description="What happens to a reply that was cut at its token limit: 'keep' trains on it, 'mask'"
        " leaves its tokens out of the loss.",
    )
    correction: Literal["none", "tis_token"] = Field(
        default="tis_token",
        description="Correction for sampling by an engine whose probabilities differ from the trainer's:"
        " 'tis_token' weights each token by its truncated probability ratio, 'none' does not.",
    )
    correction_cap: float = Field(
        default=2.0,
        gt=0.0,
        le=1e6,
        description="Largest weight that 'tis_token' gives to a token; a ratio, no unit.",
    )
