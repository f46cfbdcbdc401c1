"""A micro-batch's flat tensors are those of a plain loop over its tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.policy.packing import SIDE_STREAMS, PackedBatch, PackedGroup, PackedReply


@st.composite
def packed_replies(draw: st.DrawFn) -> PackedReply:
    marks = draw(st.lists(st.booleans(), max_size=6))
    num_scored = sum(marks)

    def values() -> Any:
        return np.array(
            draw(st.lists(st.integers(-99, -1), min_size=num_scored, max_size=num_scored)), np.float32
        )

    streams = {f"{name}_logprobs": values() for name in SIDE_STREAMS if draw(st.booleans())}
    return PackedReply(
        token_ids=np.array(
            draw(st.lists(st.integers(0, 99), min_size=len(marks), max_size=len(marks))), np.int32
        ),
        is_scored=np.array(marks, np.bool_),
        engine_logprobs=values(),
        advantage=draw(st.integers(-9, 9)) / 8,
        weight=draw(st.integers(0, 9)) / 8,
        **streams,
    )


@st.composite
def packed_groups(draw: st.DrawFn) -> PackedGroup:
    prompt_ids = np.array(draw(st.lists(st.integers(0, 99), min_size=1, max_size=4)), np.int32)
    return PackedGroup(prompt_ids=prompt_ids, replies=tuple(draw(st.lists(packed_replies(), max_size=4))))


def lay_out(groups: list[PackedGroup]) -> dict[str, list[Any]]:
    """Lay groups out token by token."""
    fed = [(token_id, place) for group in groups for place, token_id in enumerate(group.prompt_ids.tolist())]
    ends = np.cumsum([len(group.prompt_ids) for group in groups]).tolist()
    scored: list[tuple[Any, ...]] = []
    number = 0
    for group, end in zip(groups, ends, strict=True):
        for reply in group.replies:
            seen, start = 0, len(fed)
            for place, token_id in enumerate(reply.token_ids.tolist()):
                if reply.is_scored[place]:
                    position = end - 1 if place == 0 else start + place - 1
                    sides = [getattr(reply, f"{name}_logprobs") for name in SIDE_STREAMS]
                    given = [None if side is None else float(side[seen]) for side in sides]
                    logprob = float(reply.engine_logprobs[seen])
                    facts = [number, token_id, logprob, reply.advantage, reply.weight]
                    scored.append((position, *facts, *given))
                    seen += 1
                if place + 1 < len(reply.token_ids):
                    fed.append((token_id, len(group.prompt_ids) + place))
            number += 1
    scored.sort(key=lambda token: token[0])
    rows = sorted({token[0] for token in scored})
    return {
        "fed": fed,
        "rows": rows,
        "scored": [(rows.index(token[0]), *token[1:]) for token in scored],
    }


@settings(max_examples=300, deadline=None)
@given(groups=st.lists(packed_groups(), min_size=1, max_size=4))
def test_a_batch_is_what_a_loop_over_its_tokens_makes(groups: list[PackedGroup]) -> None:
    batch = PackedBatch.of_groups(groups, torch.device("cpu"))
    expected = lay_out(groups)
    assert (
        list(zip(batch.token_ids_N.tolist(), batch.position_ids_N.tolist(), strict=True)) == expected["fed"]
    )
    assert batch.scored_positions_U.tolist() == expected["rows"]
    unknown = [None] * len(expected["scored"])
    sides = [
        [None if value != value else value for value in batch.side_logprob_M[name].tolist()]
        if name in batch.side_logprob_M
        else unknown
        for name in SIDE_STREAMS
    ]
    columns = [
        batch.row_M.tolist(),
        batch.reply_M.tolist(),
        batch.target_M.tolist(),
        batch.engine_logprob_M.tolist(),
        batch.advantage_M.tolist(),
        batch.weight_M.tolist(),
        *sides,
    ]
    assert list(zip(*columns, strict=True)) == expected["scored"]
    assert batch.reply_M.dtype == np.int64
