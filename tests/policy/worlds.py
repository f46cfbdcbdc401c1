"""Ragged batches of judged rollouts, and learners to train on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from strop.algorithm import ALGORITHMS, Algorithm
from strop.policy.footprint import ModelSize
from strop.policy.language_model import DTYPES, LanguageModel
from strop.policy.learner import Learner
from strop.policy.objective import ScoredTokens, TokenTerms
from strop.policy.packing import PackedGroup, PackedReply
from strop.rollout import Example, Group, IntArray, Outcome, Rollout, Turn, make_example
from strop.spec.train import OptimizerSpec
from tests.fixtures.builders import rollout_of
from tests.fixtures.tiny_model import VOCAB_SIZE, tiny_model

REPLY_LIMIT = 12
"""Reply limit of these worlds: the constant normaliser of dr_grpo."""


SIZE = ModelSize(
    num_layers=2,
    hidden_width=8,
    mlp_width=10,
    num_heads=4,
    num_kv_heads=2,
    head_width=2,
    vocab_size=100,
    max_positions=64,
    is_tied=True,
)
"""For numbers by hand: two layers of 432 parameters and a head of 800."""


class World:
    """Draws token ids and engine log-probabilities from one stream."""

    def __init__(self, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)

    def ids(self, length: int) -> IntArray:
        return self._random.integers(0, VOCAB_SIZE, length).astype(np.int32)

    def spoken(self, length: int, role: str = "assistant") -> Turn:
        """Make a turn that the policy sampled; its values lie around those of the tiny models."""
        logprobs = self._random.uniform(-7.0, -1.0, length).astype(np.float32)
        return Turn(role=role, text="", token_ids=self.ids(length), logprobs=logprobs, policy_version=0)

    def told(self, ids: IntArray) -> Turn:
        return Turn(role="prompt", text="", token_ids=ids)

    def group(
        self,
        prompt_length: int,
        replies: Sequence[Sequence[int]],
        rewards: Sequence[float | None],
        truncated: Sequence[int] = (),
    ) -> Group:
        """Make a group. A reply is a list of lengths: sampled, told, sampled, ..."""
        prompt, name = self.ids(prompt_length), str(self._random.random())
        example = make_example("world", {"name": name}, None)
        rollouts = [
            self._rollout(example, index, prompt, lengths, rewards[index], index in truncated)
            for index, lengths in enumerate(replies)
        ]
        return Group(example=example, rollouts=tuple(rollouts))

    def _rollout(
        self,
        example: Example,
        index: int,
        prompt: IntArray,
        lengths: Sequence[int],
        reward: float | None,
        is_cut: bool,
    ) -> Rollout:
        turns = [
            self.spoken(length) if place % 2 == 0 else self.told(self.ids(length))
            for place, length in enumerate(lengths)
        ]
        return rollout_of(
            example,
            (self.told(prompt), *turns),
            Outcome(parts={"score": reward}, truncated=is_cut),
            sample_index=index,
        )

    def packed(
        self, prompt_length: int, reply_lengths: Sequence[int], *, advantage: float = 1.0, weight: float = 0.1
    ) -> PackedGroup:
        """Make a packed group whose replies are all scored."""
        replies = [self.spoken(length) for length in reply_lengths]
        return PackedGroup(
            prompt_ids=self.ids(prompt_length),
            replies=tuple(
                PackedReply(
                    token_ids=turn.token_ids,
                    is_scored=np.ones(len(turn.token_ids), dtype=np.bool_),
                    engine_logprobs=turn.logprobs if turn.logprobs is not None else np.zeros(0, np.float32),
                    advantage=advantage,
                    weight=weight,
                )
                for turn in replies
            ),
        )


def ragged_groups(seed: int = 0) -> list[Group]:
    """Return groups of 2, 3, 5, 3, 2 and 2 with every irregularity that a batch may have."""
    world = World(seed)
    return [
        # A prompt of one token; a reply of one token, which feeds nothing.
        world.group(1, [[1], [2]], [1.0, 0.0]),
        # A member without a score takes no part, not even in the normaliser.
        world.group(5, [[7], [3], [1]], [1.0, None, 0.0]),
        # A reply without any token still is one of the batch's rollouts.
        world.group(3, [[2], [7], [4], [0], [9]], [0.5, 0.0, 1.0, 1.0, 0.0]),
        # Equal rewards: nothing to learn, but counted.
        world.group(4, [[3], [6], [1]], [1.0, 1.0, 1.0]),
        # Turns that the policy did not speak stand between those that it did, once at the end.
        world.group(6, [[3, 2, 4], [1, 3, 2, 2]], [0.0, 1.0]),
        # One scored member only: dropped from batch and normaliser.
        world.group(2, [[2], [5]], [1.0, None]),
    ]


def load_model(path: Path, dtype: str = "float32") -> LanguageModel:
    return LanguageModel.load(path, dtype=DTYPES[dtype])


def build_learner(
    path: Path, *, dtype: str = "float32", max_positions: int | None = None, **spec: Any
) -> Learner:
    """Load a tiny model and give it an optimizer; `spec` overrides the optimizer's settings."""
    return Learner(load_model(path, dtype), OptimizerSpec(**spec), micro_batch_positions=max_positions)


def make_model(path: Path, **config: Any) -> Path:
    """Write a tiny model of width 32, small enough for hundreds of gradients."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
    return tiny_model(path, **(sizes | config))


def reinforce(tokens: ScoredTokens, /) -> TokenTerms:
    """Return -A logp and -A, the simplest token loss."""
    return TokenTerms(loss_N=-tokens.advantage_M * tokens.logprob_M, grad_N=-tokens.advantage_M)


def plain(name: str) -> Algorithm:
    """Return an entry of the catalog that shapes no reward and replaces no group."""
    return replace(ALGORITHMS[name], zero_variance="skip", filter_on="shaped", overlong="keep")


Gradients = dict[str, torch.Tensor]


def relative_error(actual: Gradients, expected: Gradients) -> float:
    """Return the worst error over tensors, of norms and of largest entries, relative to the tensor."""
    assert actual.keys() == expected.keys()
    worst = 0.0
    for name, reference in expected.items():
        difference = actual[name].double() - reference.double()
        assert float(reference.norm()) > 0.0, f"{name} has no gradient, the comparison would say nothing"
        worst = max(worst, float(difference.norm() / reference.double().norm()))
        worst = max(worst, float(difference.abs().max() / reference.double().abs().max()))
    return worst
