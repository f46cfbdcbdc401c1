"""A micro-batch's flat tensors are those of a plain loop over its tokens."""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.policy.language_model import spread_rows
from strop.policy.packing import (
    AUX_STREAMS,
    Load,
    PackedBatch,
    PackedGroup,
    PackedReply,
    cut_groups,
    split_by_budget,
)
from tests.policy.worlds import World


@st.composite
def packed_replies(draw: st.DrawFn) -> PackedReply:
    marks = draw(st.lists(st.booleans(), max_size=6))
    num_scored = sum(marks)

    def values() -> Any:
        return np.array(
            draw(st.lists(st.integers(-99, -1), min_size=num_scored, max_size=num_scored)), np.float32
        )

    streams = {f"{name}_logprobs": values() for name in AUX_STREAMS if draw(st.booleans())}
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
                    sides = [getattr(reply, f"{name}_logprobs") for name in AUX_STREAMS]
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
    return {"fed": fed, "rows": rows, "scored": [(rows.index(token[0]), *token[1:]) for token in scored]}


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
        for name in AUX_STREAMS
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


def test_what_is_fed_where_each_reply_is_a_row_with_its_prompt() -> None:
    """Prompt 5 with replies that feed 3, 0 and 7; prompt 2 with one that feeds nothing."""
    groups = [World(0).packed(5, [4, 1, 8]), World(1).packed(2, [1])]
    # Packed: 5 + 3 + 7 and 2. By itself: rows of 8 and 12, and the prompt of 2, all padded to 12.
    packed, alone = (reduce(Load.plus, groups, Load(is_alone=flag)).num_positions for flag in (False, True))
    assert (packed, alone) == (17, 36)
    cut = [
        [(len(group.prompt_ids), len(group.replies)) for group in batch]
        for batch in split_by_budget(groups, 24, is_alone=True)
    ]
    # The first group fills the budget alone, with its reply that feeds nothing.
    assert cut == [[(5, 3)], [(2, 1)]]
    assert [len(batch) for batch in split_by_budget(groups, 11, is_alone=True)] == [1, 1, 1]
    assert [len(part) for part in cut_groups(groups, 36, is_alone=True)] == [2]
    assert [len(part) for part in cut_groups(groups, 35, is_alone=True)] == [1, 1]


def test_rows_hold_what_the_packed_row_holds() -> None:
    batch = PackedBatch.of_groups(
        [World(0).packed(2, [3, 1, 2]), World(1).packed(3, [1])], torch.device("cpu")
    )
    source, place = spread_rows(batch.layout)
    # Prompts at 0-1 and 2-4; replies feed 5-6 and 7.
    assert source.tolist() == [[0, 1, 5, 6], [0, 1, 7, 0], [2, 3, 4, 0]]
    # A prompt is read in the first row of its group.
    assert place.tolist() == [0, 1, 8, 9, 10, 2, 3, 6]
    assert source.reshape(-1)[place].tolist() == list(range(8))
