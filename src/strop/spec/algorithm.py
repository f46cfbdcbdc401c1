"""What counts as better. The entries behind the names are `algorithm`'s business."""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from strop.spec.base import Section, expert
from strop.user_code import find_algorithm


@cache
def algorithm_names() -> tuple[str, ...]:
    """Return the names of the built-in algorithms, in the order of their catalog.

    They are read from its text: importing it would load what computes.
    """
    room = find_spec("strop.algorithm")
    assert room is not None
    assert room.submodule_search_locations is not None
    text = Path(room.submodule_search_locations[0], "catalog.py").read_text("utf-8")
    return tuple(re.findall(r'\bname="([a-z0-9_]+)"', text))


def _is_known(name: str) -> str:
    if name not in algorithm_names() and find_algorithm(name) is None:
        raise ValueError("there is no such algorithm")
    return name


AdvantageName = Literal["grpo", "grpo_pop", "centered", "rloo", "max_rl", "batch_std", "rpp", "rpp_baseline"]


class AlgorithmSpec(Section):
    """Which advantage and which loss turn rewards into gradients."""

    name: Annotated[str, AfterValidator(_is_known)] = Field(
        default="grpo",
        description="Which algorithm. All but 'reinforce_pp' compare the rollouts of one prompt with each"
        " other. One of your own is FILE.py:NAME, or a name that an installed package announces as an entry"
        " point of the group strop.algorithms: an advantage function, or an Algorithm.",
    )
    advantage: AdvantageName | None = Field(
        default=None,
        description="How much better than others a rollout was. Within its group: 'grpo' in sample and"
        " 'grpo_pop' in population standard deviations from the mean, 'centered' from the mean, 'rloo' from"
        " the mean of the others, 'max_rl' in means from the mean, 'batch_std' from the mean in standard"
        " deviations of the whole batch. Whitened over all tokens of the batch: 'rpp_baseline' the distance"
        " from the group's mean, 'rpp' the reward itself, from which a KL penalty is taken. none = the"
        " algorithm's own.",
        json_schema_extra=expert("ablations exchange one part of an algorithm"),
    )
    mode: Literal["single", "decoupled", "bypass"] | None = Field(
        default=None,
        description="Where a token's probability ratio starts: 'single' at the weights of this very optimizer"
        " step, so it is 1 and the correction covers the gap to the engine; 'decoupled' at the weights that"
        " the engine was last given, or the batch began with where that is the same, for one more forward"
        " pass; 'bypass' at the engine's own value, without correction. none = the algorithm's own:"
        " 'decoupled' in place of 'single' where a batch takes several optimizer steps.",
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
        description="Probability ratio above which a token of a rollout worse than its group has no gradient,"
        " in the clipped loss; 3 is usual. none = no such bound.",
        json_schema_extra=expert("large negative advantages at large ratios unsettle some runs"),
    )
    sapo_temperature_pos: float | None = Field(
        default=None,
        gt=0.0,
        le=100.0,
        description="How fast the gate of 'sapo' closes as the probability ratio leaves 1, for tokens of"
        " rollouts better than their group. none = 1.",
        json_schema_extra=expert("it is the one constant of SAPO"),
    )
    sapo_temperature_neg: float | None = Field(
        default=None,
        gt=0.0,
        le=100.0,
        description="The same for all other tokens. none = 1.05.",
        json_schema_extra=expert("it is the one constant of SAPO"),
    )
    entropy_weight: float = Field(
        default=0.0,
        ge=0.0,
        le=1e3,
        description="Factor of the policy's entropy, over the whole vocabulary at every trained position,"
        " that is taken from the loss. 0 = no bonus.",
        json_schema_extra=expert("some recipes hold the entropy up"),
    )
    zero_variance: Literal["skip", "keep", "drop", "resample"] | None = Field(
        default=None,
        description="What happens to a group whose rewards are all equal. 'skip' leaves its computation out"
        " and keeps its tokens in the normaliser (same gradient, less work), 'keep' computes it, 'drop'"
        " takes it out of the normaliser too, 'resample' samples another example in its place, up to three"
        " times as many groups as the batch has. none = the algorithm's own; 'keep' in place of 'skip' where"
        " a term acts on tokens without advantage.",
        json_schema_extra=expert("dynamic sampling costs generation, and its use is a choice"),
    )
    filter_on: Literal["task", "shaped"] | None = Field(
        default=None,
        description="Which rewards 'drop' and 'resample' compare: the task's own, or those after the shaping"
        " of overlong replies. none = the algorithm's own.",
        json_schema_extra=expert("published filters look at accuracy or at the shaped reward"),
    )
    overlong: Literal["keep", "mask", "shape"] | None = Field(
        default=None,
        description="What happens to a reply that was cut at its token limit: 'keep' trains on it, 'mask'"
        " leaves its tokens out of the loss, 'shape' takes up to 1 from the reward of every reply that comes"
        " near the limit. none = the algorithm's own.",
        json_schema_extra=expert("published recipes treat truncated replies in three ways"),
    )
    overlong_buffer_tokens: int | None = Field(
        default=None,
        ge=1,
        le=10**7,
        description="How many tokens before the reply's own limit 'shape' begins, the whole limit at most."
        " none = a fifth of the limit.",
        json_schema_extra=expert("the published buffer is a number of tokens"),
    )
    correction: Literal["none", "tis_token", "tis_seq", "mis_token", "mis_seq", "icepop", "opsm"] = Field(
        default="tis_token",
        description="Correction for sampling by an engine whose probabilities differ from the trainer's."
        " 'tis' weights by the probability ratio, truncated at the cap; 'mis' by the ratio, and by 0 above"
        " the cap; '_token' by that of the token, '_seq' by that of the reply; 'icepop' by the token's, and"
        " by 0 outside 0.5 and the cap; 'opsm' leaves out replies worse than their group that the engine"
        " found likelier by more than the cap, in nats per token; 'none' does nothing.",
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
        " product over its tokens, and says nothing for long ones. none = any.",
        json_schema_extra=expert(
            "the ratio of a whole reply says nothing for long ones, and where it ends is a judgement"
        ),
    )

    credit: Literal["rollout", "turn"] = Field(
        default="rollout",
        description="What has an advantage: 'rollout' all turns of an attempt together, by its reward; 'turn'"
        " each turn, by what was earned from it on, among the turns of the group's other attempts that are as"
        " late. An environment says what a turn earned in Outcome.turn_rewards; the last earned the rest.",
        json_schema_extra=expert("in long attempts a few turns decide"),
    )
    turn_discount: float = Field(
        default=1.0,
        ge=0.0,
        le=1.0,
        description="What is earned in the next turn counts so many times in this one, under credit by turn.",
        json_schema_extra=expert("late rewards say little of early turns"),
    )

    @property
    def is_own(self) -> bool:
        """Whether the algorithm is code of the user's or of an installed package."""
        return self.name not in algorithm_names()

    @property
    def whitened(self) -> Literal["rpp", "rpp_baseline"] | None:
        """The advantage that is whitened over the whole batch, None where none is."""
        own: dict[str, Literal["rpp", "rpp_baseline"]] = {
            "reinforce_pp": "rpp",
            "reinforce_pp_baseline": "rpp_baseline",
        }
        if self.advantage is None:
            return own.get(self.name)
        return self.advantage if self.advantage in ("rpp", "rpp_baseline") else None

    @property
    def takes_single_rollouts(self) -> bool:
        """Whether a rollout needs no others of its prompt to be compared with."""
        return self.whitened == "rpp"
