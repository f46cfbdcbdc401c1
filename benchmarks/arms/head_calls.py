"""The calls that a training step makes on the head, on random hidden states of one long reply."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from strop.algorithm import ALGORITHMS
from strop.algorithm.offline import Divergence, TopDivergence
from strop.policy.distilling import DistillTerm, TeacherRows, distill_and_gradients
from strop.policy.head import Head, HeadGradients, TokenGradient, loss_and_gradients, token_logprobs
from strop.policy.packing import PackedBatch, PackedGroup, PackedReply

_CPU = torch.device("cpu")
_PENALTY = Divergence(name="jsd")


def make_call(kind: str, vocabulary: int, num_positions: int, hidden_width: int) -> Callable[[], object]:
    """Return a call whose inputs, the head's gradient among them, are there already."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_positions, hidden_width, generator=generator).bfloat16()
    weight = (torch.randn(vocabulary, hidden_width, generator=generator) / hidden_width**0.5).bfloat16()
    head = Head(weight)
    # Written, so that its pages are resident before the call.
    into = HeadGradients(torch.full((vocabulary, hidden_width), 0.0).add_(0.0))
    batch = _batch(vocabulary, num_positions)
    if kind == "naive":
        return lambda: _hold_all_logits(hidden, weight, batch)
    if kind.startswith("distill"):
        teacher = TeacherRows(hidden_U_D=hidden.flip(0).contiguous(), head=head)
        rule = TopDivergence(divergence=_PENALTY, top_k=64) if kind == "distill-top" else _PENALTY
        term = DistillTerm(name="distill", groups=[], temperature=1.0, divergence=rule)
        return lambda: distill_and_gradients(hidden, head, batch, term, teacher, into=into)
    return _token_call(kind, hidden, head, batch, into)


def _token_call(
    kind: str, hidden: torch.Tensor, head: Head, batch: PackedBatch, into: HeadGradients
) -> Callable[[], object]:
    algorithm = ALGORITHMS["gspo" if kind == "rl-sequence" else "grpo"]

    def call() -> object:
        known = batch.scored_tokens(batch.engine_logprob_M)
        if kind == "rl-sequence":
            # As the learner does it for a loss of whole replies: one more pass, then constants.
            known = batch.scored_tokens(token_logprobs(hidden, head, batch, 1.0))
            terms = algorithm(known)

        def rule(logprob: torch.Tensor, tokens: slice) -> TokenGradient:
            if kind == "sft":
                return TokenGradient(loss_M=-logprob, grad_M=-batch.weight_M[tokens])
            if kind == "rl-sequence":
                return TokenGradient(loss_M=terms.loss_N[tokens], grad_M=terms.grad_N[tokens])
            chunk = algorithm(known.part(tokens))
            return TokenGradient(loss_M=chunk.loss_N, grad_M=chunk.grad_N)

        return loss_and_gradients(hidden, head, batch, temperature=1.0, rule=rule, into=into)

    return call


def _hold_all_logits(hidden: torch.Tensor, weight: torch.Tensor, batch: PackedBatch) -> None:
    """Compute the same cross-entropy with autograd over all logits, in the types that a model gives."""
    own, matrix = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    logits = torch.nn.functional.linear(own, matrix).float()
    torch.nn.functional.cross_entropy(logits, batch.target_M).backward()  # type: ignore[no-untyped-call]


def _batch(vocabulary: int, num_positions: int) -> PackedBatch:
    random = np.random.default_rng(0)
    reply = PackedReply(
        token_ids=random.integers(0, vocabulary, num_positions).astype(np.int32),
        is_scored=np.ones(num_positions, dtype=np.bool_),
        engine_logprobs=np.full(num_positions, -5.0, dtype=np.float32),
        advantage=1.0,
        weight=1.0 / num_positions,
    )
    group = PackedGroup(prompt_ids=np.zeros(1, dtype=np.int32), replies=(reply,))
    return PackedBatch.of_groups([group], _CPU)
