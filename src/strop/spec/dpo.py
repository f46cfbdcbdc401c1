"""Learning from pairs of replies of which one is better."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from strop.spec.base import Section


class DpoSpec(Section):
    """Preference pairs from recorded rollouts, and the loss on them."""

    source: str | None = Field(
        default=None,
        min_length=1,
        description="The folder of a run, or of the replies that `strop eval` kept, whose rollouts of one"
        " example are paired by reward. A relative path is taken from the file that names it. none = no"
        " pairs.",
    )
    loss: Literal["dpo", "cdpo", "pref_ipo"] = Field(
        default="dpo",
        description="'dpo' the logistic loss of the margin, 'cdpo' the same if some labels are wrong,"
        " 'pref_ipo' the squared distance of the margin from 1 / (2 beta).",
    )
    margin: Literal["sum", "mean"] | None = Field(
        default=None,
        description="What a reply's tokens have gained over the reference: their 'sum', or their 'mean', so"
        " that length does not count. none = 'mean' for 'pref_ipo', whose authors meant that, else 'sum'.",
    )
    beta: float = Field(
        default=0.1,
        gt=0.0,
        le=1e3,
        description="How far the policy may move from the reference; less is further.",
    )
    label_noise_frac: float = Field(
        default=0.0,
        ge=0.0,
        lt=0.5,
        description="Share of pairs whose better reply is believed to be the worse one, for 'cdpo'.",
    )
    pairs: Literal["best_worst", "all"] = Field(
        default="best_worst",
        description="Which pairs an example gives: its best reply with its worst, or every two replies of"
        " different reward.",
    )
    min_margin: float = Field(
        default=0.0, ge=0.0, description="Smallest difference of rewards between the two; 0 = any."
    )
    pairs_per_step: int = Field(
        default=16, ge=1, le=10**6, description="Pairs in the batch of one optimizer step."
    )
