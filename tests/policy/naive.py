"""The slow way: every rollout in full, padded, all logits, and autograd through everything.

Nothing of strop's packing, head, credit or aggregation is used here; of an algorithm only the
differentiable value of its token loss and its clip range.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from strop.algorithm import Algorithm
from strop.rollout import Group, Rollout
from tests.fixtures.tiny_model import VOCAB_SIZE

_CORRECTION_CAP = 2.0


@dataclass(frozen=True, kw_only=True)
class NaiveResult:
    """Loss and gradients by parameter name."""

    loss: float
    gradients: dict[str, torch.Tensor]


def naive_gradients(
    path: Path,
    algorithm: Algorithm,
    groups: Sequence[Group],
    *,
    temperature: float,
    reply_limit: int,
    is_corrected: bool,
) -> NaiveResult:
    """Compute what the packed learner must agree with, in float32 with transformers' own attention."""
    module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    module.eval()  # type: ignore[no-untyped-call]
    members = _credited_members(algorithm, groups, reply_limit)
    rollouts = [rollout for rollout, _, _ in members]
    logprobs_S_T = padded_logprobs(module, rollouts, temperature)
    loss = torch.zeros(())
    for row, (rollout, advantage, weight) in enumerate(members):
        for place, engine_logprob in sampled_places(rollout):
            logp = logprobs_S_T[row, place - 1].view(1)
            old, adv = logp.detach(), torch.tensor([advantage])
            value = algorithm.loss.value(logp, old, adv, algorithm.clip_low, algorithm.clip_high)[0]
            correction = min(math.exp(float(old) - engine_logprob), _CORRECTION_CAP) if is_corrected else 1.0
            loss = loss + weight * correction * value
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return NaiveResult(loss=float(loss.detach()), gradients=gradients)


def naive_entropy_gradients(
    path: Path, algorithm: Algorithm, groups: Sequence[Group], *, temperature: float, reply_limit: int
) -> NaiveResult:
    """Compute the weighed entropy of the distribution behind every sampled token, and its gradient."""
    module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    module.eval()  # type: ignore[no-untyped-call]
    members = _credited_members(algorithm, groups, reply_limit)
    total = torch.zeros(())
    for rollout, _, weight in members:
        token_ids = torch.tensor([[int(i) for turn in rollout.turns for i in turn.token_ids]])
        logits = module(input_ids=token_ids, use_cache=False).logits[0].float() / temperature
        logp = torch.log_softmax(logits, dim=-1)
        entropy = -(logp.exp() * logp).sum(dim=-1)
        for place, _ in sampled_places(rollout):
            total = total + weight * entropy[place - 1]
    total.backward()  # type: ignore[no-untyped-call]
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return NaiveResult(loss=float(total.detach()), gradients=gradients)


def padded_logprobs(module: Any, rollouts: Sequence[Rollout], temperature: float) -> torch.Tensor:
    """Return the log-probability of every next token. Shapes: (S, T - 1). Pads are random ids."""
    rows = [[int(i) for turn in rollout.turns for i in turn.token_ids] for rollout in rollouts]
    width = max(len(row) for row in rows)
    token_ids = torch.randint(0, VOCAB_SIZE, (len(rows), width), generator=torch.Generator().manual_seed(5))
    mask = torch.zeros(len(rows), width, dtype=torch.int64)
    for index, row in enumerate(rows):
        token_ids[index, : len(row)] = torch.tensor(row)
        mask[index, : len(row)] = 1
    logits = module(input_ids=token_ids, attention_mask=mask, use_cache=False).logits
    all_logprobs = torch.log_softmax(logits[:, :-1].float() / temperature, dim=-1)
    return all_logprobs.gather(2, token_ids[:, 1:, None])[:, :, 0]


def sampled_places(rollout: Rollout) -> list[tuple[int, float]]:
    """List (place in the whole sequence, engine log-probability) of every sampled token."""
    places, start = [], 0
    for turn in rollout.turns:
        if turn.logprobs is not None:
            places += [(start + index, float(value)) for index, value in enumerate(turn.logprobs)]
        start += len(turn.token_ids)
    return places


def _credited_members(
    algorithm: Algorithm, groups: Sequence[Group], reply_limit: int
) -> list[tuple[Rollout, float, float]]:
    """List (rollout, advantage, weight of its tokens) of all that count, in plain arithmetic."""
    counted: list[tuple[Rollout, float]] = []
    for group in groups:
        scored = [rollout for rollout in group.rollouts if rollout.outcome.reward is not None]
        if len(scored) < (1 if algorithm.name == "reinforce_pp" else 2):
            continue
        rewards = [rollout.outcome.reward or 0.0 for rollout in scored]
        counted += zip(scored, _advantages(algorithm.name, rewards), strict=True)
    if algorithm.name.startswith("reinforce_pp"):
        counted = _whitened(counted)
    num_rollouts = len(counted)
    num_tokens = sum(len(sampled_places(rollout)) for rollout, _ in counted)
    members = []
    for rollout, advantage in counted:
        own = max(len(sampled_places(rollout)), 1)
        weight = {
            "grpo": 1 / (num_rollouts * own),
            "dr_grpo": 1 / (num_rollouts * reply_limit),
            "dapo": 1 / num_tokens,
            "rloo": 1 / num_tokens,
            "gspo": 1 / (num_rollouts * own),
            "reinforce_pp": 1 / num_tokens,
            "reinforce_pp_baseline": 1 / num_tokens,
        }[algorithm.name]
        members.append((rollout, advantage, weight))
    return members


def _whitened(counted: list[tuple[Rollout, float]]) -> list[tuple[Rollout, float]]:
    """Subtract the mean over all tokens, and divide by their spread."""
    tokens = [advantage for rollout, advantage in counted for _ in sampled_places(rollout)]
    mean = sum(tokens) / len(tokens)
    spread = math.sqrt(sum((advantage - mean) ** 2 for advantage in tokens) / len(tokens))
    return [(rollout, (advantage - mean) / max(spread, 1e-4)) for rollout, advantage in counted]


def _advantages(name: str, rewards: list[float]) -> list[float]:
    """Compare the members of one group."""
    mean = sum(rewards) / len(rewards)
    if name == "reinforce_pp":
        return rewards
    if len(set(rewards)) == 1:
        return [0.0] * len(rewards)
    if name in ("dr_grpo", "reinforce_pp_baseline"):
        return [reward - mean for reward in rewards]
    if name == "rloo":
        others = len(rewards) - 1
        return [reward - (sum(rewards) - reward) / others for reward in rewards]
    variance = sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1)
    return [(reward - mean) / (math.sqrt(variance) + 1e-4) for reward in rewards]
