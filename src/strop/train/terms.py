"""The terms of a step's loss: what the rollouts say, and what the demonstrations say.

Both go through the same packed forward, head and optimizer step. Each is normalised over its own
complete batch; only then does `sft.weight` act.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from strop.algorithm import Algorithm
from strop.algorithm.preferences import Preference
from strop.algorithm.supervised import cross_entropy_terms, weigh_demonstrations
from strop.errors import ConfigError, explain_refusal
from strop.policy.learner import LossTerm
from strop.policy.objective import Scope, ScoredTokens, TokenTerms
from strop.policy.packing import PackedGroup, PackedReply
from strop.spec.dpo import DpoSpec
from strop.train.batch import share_prompts
from strop.train.demonstrations import Demonstration

SFT_TEMPERATURE = 1.0
"""Demonstrations were drawn from no distribution of this run: logits are taken as they are."""


def rl_term(algorithm: Algorithm, groups: Sequence[PackedGroup], temperature: float) -> LossTerm:
    """Return the policy-gradient term of credited groups.

    Raises: ConfigError if a reply is longer than a correction by whole replies accepts.
    """
    return policy_term(algorithm, groups, temperature, name="rl")


def policy_term(
    algorithm: Algorithm, groups: Sequence[PackedGroup], temperature: float, *, name: str
) -> LossTerm:
    """Return the term of packed replies that an algorithm judges. Raises: like `rl_term`."""
    _refuse_long_sequences(algorithm, groups)
    return LossTerm(
        name=name,
        groups=groups,
        temperature=temperature,
        token_terms=algorithm,
        scope=algorithm.scope,
        entropy_weight=algorithm.entropy_weight,
    )


def _refuse_long_sequences(algorithm: Algorithm, groups: Sequence[PackedGroup]) -> None:
    limit = algorithm.max_sequence_tokens
    if algorithm.correction.level != "sum" or limit is None:
        return
    counts = [int(reply.is_scored.sum()) for group in groups for reply in group.replies]
    if max(counts, default=0) > limit:
        raise ConfigError(
            explain_refusal(
                f"a reply of {max(counts)} tokens under algorithm.correction={algorithm.correction.name},"
                " whose ratio is a product over all of them",
                allowed=f"replies of at most algorithm.max_sequence_tokens={limit}",
                next_step="choose a correction by token, or raise that limit knowingly",
            )
        )


def imitate(tokens: ScoredTokens, /) -> TokenTerms:
    """Return the cross-entropy of demonstrated tokens."""
    loss, grad = cross_entropy_terms(tokens.logprob_M)
    return TokenTerms(loss_N=loss, grad_N=grad)


def sft_term(members: Sequence[Demonstration], weight: float) -> LossTerm:
    """Return the mean cross-entropy of demonstrations, `weight` times."""
    return LossTerm(
        name="sft",
        groups=pack_demonstrations(members),
        temperature=SFT_TEMPERATURE,
        token_terms=imitate,
        weight=weight,
    )


def dpo_term(spec: DpoSpec, pairs: Sequence[PackedGroup], temperature: float) -> LossTerm:
    """Return the mean loss of preference pairs, which stay together."""
    preference = Preference(
        name=spec.loss,
        beta=spec.beta,
        label_noise_frac=spec.label_noise_frac,
        is_per_token=spec.loss == "pref_ipo" if spec.margin is None else spec.margin == "mean",
    )
    weight = 1.0 / max(len(pairs), 1)
    weighed = [
        replace(pair, replies=tuple(replace(reply, weight=weight) for reply in pair.replies))
        for pair in pairs
    ]
    return LossTerm(
        name="dpo", groups=weighed, temperature=temperature, token_terms=preference, scope=Scope.GROUP
    )


def pack_demonstrations(members: Sequence[Demonstration]) -> list[PackedGroup]:
    """Pack the demonstrations of one step; those that share a prompt hold it once."""
    weights = weigh_demonstrations(
        [member.weight for member in members], [int(member.is_trained.sum()) for member in members]
    )
    replies = [
        PackedReply(
            token_ids=member.reply_ids,
            is_scored=member.is_trained,
            engine_logprobs=np.full(int(member.is_trained.sum()), np.nan, dtype=np.float32),
            advantage=0.0,
            weight=float(weight),
        )
        for member, weight in zip(members, weights, strict=True)
    ]
    prompts = [member.prompt_ids for member in members]
    return share_prompts(list(zip(prompts, replies, strict=True)))
