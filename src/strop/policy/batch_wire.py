"""The wire format of packed groups for a learner's ranks: columns, read without copying.

A token of a reply takes 4 bytes for its id, 1 for its mark and, if it is scored, 4 for its log-probability
and for each further stream: 9 bytes in plain GRPO. A prompt is sent once for its group, as ids alone. Values
of a reply or a group are columns too, never repeated for its tokens.

Layout, little-endian: magic, CRC-32 of the rest, number of columns; for each column its name, type
and length; then the columns, each at a multiple of 8 bytes. Decoded arrays are read-only views of them.

Shapes: P groups, S replies, T tokens of replies, M scored tokens.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strop.errors import UnfitRecord
from strop.policy.packing import PackedGroup, PackedReply

MAGIC = b"stropB01"
_HEADER = struct.Struct("<8sII")
_COLUMN = struct.Struct("<24s4sI")
_ALIGNMENT_BYTES = 8
_TYPES = ("<i4", "<f4", "<f8", "|u1")
_ABSENT = -1
"""Length of an array that is None."""

AUX_STREAMS = tuple(field.name for field in fields(PackedReply) if field.default is None)
"""Values of scored tokens that a reply may have beside the engine's."""
OTHER_PROMPTS = tuple(field.name for field in fields(PackedGroup) if field.default is None)
"""Further prompts that a group may have."""

Columns = dict[str, NDArray[Any]]


def encode_groups(groups: Sequence[PackedGroup]) -> bytes:
    """Encode groups. Every bit of the values is kept, and the order of groups and replies."""
    replies = [reply for group in groups for reply in group.replies]
    columns: Columns = {
        "num_replies_P": np.array([len(group.replies) for group in groups], "<i4"),
        **_write_ragged("prompt_ids", [group.prompt_ids for group in groups], "<i4"),
        **_write_ragged("token_ids", [reply.token_ids for reply in replies], "<i4"),
        "marks_T": _join([reply.is_scored.view(np.uint8) for reply in replies], "|u1"),
        "engine_logprobs_M": _join([reply.engine_logprobs for reply in replies], "<f4"),
        "advantage_S": np.array([reply.advantage for reply in replies], "<f8"),
        "weight_S": np.array([reply.weight for reply in replies], "<f8"),
    }
    for name in OTHER_PROMPTS:
        columns |= _write_ragged(name, [getattr(group, name) for group in groups], "<i4")
    for name in AUX_STREAMS:
        columns |= _write_ragged(name, [getattr(reply, name) for reply in replies], "<f4")
    table = b"".join(
        _COLUMN.pack(name.encode(), column.dtype.str.encode(), len(column))
        for name, column in columns.items()
    )
    start = _HEADER.size + len(table)
    parts: list[Any] = [struct.pack("<I", len(columns)), table, bytes(-start % _ALIGNMENT_BYTES)]
    for column in columns.values():
        # A view: the only copy of a step's tokens is the one into the message.
        body = column.view(np.uint8)
        parts += [body, bytes(-len(body) % _ALIGNMENT_BYTES)]
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return b"".join([MAGIC, struct.pack("<I", checksum), *parts])


def decode_groups(data: bytes | memoryview) -> tuple[PackedGroup, ...]:
    """Decode the bytes of `encode_groups`. The arrays are views of `data`, which they keep alive.

    Raises: UnfitRecord if a single bit is damaged, or another version encoded it.
    """
    columns = _read_columns(data)
    try:
        token_ids = _require_all(_read_ragged(columns, "token_ids"))
        edges = np.concatenate(([0], np.cumsum([len(ids) for ids in token_ids]))).astype(np.int64)
        marks_T = columns["marks_T"]
        num_scored = np.concatenate(([0], np.cumsum(marks_T, dtype=np.int64)))[edges]
        if len(marks_T) != edges[-1] or (len(marks_T) and marks_T.max() > 1):
            raise ValueError(f"{len(marks_T)} marks of {edges[-1]} tokens")
        streams = {name: _read_ragged(columns, name) for name in AUX_STREAMS}
        replies = [
            PackedReply(
                token_ids=ids,
                is_scored=marks_T[edges[index] : edges[index + 1]].view(np.bool_),
                engine_logprobs=columns["engine_logprobs_M"][num_scored[index] : num_scored[index + 1]],
                advantage=float(columns["advantage_S"][index]),
                weight=float(columns["weight_S"][index]),
                **{name: values[index] for name, values in streams.items()},
            )
            for index, ids in enumerate(token_ids)
        ]
        others = {name: _read_ragged(columns, name) for name in OTHER_PROMPTS}
        ends = np.cumsum(columns["num_replies_P"]).tolist()
        if (ends[-1] if ends else 0) != len(replies):
            raise ValueError(f"{len(replies)} replies")
        return tuple(
            PackedGroup(
                prompt_ids=prompt_ids,
                replies=tuple(replies[end - num : end]),
                **{name: values[index] for name, values in others.items()},
            )
            for index, (prompt_ids, num, end) in enumerate(
                zip(
                    _require_all(_read_ragged(columns, "prompt_ids")),
                    columns["num_replies_P"].tolist(),
                    ends,
                    strict=True,
                )
            )
        )
    except (KeyError, IndexError, ValueError) as error:
        raise _unreadable(f"its columns do not fit together ({error!r})") from error


def _join(parts: Sequence[NDArray[Any]], dtype: str) -> NDArray[Any]:
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros(0, dtype)


def _write_ragged(name: str, parts: Sequence[NDArray[Any] | None], dtype: str) -> Columns:
    """Return arrays of different lengths as one column of values and one of lengths; none if all are None."""
    present = [part for part in parts if part is not None]
    if parts and not present:
        return {}
    lengths = [_ABSENT if part is None else len(part) for part in parts]
    return {f"{name}.len": np.array(lengths, "<i4"), name: _join(present, dtype)}


def _read_ragged(columns: Columns, name: str) -> list[NDArray[Any] | None]:
    """Return the arrays of `_write_ragged`."""
    if name not in columns and name in AUX_STREAMS + OTHER_PROMPTS:
        count = len(columns["advantage_S" if name in AUX_STREAMS else "num_replies_P"])
        return [None] * count
    values, lengths = columns[name], columns[f"{name}.len"]
    ends = np.cumsum(np.maximum(lengths, 0), dtype=np.int64).tolist()
    if (ends[-1] if ends else 0) != len(values):
        raise ValueError(f"{len(values)} values of {name}")
    return [
        None if length == _ABSENT else values[end - length : end]
        for end, length in zip(ends, lengths.tolist(), strict=True)
    ]


def _require_all(arrays: Sequence[NDArray[Any] | None]) -> list[NDArray[Any]]:
    present = [array for array in arrays if array is not None]
    if len(present) != len(arrays):
        raise ValueError("ids are absent")
    return present


def _read_columns(data: bytes | memoryview) -> Columns:
    view = memoryview(data)
    if len(view) < _HEADER.size or bytes(view[: len(MAGIC)]) != MAGIC:
        raise _unreadable(f"it begins with {bytes(view[: len(MAGIC)])!r}")
    _, checksum, num_columns = _HEADER.unpack_from(view)
    actual = zlib.crc32(view[_HEADER.size - 4 :])
    if actual != checksum:
        raise _unreadable(f"its checksum is {actual:08x} and not {checksum:08x}")
    columns: Columns = {}
    start = _HEADER.size + num_columns * _COLUMN.size
    try:
        for index in range(num_columns):
            name, kind, length = _COLUMN.unpack_from(view, _HEADER.size + index * _COLUMN.size)
            start += -start % _ALIGNMENT_BYTES
            dtype = np.dtype(_TYPES[_TYPES.index(kind.rstrip(b"\0").decode())])
            columns[name.rstrip(b"\0").decode()] = np.frombuffer(view, dtype, length, start)
            start += length * dtype.itemsize
    except (struct.error, ValueError) as error:
        raise _unreadable(f"its table of columns is wrong ({error})") from error
    return columns


def _unreadable(flaw: str) -> UnfitRecord:
    return UnfitRecord(
        f"a batch for the learner cannot be read: {flaw}. The loop and all ranks must run the same version"
        " of strop; nothing was trained on it."
    )
