"""One safetensors file of a whole model, to which each rank writes the rows that it keeps.

Nothing crosses between ranks but a few words, where gathering a model moves every weight. It needs one file
system under all ranks, which is tried out rather than guessed: each must find the file that the first made.

The format: https://huggingface.co/docs/safetensors, section Format.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from pathlib import Path

import torch
from safetensors.torch import load_file

from strop.io.atomic import explain_write_failure
from strop.policy.digest import tensors_digest
from strop.policy.ranks import Ranks, run_alike, run_on_first

_TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_LENGTH_BYTES = 8
"""Of the header's length, in front of it."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rows:
    """What a rank keeps of a tensor."""

    name: str
    part: torch.Tensor
    """A run of rows of it, in the type to be written; none of them on a rank that has no share."""
    first: int
    """Index of the first one."""
    shape: tuple[int, ...]
    """Of the whole tensor."""


def write_jointly(rows: Sequence[Rows], path: Path, ranks: Ranks) -> str | None:
    """Write a file that appears when it is whole. Returns the digest; None if not all ranks see one file.

    Every rank must call it, with the same tensors in the same order.
    Raises: StoreError, on every rank, if any could not write.
    """
    partial = path.with_suffix(".partial")
    header = _make_header(rows)
    run_on_first(ranks, lambda: _begin(partial, header, rows))
    try:
        if len(set(ranks.gather(_identify(partial)))) > 1:
            return None
        run_alike(ranks, lambda: _write_rows(partial, len(header), rows))
        return run_on_first(ranks, lambda: _finish(partial, path))
    finally:
        run_on_first(ranks, lambda: partial.unlink(missing_ok=True))


def _make_header(rows: Sequence[Rows]) -> bytes:
    fields = {}
    for one, start in zip(rows, _starts(rows), strict=True):
        fields[one.name] = {
            "dtype": _TYPES[one.part.dtype],
            "shape": one.shape,
            "data_offsets": [start, start + _num_bytes(one)],
        }
    text = json.dumps(fields).encode()
    # Readers map tensors into memory, where their first byte must be aligned.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _begin(partial: Path, header: bytes, rows: Sequence[Rows]) -> None:
    try:
        with partial.open("wb") as file:
            file.write(header)
            file.truncate(len(header) + sum(map(_num_bytes, rows)))
    except OSError as error:
        raise explain_write_failure(error, partial) from error


def _identify(partial: Path) -> tuple[int, ...] | None:
    """Return what tells a file from one of the same name on another machine; None if there is none."""
    try:
        found = partial.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _write_rows(partial: Path, begin: int, rows: Sequence[Rows]) -> None:
    try:
        with partial.open("r+b", buffering=0) as file:
            for one, start in zip(rows, _starts(rows), strict=True):
                content = one.part.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
                file.seek(begin + start + one.first * prod(one.shape[1:]) * one.part.element_size())
                while len(content):
                    content = content[file.write(content) :]
    except OSError as error:
        raise explain_write_failure(error, partial) from error


def _finish(partial: Path, path: Path) -> str:
    """Return the digest of what lies in the file, whoever wrote it."""
    try:
        digest = tensors_digest(load_file(partial).items())
        partial.replace(path)
    except OSError as error:
        raise explain_write_failure(error, path) from error
    return digest


def _starts(rows: Sequence[Rows]) -> list[int]:
    return list(accumulate(map(_num_bytes, rows), initial=0))[:-1]


def _num_bytes(one: Rows) -> int:
    return prod(one.shape) * one.part.element_size()
