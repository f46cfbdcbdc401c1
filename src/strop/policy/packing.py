"""Laying rollouts out as one flat row in which each prompt stands once per group.

The row is all prompts, then all replies. Linears, norms and rotary embeddings run over it without
padding; only the attention, a few percent of the work, pads inside one layer. A reply's last token
is never fed: nothing is predicted after it.

Shapes: P groups, S replies, N positions of the row, M scored tokens, H query heads, K key-value
heads, E head width. R = H / K. Lp and Lr are the longest prompt and reply of the row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from strop.errors import UnfitRecord, explain_refusal
from strop.rollout import BoolArray, FloatArray, IntArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedReply:
    """What follows a group's shared prompt in one rollout, with its share of the loss."""

    token_ids: IntArray
    is_scored: BoolArray
    """True where the policy sampled the token; from stored turns, never from token values."""
    engine_logprobs: FloatArray
    """Behaviour log-probabilities (nats) of the scored tokens only, in order; NaN for a token that nobody
    sampled, so that a loss which asks for it is not finite, and is refused."""
    advantage: float
    weight: float
    """Aggregation weight of each scored token."""

    def __post_init__(self) -> None:
        num_scored = int(self.is_scored.sum())
        if len(self.token_ids) != len(self.is_scored) or num_scored != len(self.engine_logprobs):
            raise UnfitRecord(
                explain_refusal(
                    f"a reply has {len(self.token_ids)} tokens, {len(self.is_scored)} marks, {num_scored} of "
                    f"them scored, and {len(self.engine_logprobs)} log-probabilities",
                    allowed="one mark per token and one log-probability per scored token",
                    next_step="read the engine's log; nothing was trained on this reply",
                )
            )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedGroup:
    """One prompt and the replies that share it."""

    prompt_ids: IntArray
    replies: tuple[PackedReply, ...]

    @property
    def num_positions(self) -> int:
        """Positions that a forward of this group computes."""
        return len(self.prompt_ids) + sum(max(len(reply.token_ids) - 1, 0) for reply in self.replies)


@dataclass(frozen=True, kw_only=True)
class PackedLayout:
    """Where each prompt and reply lies in the flat row. Lengths are explicit."""

    prompt_lens_P: tuple[int, ...]
    reply_lens_S: tuple[int, ...]
    """Fed positions of each reply: one less than its tokens."""
    group_of_S: tuple[int, ...]

    @classmethod
    def of_prompts(cls, prompt_lens: Sequence[int]) -> PackedLayout:
        """Lay out prompts without replies, as prefill needs them."""
        return cls(prompt_lens_P=tuple(prompt_lens), reply_lens_S=(), group_of_S=())

    @classmethod
    def of_groups(cls, groups: Sequence[PackedGroup]) -> PackedLayout:
        """Lay out groups in the given order. Raises: UnfitRecord for an empty prompt."""
        if any(len(group.prompt_ids) == 0 for group in groups):
            raise UnfitRecord(
                explain_refusal(
                    "a group has an empty prompt",
                    allowed="at least one prompt token",
                    next_step="read the task's prompt with `strop plan`",
                )
            )
        return cls(
            prompt_lens_P=tuple(len(group.prompt_ids) for group in groups),
            reply_lens_S=tuple(max(len(r.token_ids) - 1, 0) for g in groups for r in g.replies),
            group_of_S=tuple(index for index, group in enumerate(groups) for _ in group.replies),
        )

    @property
    def num_prompt_positions(self) -> int:
        """Positions of all prompts."""
        return sum(self.prompt_lens_P)

    @property
    def num_positions(self) -> int:
        """Positions of the whole row (N)."""
        return self.num_prompt_positions + sum(self.reply_lens_S)

    @cached_property
    def prompt_starts_P(self) -> NDArray[np.int64]:
        """First position of each prompt."""
        return np.concatenate(([0], np.cumsum(self.prompt_lens_P)))[:-1].astype(np.int64)

    @cached_property
    def reply_starts_S(self) -> NDArray[np.int64]:
        """First position of each reply."""
        ends = self.num_prompt_positions + np.cumsum(self.reply_lens_S, dtype=np.int64)
        return ends - np.asarray(self.reply_lens_S, dtype=np.int64)

    def position_ids(self) -> NDArray[np.int64]:
        """Rotary positions: replies go on where their prompt ends. Shapes: (N,)."""
        prompts = [np.arange(length) for length in self.prompt_lens_P]
        replies = [
            np.arange(length) + self.prompt_lens_P[group]
            for length, group in zip(self.reply_lens_S, self.group_of_S, strict=True)
        ]
        return np.concatenate([*prompts, *replies]).astype(np.int64)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedBatch:
    """Flat tensors of one micro-batch, with exact boundaries.

    Shapes: N fed positions, U positions whose prediction is scored, M scored tokens (M >= U: the
    last prompt position predicts the first token of every reply of its group).
    """

    layout: PackedLayout
    token_ids_N: torch.Tensor
    position_ids_N: torch.Tensor
    scored_positions_U: torch.Tensor
    row_M: torch.Tensor
    """Index into `scored_positions_U` of the position that predicts the token; ascending."""
    target_M: torch.Tensor
    engine_logprob_M: torch.Tensor
    advantage_M: torch.Tensor
    weight_M: torch.Tensor
    reply_M: NDArray[np.int64]
    """Which reply of the micro-batch each scored token belongs to."""

    @classmethod
    def of_groups(cls, groups: Sequence[PackedGroup], device: torch.device) -> PackedBatch:
        """Pack groups into one row."""
        layout = PackedLayout.of_groups(groups)
        fed = [group.prompt_ids for group in groups]
        fed += [reply.token_ids[:-1] for group in groups for reply in group.replies]
        columns = _scored_columns(groups, layout)
        order = np.argsort(columns["position"], kind="stable")
        columns = {name: column[order] for name, column in columns.items()}
        positions, row = np.unique(columns["position"], return_inverse=True)

        def tensor(array: NDArray[Any], dtype: torch.dtype) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device=device, dtype=dtype)

        return cls(
            layout=layout,
            token_ids_N=tensor(np.concatenate(fed), torch.int64),
            position_ids_N=tensor(layout.position_ids(), torch.int64),
            scored_positions_U=tensor(positions, torch.int64),
            row_M=tensor(row, torch.int64),
            target_M=tensor(columns["target"], torch.int64),
            engine_logprob_M=tensor(columns["logprob"], torch.float32),
            advantage_M=tensor(columns["advantage"], torch.float32),
            weight_M=tensor(columns["weight"], torch.float32),
            reply_M=columns["reply"],
        )


def _scored_columns(groups: Sequence[PackedGroup], layout: PackedLayout) -> dict[str, NDArray[Any]]:
    """List every scored token with the position that predicts it."""
    parts: dict[str, list[NDArray[Any]]] = {
        name: [] for name in ("position", "target", "logprob", "advantage", "weight", "reply")
    }
    replies = [reply for group in groups for reply in group.replies]
    for index, (reply, start) in enumerate(zip(replies, layout.reply_starts_S, strict=True)):
        group = layout.group_of_S[index]
        last_of_prompt = layout.prompt_starts_P[group] + layout.prompt_lens_P[group] - 1
        offsets = np.flatnonzero(reply.is_scored)
        num_scored = len(offsets)
        parts["position"].append(np.where(offsets == 0, last_of_prompt, start + offsets - 1))
        parts["target"].append(reply.token_ids[offsets].astype(np.int64))
        parts["logprob"].append(reply.engine_logprobs)
        parts["advantage"].append(np.full(num_scored, reply.advantage))
        parts["weight"].append(np.full(num_scored, reply.weight))
        parts["reply"].append(np.full(num_scored, index, dtype=np.int64))
    return {name: np.concatenate(column) if column else np.zeros(0) for name, column in parts.items()}


def split_by_budget(groups: Sequence[PackedGroup], max_positions: int) -> Iterator[list[PackedGroup]]:
    """Cut groups, longest first, into micro-batches of at most `max_positions` fed positions.

    A group that alone exceeds the budget is split between replies; its prompt is then fed more than
    once, which changes no gradient. A single reply that exceeds it is a micro-batch of its own.
    """
    pieces = [piece for group in groups for piece in _split_group(group, max_positions)]
    pieces.sort(key=lambda piece: -max(len(reply.token_ids) for reply in piece.replies))
    batch: list[PackedGroup] = []
    filled = 0
    for piece in pieces:
        if batch and filled + piece.num_positions > max_positions:
            yield batch
            batch, filled = [], 0
        batch.append(piece)
        filled += piece.num_positions
    if batch:
        yield batch


def _split_group(group: PackedGroup, max_positions: int) -> Iterator[PackedGroup]:
    """Split one group between replies where it exceeds the budget."""
    chosen: list[PackedReply] = []
    for reply in group.replies:
        wider = PackedGroup(prompt_ids=group.prompt_ids, replies=(*chosen, reply))
        if chosen and wider.num_positions > max_positions:
            yield PackedGroup(prompt_ids=group.prompt_ids, replies=tuple(chosen))
            chosen = []
        chosen.append(reply)
    if chosen:
        yield PackedGroup(prompt_ids=group.prompt_ids, replies=tuple(chosen))
