"""The section of the algorithm. The room `algorithm` has the entries behind the names."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from strop.spec.base import Section, expert
from strop.user_code import find_algorithm

ALGORITHM_NAMES = (
    *("grpo", "dr_grpo", "dapo", "gspo", "cispo", "dppo", "ipo_mask", "rloo", "sapo"),
    *("reinforce_pp", "reinforce_pp_baseline"),
)
"""The built-in algorithms, those of `strop.algorithm.catalog`: importing it would load what computes."""


def _is_known(name: str) -> str:
    if name not in ALGORITHM_NAMES and find_algorithm(name) is None:
        raise ValueError("there is no such algorithm")
    return name


AdvantageName = Literal["grpo", "grpo_pop", "centered", "rloo", "max_rl", "batch_std", "rpp", "rpp_baseline"]


class AlgorithmSpec(Section):
    """Which advantage and which loss turn rewards into gradients."""

    name: Annotated[str, AfterValidator(_is_known)] = Field(
        default="grpo",
        description="The algorithm. All but 'reinforce_pp' compare the rollouts of one prompt with each"
        " other. Your own is FILE.py:NAME, or an entry point of an installed package in the group"
        " strop.algorithms: an advantage function, or an Algorithm.",
    )
    advantage: AdvantageName | None = Field(
        default=None,
        description="How a rollout's reward is compared. Within its group: 'grpo' and 'grpo_pop' are the"
        " distance from the mean in sample and population standard deviations, 'centered' the distance from"
        " the mean, 'rloo' from the mean of the others, 'max_rl' in units of the mean, 'batch_std' in"
        " standard deviations of the whole batch. Whitened over all tokens of the batch: 'rpp_baseline' the"
        " distance from the group's mean, 'rpp' the reward itself, minus a KL penalty. none = the algorithm's"
        " own.",
        json_schema_extra=expert("ablations exchange one part of an algorithm"),
    )
    mode: Literal["single", "decoupled", "bypass"] | None = Field(
        default=None,
        description="Weights at which a token's probability ratio starts: 'single' those of the current"
        " optimizer step, so the ratio is 1 and the correction covers the gap to the engine; 'decoupled'"
        " those that the batch began with, at the cost of one more forward pass; 'bypass' the engine's own"
        " log-probability, without correction. none = the algorithm's own: 'decoupled' instead of 'single' if"
        " a batch takes several optimizer steps.",
        json_schema_extra=expert(
            "it decides which weights a ratio starts from, on which published methods differ"
        ),
    )
    clip_low: float | None = Field(
        default=None,
        gt=0.0,
        le=1.0,
        description="How far the probability ratio may fall below 1 before its gradient stops."
        " none = the algorithm's own.",
        json_schema_extra=expert("ablations vary the clip range"),
    )
    clip_high: float | None = Field(
        default=None,
        gt=0.0,
        le=100.0,
        description="How far the probability ratio may rise above 1 before its gradient stops."
        " none = the algorithm's own.",
        json_schema_extra=expert("ablations vary the clip range"),
    )
    dual_clip: float | None = Field(
        default=None,
        gt=1.0,
        le=100.0,
        description="Probability ratio above which a token of a rollout with negative advantage has no"
        " gradient, in the clipped loss; 3 is usual. none = no such bound.",
        json_schema_extra=expert("large negative advantages at large ratios unsettle some runs"),
    )
    entropy_weight: float = Field(
        default=0.0,
        ge=0.0,
        le=1e3,
        description="Weight of an entropy bonus: the policy's entropy over the whole vocabulary at every"
        " trained position. 0 = no bonus.",
        json_schema_extra=expert("some recipes hold the entropy up"),
    )
    zero_variance: Literal["skip", "keep", "drop", "resample"] | None = Field(
        default=None,
        description="What happens to a group whose rewards are all equal. 'skip' omits its computation and"
        " keeps its tokens in the normaliser (same gradient, less work), 'keep' computes it, 'drop' also"
        " removes it from the normaliser, 'resample' replaces it by another example, up to three times as"
        " many groups as the batch has. none = the algorithm's own; 'keep' instead of 'skip' if a term acts"
        " on tokens without advantage.",
        json_schema_extra=expert("dynamic sampling costs generation, and its use is a choice"),
    )
    overlong: Literal["keep", "mask", "shape"] | None = Field(
        default=None,
        description="What happens to a reply that was truncated at its token limit: 'keep' trains on it,"
        " 'mask' removes its tokens from the loss, 'shape' lowers the reward of every reply near the limit by"
        " up to 1. none = the algorithm's own.",
        json_schema_extra=expert("published recipes treat truncated replies in three ways"),
    )
    correction: Literal["none", "tis_token", "tis_seq", "mis_token", "mis_seq", "icepop", "opsm"] = Field(
        default="tis_token",
        description="Correction for the difference between the engine's and the trainer's probabilities."
        " 'tis' weights by the probability ratio, truncated at the cap; 'mis' by the ratio, and by 0 above"
        " the cap; with '_token' the ratio is that of the token, with '_seq' that of the reply; 'icepop'"
        " weights by the token's ratio, and by 0 outside 0.5 and the cap; 'opsm' omits replies with negative"
        " advantage that the engine found likelier by more than the cap, in nats per token; 'none' does"
        " nothing.",
        json_schema_extra=expert("published corrections for the engine's probabilities differ"),
    )
    correction_cap: float | None = Field(
        default=None,
        gt=0.0,
        le=1e6,
        description="Bound of the correction: a ratio, for 'opsm' nats. none = the correction's own: 2 for"
        " 'tis_token', 3 for 'tis_seq' and 'mis', 5 for 'icepop', 0.1 for 'opsm'.",
        json_schema_extra=expert("papers differ by the bound"),
    )
    max_sequence_tokens: int | None = Field(
        default=512,
        ge=1,
        le=10**7,
        description="Longest reply, in tokens, that 'tis_seq' and 'mis_seq' accept: the ratio of a reply is a"
        " product over its tokens, and meaningless for long replies. none = any.",
        json_schema_extra=expert(
            "the ratio of a whole reply is meaningless for long replies, and the limit is a judgement"
        ),
    )

    credit: Literal["rollout", "turn"] = Field(
        default="rollout",
        description="Unit of the advantage: 'rollout' gives all turns of an attempt one advantage, by its"
        " reward; 'turn' gives each turn its own, by the rewards from that turn on, compared with the same"
        " turn of the group's other attempts. An environment reports a turn's reward in Outcome.turn_rewards;"
        " the last turn gets the rest.",
        json_schema_extra=expert("in long attempts a few turns decide"),
    )
    turn_discount: float = Field(
        default=1.0,
        ge=0.0,
        le=1.0,
        description="Discount per turn of later rewards, with credit by turn.",
        json_schema_extra=expert("late rewards say little about early turns"),
    )

    @property
    def is_own(self) -> bool:
        """Whether the algorithm is the user's code or that of an installed package."""
        return self.name not in ALGORITHM_NAMES

    @property
    def whitened(self) -> Literal["rpp", "rpp_baseline"] | None:
        """The advantage if it is whitened over the whole batch, else None."""
        own: dict[str, Literal["rpp", "rpp_baseline"]] = {
            "reinforce_pp": "rpp",
            "reinforce_pp_baseline": "rpp_baseline",
        }
        if self.advantage is None:
            return own.get(self.name)
        return self.advantage if self.advantage in ("rpp", "rpp_baseline") else None

    @property
    def takes_single_rollouts(self) -> bool:
        """Whether a group may have a single rollout."""
        return self.whitened == "rpp"
