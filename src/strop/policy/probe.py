"""Inputs of the proof at loading, and three ways to run them: as the module, a learner and an engine do.

Two prompts of different lengths with two replies each; one reply feeds nothing and one outlives the others.

Shapes: M scored tokens, reply by reply, I distinct token ids, D width of the embeddings.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from strop.policy.head import HeadGradients, TokenGradient, loss_and_gradients
from strop.policy.kv_cache import open_rows
from strop.policy.language_model import LanguageModel
from strop.policy.packing import PackedBatch, PackedGroup, PackedReply
from strop.rollout import IntArray

_PROMPT_LENS = (9, 6)
_REPLY_LENS = ((4, 2), (1, 3))
_REPLY_WEIGHTS = (1.0, -0.7, 0.0, 0.0)
"""Weights of the replies in the compared gradient. The second group's are 0, so a leak into it would show."""


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """Log-probabilities and gradients of one forward over the probe."""

    logprob_M: torch.Tensor
    """Reply by reply."""
    gradient_I_D: torch.Tensor | None
    """Of the weighted sum of log-probabilities, with respect to the embedding of each id, if it was
    computed."""
    largest_logit: float = 1.0


def make_groups(module: Any, shift: int) -> tuple[PackedGroup, ...]:
    """Return two prompts with two replies each, of distinct tokens where the vocabulary has them."""
    num = sum(_PROMPT_LENS) + sum(map(sum, _REPLY_LENS))
    token_ids, weights = spread_token_ids(module, num, shift=shift), iter(_REPLY_WEIGHTS)
    groups, start = [], 0
    for prompt_len, reply_lens in zip(_PROMPT_LENS, _REPLY_LENS, strict=True):
        prompt, start = token_ids[start : start + prompt_len], start + prompt_len
        replies = []
        for length in reply_lens:
            reply, start = token_ids[start : start + length], start + length
            replies.append(
                PackedReply(
                    token_ids=reply,
                    is_scored=np.ones(length, dtype=np.bool_),
                    engine_logprobs=np.zeros(length, dtype=np.float32),
                    advantage=1.0,
                    weight=next(weights),
                )
            )
        groups.append(PackedGroup(prompt_ids=prompt, replies=tuple(replies)))
    return tuple(groups)


def spread_token_ids(module: Any, num: int, *, shift: int) -> IntArray:
    """Return fixed, spread token ids, without special ones of the config."""
    text = module.config.get_text_config()
    settings = {**vars(module.config), **vars(text)}
    ids = (value for name, value in settings.items() if name.endswith(("_id", "_index")))
    special = {value for value in ids if isinstance(value, int)}
    vocab_size = min(int(text.vocab_size), module.get_input_embeddings().weight.shape[0])
    spread = ((np.arange(num + len(special)) * 7919 + shift) % vocab_size).tolist()
    chosen = [token_id for token_id in spread if token_id not in special]
    return np.resize(np.array(chosen, dtype=np.int32), num)


def _sequences(groups: Sequence[PackedGroup]) -> list[tuple[IntArray, IntArray]]:
    """Return each prompt with each of its replies."""
    return [(group.prompt_ids, reply.token_ids) for group in groups for reply in group.replies]


def ask_module(module: Any, groups: Sequence[PackedGroup], change: float, *, has_gradient: bool) -> Answer:
    """Run the module's own forward, one sequence at a time."""
    logprobs, largest, gradient = [], 1.0, None
    device = module.get_output_embeddings().weight.device
    for (prompt, reply), weight in zip(_sequences(groups), _REPLY_WEIGHTS, strict=True):
        token_ids = torch.from_numpy(np.concatenate([prompt, reply])).long().to(device)
        is_weighed = has_gradient and weight != 0.0
        with _embeddings_of(module, change=change) as embeddings, torch.set_grad_enabled(is_weighed):
            logits = module(input_ids=token_ids[None, :-1], use_cache=False).logits[0].float()
            places = torch.arange(len(prompt) - 1, len(token_ids) - 1, device=device)
            found = torch.log_softmax(logits[places], dim=-1)[torch.arange(len(reply)), token_ids[places + 1]]
            if is_weighed:
                part = embeddings.gradient(weight * found.sum(), None, groups)
                gradient = part if gradient is None else gradient + part
        logprobs.append(found.detach())
        largest = max(largest, float(logits.detach().abs().max()))
    return Answer(torch.cat(logprobs), gradient, largest)


def ask_learner(model: LanguageModel, groups: Sequence[PackedGroup], *, has_gradient: bool) -> Answer:
    """Run as a learner does: trunk and head over a batch, and backward."""
    batch = PackedBatch.of_groups(groups, model.device)

    def rule(logprob: torch.Tensor, tokens: slice) -> TokenGradient:
        weight = batch.weight_M[tokens]
        return TokenGradient(loss_M=weight * logprob, grad_M=weight)

    table = model.module.get_input_embeddings().weight if model.fused is not None else None
    with _embeddings_of(model.module, table) as embeddings, torch.set_grad_enabled(has_gradient):
        scored = model.read(batch)
        result = loss_and_gradients(
            scored.detach(), model.head, batch, temperature=1.0, rule=rule, into=HeadGradients()
        )
        gradient = embeddings.gradient(scored, result.grad_hidden_U_D, groups) if has_gradient else None
    order = torch.from_numpy(np.argsort(batch.reply_M, kind="stable")).to(model.device)
    return Answer(result.logprob_M[order], gradient)


@torch.inference_mode()
def ask_engine(model: LanguageModel, groups: Sequence[PackedGroup]) -> torch.Tensor:
    """Run as an engine does: prefill, and a step per token over rows that end one after the other."""
    pairs = _sequences(groups)
    longest = max(len(prompt) + len(reply) for prompt, reply in pairs)
    rows = open_rows(model, max_num_seqs=len(pairs), num_slots=longest)
    counts = [len(group.replies) for group in groups]
    first = rows.begin([group.prompt_ids for group in groups], counts)
    logits = first.repeat_interleave(torch.tensor(counts, device=model.device), dim=0)
    live = list(range(len(pairs)))
    by_pair: list[list[torch.Tensor]] = [[] for _ in pairs]
    for step in range(max(len(reply) for _, reply in pairs)):
        logprobs = torch.log_softmax(logits.float(), dim=-1)
        for row, pair in enumerate(live):
            by_pair[pair].append(logprobs[row, int(pairs[pair][1][step])])
        kept = [row for row, pair in enumerate(live) if len(pairs[pair][1]) > step + 1]
        if len(kept) < len(live):
            rows.keep(kept)
            live = [live[row] for row in kept]
        if live:
            newest = torch.tensor([int(pairs[pair][1][step]) for pair in live], device=model.device)
            places = torch.tensor([len(pairs[pair][0]) + step for pair in live], device=model.device)
            logits = rows.step(newest, places)
    return torch.stack([logprob for row in by_pair for logprob in row])


class _Embeddings:
    """The embeddings of a forward, for their gradients."""

    def __init__(self, table: torch.Tensor | None, change: float) -> None:
        self._table = table
        self._change = change
        self._read: list[tuple[torch.Tensor, torch.Tensor]] = []

    def replace(self, _: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        """Begin the graph behind the embeddings; a forward hook."""
        leaf = output.detach().requires_grad_()
        self._read.append((inputs[0], leaf))
        # A copy, which models may change in place.
        signs = 1.0 - 2.0 * (torch.arange(leaf.shape[-1], device=leaf.device) % 2)
        return leaf * (1.0 + self._change * signs).to(leaf.dtype)

    def gradient(
        self, output: torch.Tensor, upstream: torch.Tensor | None, groups: Sequence[PackedGroup]
    ) -> torch.Tensor:
        """Return the gradient of the embedding of each id of the probe. Shapes: (I, D)."""
        if self._table is not None:
            (sparse,) = torch.autograd.grad(output, [self._table], upstream)
            pairs = [(sparse._indices()[0], sparse._values())]
        else:
            leaves = [leaf for _, leaf in self._read]
            grads = torch.autograd.grad(output, leaves, upstream, allow_unused=True)
            pairs = [
                (ids, grad) for (ids, _), grad in zip(self._read, grads, strict=True) if grad is not None
            ]
        distinct = np.unique(np.concatenate([part for pair in _sequences(groups) for part in pair]))
        known = torch.from_numpy(distinct.astype(np.int64)).to(output.device)
        total = torch.zeros(len(known), pairs[0][1].shape[-1], dtype=torch.float64, device=output.device)
        for ids, grad in pairs:
            places = torch.searchsorted(known, ids.reshape(-1)).clamp(max=len(known) - 1)
            is_known = known[places] == ids.reshape(-1)
            total.index_add_(0, places[is_known], grad.reshape(-1, grad.shape[-1])[is_known].double())
        return total


@contextmanager
def _embeddings_of(
    module: Any, table: torch.Tensor | None = None, *, change: float = 0.0
) -> Iterator[_Embeddings]:
    """Track the embeddings of a forward: of a table, or the outputs of the module's embedding layer.

    The latter may be changed by a fraction.
    """
    embeddings = _Embeddings(table, change)
    if table is not None:
        table.requires_grad_(True)
        try:
            yield embeddings
        finally:
            table.requires_grad_(False)
        return
    hook = module.get_input_embeddings().register_forward_hook(embeddings.replace)
    try:
        yield embeddings
    finally:
        hook.remove()
