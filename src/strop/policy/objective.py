"""The interface of losses (input, output, how much of a batch they see at once), and the learning rate.

A loss is any function from scored tokens to their terms that can be pickled: learner ranks may live in other
processes. So it is a function of a module or a frozen dataclass with `__call__`, never a closure.
Importing this module loads no torch.

Shapes: m scored tokens, in the order of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from strop.spec.train import OptimizerSpec

if TYPE_CHECKING:
    from torch import Tensor

APPROX_KL = "approx_kl_nats"
"""Name of the mean divergence, over tokens, of the policy from the weights that its ratios start from."""


class Scope(StrEnum):
    """How many tokens one call must contain for a loss to be exact."""

    TOKEN = "token"
    """Any: the head calls the loss chunk by chunk, in its only pass."""
    REPLY = "reply"
    """All scored tokens of a reply. No reply is ever split, so any micro-batch will do; the head makes a
    second pass to have all log-probabilities first."""
    GROUP = "group"
    """All scored tokens of a packed group, such as a preference pair. The group is then never split."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScoredTokens:
    """Input of a loss: some scored tokens. Log-probabilities in nats; NaN where unknown."""

    logprob_M: Tensor
    """Under the trained weights. Constants: a loss returns its gradient in closed form."""
    engine_logprob_M: Tensor
    old_logprob_M: Tensor
    reference_logprob_M: Tensor
    teacher_logprob_M: Tensor
    advantage_M: Tensor
    reply_M: Tensor
    """Index of the token's reply in the micro-batch."""
    group_M: Tensor

    def part(self, tokens: slice) -> ScoredTokens:
        """Return a range of the tokens."""
        return ScoredTokens(**{field.name: getattr(self, field.name)[tokens] for field in fields(self)})


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenTerms:
    """Output of a loss for each token, before its aggregation weight. Shapes: all (m,)."""

    loss_N: Tensor
    """Correction times loss; nats times advantage units."""
    grad_N: Tensor
    """Derivative of the whole loss with respect to each log-probability, the correction included."""
    ratio_N: Tensor | None = None
    """The probability ratio in the loss; None where it is 1 by construction."""
    shares: Mapping[str, Tensor] = field(default_factory=dict)
    """Further metrics of the step by name: each token's share (N,), summed with the loss's weights."""
    means: Mapping[str, Tensor] = field(default_factory=dict)
    """Further metrics that are unweighted means over tokens, by name."""


class TokenTermsFn(Protocol):
    """A loss: closed form, without autograd, and picklable."""

    def __call__(self, tokens: ScoredTokens, /) -> TokenTerms:
        """Return loss and gradient of every token."""
        ...


def lr_at(spec: OptimizerSpec, place: int, num_places: int | None) -> float:
    """Return the learning rate of the optimizer step that follows `place` others.

    `num_places` counts the steps of the whole run; None: it has no end, and the rate stays. As in
    transformers' schedules, the first step after warm-up has the full rate, and one after the last would have
    the final rate.
    """
    if place < spec.warmup_steps:
        return spec.lr * (place + 1) / (spec.warmup_steps + 1)
    if spec.schedule == "constant" or num_places is None:
        return spec.lr
    passed = min((place - spec.warmup_steps) / max(num_places - spec.warmup_steps, 1), 1.0)
    kept = 1.0 - passed if spec.schedule == "linear" else (1.0 + math.cos(math.pi * passed)) / 2
    return spec.lr * (spec.final_frac + (1.0 - spec.final_frac) * kept)
