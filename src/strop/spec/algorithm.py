"""What counts as better. The entries behind the names are `algorithm`'s business."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from strop.spec.base import Section
from strop.user_code import find_algorithm


def _is_known(name: str) -> str:
    if find_algorithm(name) is None:
        raise ValueError("there is no such algorithm")
    return name


OwnName = Annotated[str, AfterValidator(_is_known)]
"""An algorithm of the user's, or of an installed package."""


class AlgorithmSpec(Section):
    """Which advantage and which loss turn rewards into gradients."""

    name: Literal["grpo", "dr_grpo", "dapo", "rloo", "gspo", "cispo", "dppo", "ipo_mask"] | OwnName = Field(
        default="grpo",
        description="Which algorithm. All of them compare the rollouts of one prompt with each other. One of"
        " your own is FILE.py:NAME, or a name that an installed package announces as an entry point of the"
        " group strop.algorithms: an advantage function, or an Algorithm.",
    )
    mode: Literal["single", "decoupled", "bypass"] | None = Field(
        default=None,
        description="Where a token's probability ratio starts: 'single' at the weights of this very step, so"
        " it is 1 and the correction covers the gap to the engine; 'decoupled' at the weights that the"
        " batch's first step began with, for one more forward pass; 'bypass' at the engine's own value,"
        " without correction. none = the algorithm's own.",
    )
    clip_low: float | None = Field(
        default=None,
        gt=0.0,
        le=1.0,
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
    zero_variance: Literal["skip", "keep", "drop", "resample"] | None = Field(
        default=None,
        description="What happens to a group whose rewards are all equal. 'skip' leaves its computation out"
        " and keeps its tokens in the normaliser (same gradient, less work), 'keep' computes it, 'drop'"
        " takes it out of the normaliser too, 'resample' samples another example in its place, up to three"
        " times as many groups as the batch has. none = the algorithm's own; 'keep' in place of 'skip' where"
        " a term acts on tokens without advantage.",
    )
    filter_on: Literal["task", "shaped"] | None = Field(
        default=None,
        description="Which rewards 'drop' and 'resample' compare: the task's own, or those after the shaping"
        " of overlong replies. none = the algorithm's own.",
    )
    overlong: Literal["keep", "mask", "shape"] | None = Field(
        default=None,
        description="What happens to a reply that was cut at its token limit: 'keep' trains on it, 'mask'"
        " leaves its tokens out of the loss, 'shape' takes up to 1 from the reward of every reply that comes"
        " near the limit. none = the algorithm's own.",
    )
    overlong_buffer_tokens: int | None = Field(
        default=None,
        ge=1,
        le=10**7,
        description="How many tokens before the reply's own limit 'shape' begins, the whole limit at most."
        " none = a fifth of the limit.",
    )
    correction: Literal["none", "tis_token", "tis_seq", "mis_token", "mis_seq", "icepop", "opsm"] = Field(
        default="tis_token",
        description="Correction for sampling by an engine whose probabilities differ from the trainer's."
        " 'tis' weights by the probability ratio, truncated at the cap; 'mis' by the ratio, and by 0 above"
        " the cap; '_token' by that of the token, '_seq' by that of the reply; 'icepop' by the token's, and"
        " by 0 outside 0.5 and the cap; 'opsm' leaves out replies worse than their group that the engine"
        " found likelier by more than the cap, in nats per token; 'none' does nothing.",
    )
    correction_cap: float | None = Field(
        default=None,
        gt=0.0,
        le=1e6,
        description="Bound of the correction: a ratio, for 'opsm' nats. none = the correction's own: 2 for"
        " 'tis_token', 3 for 'tis_seq' and 'mis', 5 for 'icepop', 0.1 for 'opsm'.",
    )
    max_sequence_tokens: int | None = Field(
        default=512,
        ge=1,
        le=10**7,
        description="Longest reply, in tokens, that 'tis_seq' and 'mis_seq' accept: the ratio of a reply is a"
        " product over its tokens, and says nothing for long ones. none = any.",
    )
