"""Packs rollouts into one flat row that holds each prompt once per group.

The row is all prompts, then all replies. Linears, norms and rotary embeddings run over it without
padding; only the attention, a few percent of the work, pads inside one layer. A reply's last token
is never fed: nothing is predicted after it.

Shapes: P groups, S replies, N positions of the row, M scored tokens, H query heads, K key-value
heads, E head width. R = H / K. Lp and Lr are the longest prompt and reply of the row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from strop.errors import UnfitRecord
from strop.policy.objective import ScoredTokens
from strop.rollout import BoolArray, FloatArray, IntArray

AUX_STREAMS = ("old", "reference", "teacher")
"""Log-probabilities that may travel beside the engine's, each as `<name>_logprobs` of a reply."""


def to_device(array: NDArray[Any], device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Copy an array to a device, without waiting for the work of a GPU."""
    tensor = torch.from_numpy(np.ascontiguousarray(array)).to(dtype=dtype)
    if device.type != "cuda" or tensor.numel() == 0:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedReply:
    """The tokens of one rollout after its group's shared prompt, with their part in the loss."""

    token_ids: IntArray
    is_scored: BoolArray
    """True where the policy sampled the token; from stored turns, never from token values."""
    engine_logprobs: FloatArray
    """The engine's log-probabilities (nats) of the scored tokens only, in order; NaN for a token that was not
    sampled, so that a loss which uses it is not finite, and is refused."""
    advantage: float
    weight: float
    """Aggregation weight of each scored token."""
    old_logprobs: FloatArray | None = None
    """Of the scored tokens under the weights that ratios start from."""
    reference_logprobs: FloatArray | None = None
    """Of the scored tokens under the reference model."""
    teacher_logprobs: FloatArray | None = None
    """Of the scored tokens under the teacher."""
    token_advantages: FloatArray | None = None
    """Of the scored tokens, instead of `advantage`; None: all have that."""

    def __post_init__(self) -> None:
        num_scored = int(self.is_scored.sum())
        streams = {f"{name} log-probabilities": getattr(self, f"{name}_logprobs") for name in AUX_STREAMS}
        for name, stream in {**streams, "advantages": self.token_advantages}.items():
            if stream is not None and len(stream) != num_scored:
                raise UnfitRecord(f"a reply has {num_scored} scored tokens and {len(stream)} {name}")
        if len(self.token_ids) != len(self.is_scored) or num_scored != len(self.engine_logprobs):
            raise UnfitRecord(
                f"a reply has {len(self.token_ids)} tokens, {len(self.is_scored)} marks, {num_scored} of them"
                f" scored, and {len(self.engine_logprobs)} log-probabilities"
            )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedGroup:
    """One prompt and the replies that share it."""

    prompt_ids: IntArray
    replies: tuple[PackedReply, ...]
    teacher_prompt_ids: IntArray | None = None
    """The teacher's prompt; None: the same."""

    @property
    def num_positions(self) -> int:
        """Positions that a forward of this group computes."""
        return len(self.prompt_ids) + sum(max(len(reply.token_ids) - 1, 0) for reply in self.replies)


EMPTY_GROUP = PackedGroup(prompt_ids=np.zeros(1, dtype=np.int32), replies=())
"""One position without scored tokens: its forward and backward add nothing."""


@dataclass(frozen=True, kw_only=True)
class PackedLayout:
    """The place of each prompt and reply in the flat row. Lengths are explicit."""

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
                "a group has an empty prompt",
                allowed="at least one prompt token",
                next_step="read the task's prompt with `strop plan`",
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
        """Rotary positions: replies continue those of their prompt. Shapes: (N,)."""
        prompt_lens_P = np.asarray(self.prompt_lens_P, dtype=np.int64)
        lens = np.concatenate((prompt_lens_P, np.asarray(self.reply_lens_S, dtype=np.int64)))
        first = np.concatenate((np.zeros_like(prompt_lens_P), prompt_lens_P[list(self.group_of_S)]))
        starts = np.concatenate((self.prompt_starts_P, self.reply_starts_S))
        return np.arange(self.num_positions) + np.repeat(first - starts, lens)


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
    """Index of each scored token's reply in the micro-batch."""
    host_row_M: NDArray[np.int64]
    """`row_M` on the host: cutting the batch into chunks must not wait for a GPU."""
    side_logprob_M: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """By name of `AUX_STREAMS`; NaN where a reply has none. A stream that no reply has is absent."""

    @classmethod
    def of_groups(cls, groups: Sequence[PackedGroup], device: torch.device) -> PackedBatch:
        """Pack groups into one row."""
        layout = PackedLayout.of_groups(groups)
        fed = [group.prompt_ids for group in groups]
        fed += [reply.token_ids[:-1] for group in groups for reply in group.replies]
        columns = _scored_columns(groups, layout)
        is_new = np.diff(columns["position"], prepend=-1) != 0
        row_M = np.cumsum(is_new) - 1

        def tensor(array: NDArray[Any], dtype: torch.dtype) -> torch.Tensor:
            return to_device(array, device, dtype)

        return cls(
            layout=layout,
            token_ids_N=tensor(np.concatenate(fed), torch.int64),
            position_ids_N=tensor(layout.position_ids(), torch.int64),
            scored_positions_U=tensor(columns["position"][is_new], torch.int64),
            row_M=tensor(row_M, torch.int64),
            target_M=tensor(columns["target"], torch.int64),
            engine_logprob_M=tensor(columns["logprob"], torch.float32),
            advantage_M=tensor(columns["advantage"], torch.float32),
            weight_M=tensor(columns["weight"], torch.float32),
            reply_M=columns["reply"],
            host_row_M=row_M,
            side_logprob_M={
                name: tensor(columns[name], torch.float32) for name in AUX_STREAMS if name in columns
            },
        )

    def scored_tokens(self, logprob_M: torch.Tensor) -> ScoredTokens:
        """Join the policy's log-probabilities with the batch's columns of its scored tokens."""
        device, side = logprob_M.device, self.side_logprob_M
        unknown_M = torch.full_like(self.engine_logprob_M, torch.nan)
        group_M = np.asarray(self.layout.group_of_S, dtype=np.int64)[self.reply_M]
        return ScoredTokens(
            logprob_M=logprob_M,
            engine_logprob_M=self.engine_logprob_M,
            old_logprob_M=side.get("old", unknown_M),
            reference_logprob_M=side.get("reference", unknown_M),
            teacher_logprob_M=side.get("teacher", unknown_M),
            advantage_M=self.advantage_M,
            reply_M=to_device(self.reply_M, device),
            group_M=to_device(group_M, device),
        )


def _scored_columns(groups: Sequence[PackedGroup], layout: PackedLayout) -> dict[str, NDArray[Any]]:
    """List every scored token with the position that predicts it, in ascending order of these positions.

    First come the first tokens of replies, which the prompts' last positions predict, then all others.
    Both parts are in order already, so nothing is sorted.
    Shapes: S replies, T tokens of replies, F scored first tokens, L scored later tokens, M = F + L.
    """
    replies = [reply for group in groups for reply in group.replies]
    ids_T = _join([reply.token_ids for reply in replies], np.int32)
    marks_T = _join([reply.is_scored for reply in replies], np.bool_)
    starts_S, lens_S = _edges([len(reply.token_ids) for reply in replies])
    scored_starts_S, num_scored_S = _edges([len(reply.engine_logprobs) for reply in replies])
    # A reply without any token has no first one.
    has_first_S = np.zeros(len(replies), np.bool_)
    has_first_S[lens_S > 0] = marks_T[starts_S[lens_S > 0]]
    num_later_S = num_scored_S - has_first_S
    first_F = starts_S[has_first_S]
    marks_T[first_F] = False
    later_L = np.flatnonzero(marks_T)
    is_later_M = np.ones(int(num_scored_S.sum()), np.bool_)
    is_later_M[scored_starts_S[has_first_S]] = False

    def spread(values_S: NDArray[Any]) -> NDArray[Any]:
        """Give each scored token its reply's value."""
        return np.concatenate((values_S[has_first_S], np.repeat(values_S, num_later_S)))

    def arrange(values_M: NDArray[Any]) -> NDArray[Any]:
        """Reorder values from reply order: first tokens first."""
        return np.concatenate((values_M[~is_later_M], values_M[is_later_M]))

    groups_S = np.asarray(layout.group_of_S, dtype=np.int64)
    last_of_prompt_P = layout.prompt_starts_P + np.asarray(layout.prompt_lens_P, dtype=np.int64) - 1
    shifts_L = np.repeat(layout.reply_starts_S - starts_S - 1, num_later_S)
    columns = {
        "position": np.concatenate((last_of_prompt_P[groups_S[has_first_S]], later_L + shifts_L)),
        "target": ids_T[np.concatenate((first_F, later_L))],
        "logprob": arrange(_join([reply.engine_logprobs for reply in replies], np.float32)),
        "advantage": spread(np.array([reply.advantage for reply in replies], dtype=np.float32)),
        "weight": spread(np.array([reply.weight for reply in replies], dtype=np.float32)),
        "reply": spread(np.arange(len(replies))),
    }
    if any(reply.token_advantages is not None for reply in replies):
        # One advantage for the whole reply, or one for each token.
        token_advantages = [
            reply.token_advantages
            if reply.token_advantages is not None
            else np.full(len(reply.engine_logprobs), reply.advantage, np.float32)
            for reply in replies
        ]
        columns["advantage"] = arrange(_join(token_advantages, np.float32))
    for name in AUX_STREAMS:
        streams = [getattr(reply, f"{name}_logprobs") for reply in replies]
        if any(stream is not None for stream in streams):
            unknown = [np.full(num, np.nan, np.float32) for num in num_scored_S.tolist()]
            filled = [nan if stream is None else stream for stream, nan in zip(streams, unknown, strict=True)]
            columns[name] = arrange(_join(filled, np.float32))
    return columns


def _join(parts: Sequence[NDArray[Any]], dtype: type[Any]) -> NDArray[Any]:
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros(0, dtype)


def _edges(lens: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return start and length of each of several joined arrays."""
    lens_S = np.array(lens, dtype=np.int64)
    return np.cumsum(lens_S) - lens_S, lens_S


def with_logprobs(
    groups: Sequence[PackedGroup], name: str, scores: Sequence[FloatArray]
) -> tuple[PackedGroup, ...]:
    """Return the groups with a side stream: one array per reply, in order, as from a learner's `score`.

    Raises: UnfitRecord if a stream is not as long as the reply's scored tokens.
    """
    waiting = iter(scores)
    return tuple(
        replace(
            group,
            replies=tuple(
                replace(reply, **{f"{name}_logprobs": next(waiting)})  # type: ignore[arg-type]
                for reply in group.replies
            ),
        )
        for group in groups
    )


@dataclass(frozen=True, slots=True)
class Load:
    """The size of a forward of some groups."""

    is_alone: bool = False
    """Whether each prompt with each reply is a row, padded to the longest."""
    num_packed: int = 0
    """Positions of the groups as one packed row."""
    num_rows: int = 0
    width: int = 0
    """Length of the longest row."""

    @property
    def num_positions(self) -> int:
        """Fed positions."""
        return self.num_rows * self.width if self.is_alone else self.num_packed

    def plus(self, group: PackedGroup) -> Load:
        """Return the load with one more group."""
        # A reply of one token feeds nothing; its prompt is in another reply's row, or is a row alone.
        fed = [len(reply.token_ids) - 1 for reply in group.replies if len(reply.token_ids) > 1]
        return replace(
            self,
            num_packed=self.num_packed + group.num_positions,
            num_rows=self.num_rows + max(len(fed), 1),
            width=max(self.width, len(group.prompt_ids) + max(fed, default=0)),
        )


def split_by_budget(
    groups: Sequence[PackedGroup], max_positions: int, *, keeps_groups: bool = False, is_alone: bool = False
) -> Iterator[list[PackedGroup]]:
    """Cut groups, longest first, into micro-batches of at most `max_positions` fed positions.

    A group that alone exceeds the budget is split between replies, unless `keeps_groups`; its prompt is
    then fed more than once, which changes no gradient. A single reply that exceeds it makes a micro-batch.
    `is_alone`: see `Load`.
    """
    nothing = Load(is_alone=is_alone)
    pieces = [
        piece
        for group in groups
        for piece in ([group] if keeps_groups else _split_group(group, max_positions, nothing))
    ]
    if is_alone:
        pieces.sort(key=lambda piece: -nothing.plus(piece).width)
    else:
        pieces.sort(key=lambda piece: -max(len(reply.token_ids) for reply in piece.replies))
    yield from _fill(pieces, max_positions, nothing)


def cut_groups(
    groups: Sequence[PackedGroup], max_positions: int | None, *, is_alone: bool = False
) -> Iterator[list[PackedGroup]]:
    """Cut groups into parts within a budget, in their order; one group may exceed it."""
    yield from _fill(groups, max_positions, Load(is_alone=is_alone))


def _fill(
    pieces: Iterable[PackedGroup], max_positions: int | None, nothing: Load
) -> Iterator[list[PackedGroup]]:
    batch: list[PackedGroup] = []
    load = nothing
    for piece in pieces:
        if batch and max_positions is not None and load.plus(piece).num_positions > max_positions:
            yield batch
            batch, load = [], nothing
        batch.append(piece)
        load = load.plus(piece)
    if batch:
        yield batch


def _split_group(group: PackedGroup, max_positions: int, nothing: Load) -> Iterator[PackedGroup]:
    """Split one group between replies where it exceeds the budget."""
    chosen: list[PackedReply] = []
    for reply in group.replies:
        wider = replace(group, replies=(*chosen, reply))
        if chosen and nothing.plus(wider).num_positions > max_positions:
            yield replace(group, replies=tuple(chosen))
            chosen = []
        chosen.append(reply)
    if chosen:
        yield replace(group, replies=tuple(chosen))
