"""The LM head over scored positions only, in chunks, never holding all logits.

For losses that are separable over tokens, the gradient of a logit row needs only that row's own
log-probability, so one pass computes log-probability, loss and gradient (6 FLOP per head parameter
and row instead of 8 with a second pass).

Shapes: U scored positions, M scored tokens, D hidden width, V vocabulary; C rows of one chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from strop.policy.footprint import HEAD_CHUNK_ROWS
from strop.policy.packing import PackedBatch


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenGradient:
    """What a loss says about scored tokens. Shapes: both (m,), for the m tokens asked about."""

    loss_M: torch.Tensor
    """Weighted loss of each token; their sum over the whole batch is the loss."""
    grad_M: torch.Tensor
    """Derivative of the whole loss with respect to each token's log-probability."""


TokenRule = Callable[[torch.Tensor, slice], TokenGradient]
"""Maps the log-probabilities of the tokens `slice` of a batch to their losses and gradients."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HeadResult:
    """Result of one pass over the head."""

    logprob_M: torch.Tensor
    loss: float
    grad_hidden_U_D: torch.Tensor


def _chunks(row_M: torch.Tensor, num_rows: int, chunk_rows: int) -> Iterator[tuple[slice, slice]]:
    """Yield (rows, tokens) slices that cover the batch; tokens are sorted by row."""
    starts = torch.arange(0, num_rows + chunk_rows, chunk_rows, device=row_M.device).clamp(max=num_rows)
    cuts = torch.searchsorted(row_M, starts).tolist()
    bounds = starts.tolist()
    for index in range(len(bounds) - 1):
        if bounds[index] < bounds[index + 1]:
            yield slice(bounds[index], bounds[index + 1]), slice(cuts[index], cuts[index + 1])


def _log_softmax(hidden: torch.Tensor, weight: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return log-probabilities of all tokens. Shapes: (C, D), (V, D) to (C, V), fp32."""
    logits = torch.nn.functional.linear(hidden, weight)
    if temperature != 1.0:
        logits = logits.float() / temperature
    return torch.log_softmax(logits, dim=-1, dtype=torch.float32)


@torch.no_grad()
def token_logprobs(
    hidden_U_D: torch.Tensor,
    head_weight: torch.Tensor,
    batch: PackedBatch,
    temperature: float,
    *,
    chunk_rows: int = HEAD_CHUNK_ROWS,
) -> torch.Tensor:
    """Return the log-probability (nats) of every scored token. Shapes: (M,), fp32."""
    logprob_M = torch.empty(batch.target_M.numel(), dtype=torch.float32, device=hidden_U_D.device)
    for rows, tokens in _chunks(batch.row_M, hidden_U_D.shape[0], chunk_rows):
        all_logprobs = _log_softmax(hidden_U_D[rows], head_weight, temperature)
        logprob_M[tokens] = all_logprobs[batch.row_M[tokens] - rows.start, batch.target_M[tokens]]
    return logprob_M


@torch.no_grad()
def loss_and_gradients(
    hidden_U_D: torch.Tensor,
    head_weight: torch.Tensor,
    batch: PackedBatch,
    *,
    temperature: float,
    rule: TokenRule,
    grad_weight: torch.Tensor,
    chunk_rows: int = HEAD_CHUNK_ROWS,
) -> HeadResult:
    """Compute loss and gradients of the scored tokens; add the head's own into `grad_weight`.

    Shapes: hidden (U, D) without graph, head_weight (V, D), grad_weight (V, D) in fp32.
    """
    logprob_M = torch.empty(batch.target_M.numel(), dtype=torch.float32, device=hidden_U_D.device)
    grad_hidden = torch.empty_like(hidden_U_D)
    losses: list[float] = []
    for rows, tokens in _chunks(batch.row_M, hidden_U_D.shape[0], chunk_rows):
        hidden = hidden_U_D[rows]
        all_logprobs = _log_softmax(hidden, head_weight, temperature)
        row, target = batch.row_M[tokens] - rows.start, batch.target_M[tokens]
        logprob_M[tokens] = all_logprobs[row, target]
        token_gradient = rule(logprob_M[tokens], tokens)
        losses.append(float(token_gradient.loss_M.sum(dtype=torch.float64)))
        # d logprob / d logits = (onehot - p) / temperature, summed over the tokens of a row.
        grad_M = token_gradient.grad_M / temperature
        grad_C = torch.zeros(hidden.shape[0], device=hidden.device).index_add_(0, row, grad_M)
        grad_logits = all_logprobs.exp_().mul_(-grad_C[:, None])
        grad_logits.index_put_((row, target), grad_M, accumulate=True)
        grad_logits = grad_logits.to(hidden.dtype)
        grad_hidden[rows] = grad_logits @ head_weight
        grad_weight.add_(grad_logits.t() @ hidden)
    return HeadResult(logprob_M=logprob_M, loss=sum(losses), grad_hidden_U_D=grad_hidden)
