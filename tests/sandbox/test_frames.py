"""What is no frame is refused, whichever side it comes from. Whole frames: `test_parts`."""

from __future__ import annotations

import pytest

from strop.errors import CorruptRecord
from strop.sandbox.frames import LENGTHS, MAX_HEADER_BYTES, pack, unpack


def test_a_header_that_is_too_large_is_neither_sent_nor_awaited() -> None:
    # {"text":"..."} has eleven bytes beside its text.
    longest = MAX_HEADER_BYTES - len('{"text":""}')
    assert len(pack({"text": "a" * longest})) == LENGTHS.size + MAX_HEADER_BYTES
    with pytest.raises(
        CorruptRecord,
        match=rf"a header of {MAX_HEADER_BYTES + 1} bytes, .* of {MAX_HEADER_BYTES} bytes at most",
    ):
        pack({"text": "a" * (longest + 1)})
    with pytest.raises(CorruptRecord, match="two processes exchanged a header of"):
        list(unpack(bytearray(b"Traceback (most recent call last):")))


def test_a_header_that_is_no_json_object_is_refused() -> None:
    with pytest.raises(CorruptRecord, match="a header that is a list"):
        list(unpack(bytearray(LENGTHS.pack(2, 0) + b"[]")))
    with pytest.raises(CorruptRecord, match=r"a header that is not JSON \(Expecting value"):
        list(unpack(bytearray(LENGTHS.pack(3, 0) + b"abc")))
