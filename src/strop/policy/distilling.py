"""Distillation through the head: a teacher's and the policy's distributions, a few positions at a time.

Like the head's other losses it never holds the logits of all positions; it holds a few tensors of a
chunk's logits, because a divergence needs both distributions at once.

Shapes: U scored positions, M scored tokens, D hidden width, V vocabulary; C rows of one chunk. The
teacher's hidden width may be another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from strop.errors import ConfigError
from strop.policy.head import Head, HeadGradients, HeadResult, head_chunks
from strop.policy.language_model import LanguageModel
from strop.policy.packing import PackedBatch, PackedGroup

DISTILL_CHUNK_ROWS = 64
"""Rows compared at once: 37 MiB for each of about six fp32 tensors of a vocabulary of 152,000."""


class DistributionRule(Protocol):
    """A divergence between two distributions over the vocabulary; picklable, like every loss."""

    def __call__(
        self, student_logp_C_V: torch.Tensor, teacher_logp_C_V: torch.Tensor, /
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return its value (C,) and its gradient on the student's logits (C, V), after the temperature."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DistillTerm:
    """A term of a step's loss that compares whole distributions; weighed like `LossTerm`."""

    name: str
    groups: Sequence[PackedGroup]
    temperature: float
    divergence: DistributionRule
    weight: float = 1.0
    is_own_teacher: bool = False
    """Whether the trained weights are the teacher's too; else the learner must have a teacher."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TeacherRows:
    """A teacher's hidden states and head at the scored positions."""

    hidden_U_D: torch.Tensor
    head: Head

    def logprobs(self, rows: slice, temperature: float) -> torch.Tensor:
        """Return its distributions (nats) at some of the positions. Shapes: (C, V), fp32."""
        return _finish(self.head.project(self.hidden_U_D[rows]), self.head, temperature)


@torch.no_grad()
def read_teacher(teacher: LanguageModel, groups: Sequence[PackedGroup]) -> TeacherRows:
    """Run a teacher over a micro-batch. It reads its own prompts where groups have them.

    The replies are the same ids, so its scored positions are the policy's, in the same order.
    """
    shown = [
        group if group.teacher_prompt_ids is None else replace(group, prompt_ids=group.teacher_prompt_ids)
        for group in groups
    ]
    batch = PackedBatch.of_groups(shown, teacher.device)
    return TeacherRows(hidden_U_D=teacher.read(batch), head=teacher.head)


def require_same_vocabulary(policy: LanguageModel, other: LanguageModel, role: str) -> None:
    """Refuse a model whose distributions are over another vocabulary.

    Raises: ConfigError with both sizes.
    """
    own, theirs = policy.shape.vocab_size, other.shape.vocab_size
    if own != theirs:
        raise ConfigError(
            f"the {role} has a vocabulary of {theirs} tokens and the policy one of {own}",
            allowed="a model of the same vocabulary: its distributions are compared token by token",
            next_step=f"choose another {role}",
        )


@torch.no_grad()
def distill_and_gradients(
    hidden_U_D: torch.Tensor,
    head: Head,
    batch: PackedBatch,
    term: DistillTerm,
    teacher: TeacherRows,
    *,
    into: HeadGradients,
) -> HeadResult:
    """Compute divergence and gradients of the scored positions; add the head's own to buffers.

    The weight of a position is the sum over the scored tokens that it predicts. The term's weight scales the
    gradient and not the returned loss.

    Shapes: hidden (U, D) without graph.
    """
    num_rows, temperature = len(hidden_U_D), term.temperature
    weight_U = torch.zeros(num_rows, device=hidden_U_D.device).index_add_(0, batch.row_M, batch.weight_M)
    logprob_M = torch.empty(batch.target_M.numel(), dtype=torch.float32, device=hidden_U_D.device)
    grad_hidden = torch.empty_like(hidden_U_D)
    loss = torch.zeros((), dtype=torch.float64, device=hidden_U_D.device)
    for rows, tokens in head_chunks(batch, hidden_U_D, len(head), DISTILL_CHUNK_ROWS):
        hidden = hidden_U_D[rows]
        projected = head.project(hidden)
        logp = _finish(projected, head, temperature)
        logprob_M[tokens] = logp[batch.row_M[tokens] - rows.start, batch.target_M[tokens]]
        value, grad = term.divergence(logp, teacher.logprobs(rows, temperature))
        loss += (weight_U[rows] * value).sum(dtype=torch.float64)
        grad.mul_((head.scale * term.weight / temperature) * weight_U[rows, None])
        if head.cap is not None:
            grad.mul_(1.0 - (head.finish(projected) / head.cap).square_())
        grad_logits = grad.to(hidden.dtype)
        grad_hidden[rows] = grad_logits @ head.weight
        into.add(grad_logits, hidden)
        # Freed before the next chunk allocates its own.
        del projected, logp, grad, grad_logits
    return HeadResult(logprob_M=logprob_M, loss=loss, grad_hidden_U_D=grad_hidden)


def _finish(projected: torch.Tensor, head: Head, temperature: float) -> torch.Tensor:
    logits = head.finish(projected).float()
    return torch.log_softmax(logits if temperature == 1.0 else logits / temperature, dim=-1)
