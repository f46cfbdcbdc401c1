"""The learner's wire: what is read is what was written, at 9 bytes per token, and damage is refused."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.errors import UnfitRecord
from strop.policy.batch_wire import AUX_STREAMS, MAGIC, OTHER_PROMPTS, decode_groups, encode_groups
from strop.policy.packing import PackedGroup, PackedReply
from tests.policy.worlds import World

ids = st.lists(st.integers(0, 2**31 - 1), max_size=9).map(lambda values: np.array(values, np.int32))
# NaN too: the mark of a token that nobody sampled.
nats = st.floats(width=32, allow_infinity=False)


@st.composite
def packed_replies(draw: st.DrawFn) -> PackedReply:
    token_ids = draw(ids)
    is_scored = np.array(
        draw(st.lists(st.booleans(), min_size=len(token_ids), max_size=len(token_ids))), bool
    )
    num_scored = int(is_scored.sum())

    def values() -> Any:
        return np.array(draw(st.lists(nats, min_size=num_scored, max_size=num_scored)), np.float32)

    streams = {name: values() for name in AUX_STREAMS if draw(st.booleans())}
    return PackedReply(
        token_ids=token_ids,
        is_scored=is_scored,
        engine_logprobs=values(),
        advantage=draw(st.floats(allow_nan=False)),
        weight=draw(st.floats(allow_nan=False)),
        **streams,
    )


@st.composite
def packed_groups(draw: st.DrawFn) -> PackedGroup:
    prompts = {name: draw(ids) for name in OTHER_PROMPTS if draw(st.booleans())}
    replies = tuple(draw(st.lists(packed_replies(), max_size=4)))
    return PackedGroup(prompt_ids=draw(ids), replies=replies, **prompts)


def bits(groups: Any) -> list[Any]:
    """List everything that a batch holds, floats as their bits."""

    def one(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return value.dtype.str, value.tobytes()
        return struct.pack("<d", value) if isinstance(value, float) else value

    return [
        [one(group.prompt_ids), *(one(getattr(group, name)) for name in OTHER_PROMPTS)]
        + [[one(getattr(reply, name)) for name in PackedReply.__slots__] for reply in group.replies]
        for group in groups
    ]


@settings(max_examples=150, deadline=None)
@given(groups=st.lists(packed_groups(), max_size=5))
def test_what_is_read_is_what_was_written(groups: list[PackedGroup]) -> None:
    assert bits(decode_groups(encode_groups(groups))) == bits(groups)


@settings(max_examples=100, deadline=None)
@given(groups=st.lists(packed_groups(), min_size=1, max_size=3), data=st.data())
def test_a_flipped_bit_anywhere_is_refused(groups: list[PackedGroup], data: st.DataObject) -> None:
    message = bytearray(encode_groups(groups))
    place = data.draw(st.integers(0, 8 * len(message) - 1))
    message[place // 8] ^= 1 << place % 8
    with pytest.raises(UnfitRecord, match="a batch for the learner cannot be read"):
        decode_groups(bytes(message))


@settings(max_examples=50, deadline=None)
@given(groups=st.lists(packed_groups(), min_size=1, max_size=3), data=st.data())
def test_a_message_cut_short_is_refused(groups: list[PackedGroup], data: st.DataObject) -> None:
    message = encode_groups(groups)
    with pytest.raises(UnfitRecord, match="a batch for the learner cannot be read"):
        decode_groups(message[: data.draw(st.integers(0, len(message) - 1))])


def seal(content: bytes) -> bytes:
    """Give a message that nobody wrote a checksum that fits."""
    return MAGIC + struct.pack("<I", zlib.crc32(content)) + content


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (struct.pack("<I", 7), "its table of columns is wrong"),
        (struct.pack("<I24s4sI", 1, b"a", b"<i8", 0), "its table of columns is wrong"),
        (struct.pack("<I24s4sI", 1, b"a", b"<i4", 99), "its table of columns is wrong"),
        (struct.pack("<I24s4sI", 1, b"a", b"<i4", 0), "its columns do not fit together"),
    ],
)
def test_a_sound_checksum_does_not_make_a_batch(content: bytes, words: str) -> None:
    with pytest.raises(UnfitRecord, match=words):
        decode_groups(seal(content + bytes(8)))


def test_another_format_is_refused_by_its_first_bytes() -> None:
    with pytest.raises(UnfitRecord, match=r"it begins with b'PAR1'"):
        decode_groups(b"PAR1")


def test_plain_grpo_takes_nine_bytes_per_token() -> None:
    groups = [World(seed).packed(100, [200, 150, 250, 300]) for seed in range(16)]
    num_tokens = 16 * (100 + 900)
    # 16 * (100 * 4 + 900 * 9) = 136,000; lengths and scalars: 16 * (4 + 4) + 64 * (4 + 8 + 8) = 1,408;
    # the table has 9 columns of 32 bytes and a header of 16, and columns end at multiples of 8.
    assert 136_000 + 1_408 + 304 <= len(encode_groups(groups)) <= 136_000 + 1_408 + 304 + 9 * 8
    assert len(encode_groups(groups)) / num_tokens < 9.0


def test_arrays_are_views_of_the_message_and_cannot_be_written() -> None:
    message = np.frombuffer(encode_groups([World().packed(3, [4])]), np.uint8)
    (group,) = decode_groups(message.data)
    for array in (group.prompt_ids, group.replies[0].token_ids, group.replies[0].engine_logprobs):
        assert np.shares_memory(array, message)
        assert not array.flags.writeable
