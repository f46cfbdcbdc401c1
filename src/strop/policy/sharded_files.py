"""Files that all ranks write together: the weights for engines, and an optimizer's state.

`write_sharded_file` writes one safetensors file of a whole model, to which each rank writes the rows that it
keeps. Nothing crosses between ranks but a few words, where gathering a model moves every weight. It needs
one file system under all ranks, which is tried out rather than guessed: each must find the file that the
first made. The format: https://huggingface.co/docs/safetensors, section Format.

An optimizer's state is readable on any number of ranks. One process writes `optimizer.safetensors` with
whole tensors. Several write one file each, in the form of `torch.distributed.checkpoint`'s Hugging Face
storage: plain safetensors, with the place of every slice in their headers. Both are read through that
storage, each rank only the rows that it keeps.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import save

from strop.errors import CorruptRecord, StoreError
from strop.io.atomic import explain_write_failure
from strop.policy.publication import tensors_digest
from strop.policy.ranks import Ranks, TensorShard, run_alike, run_on_first

_TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_LENGTH_BYTES = 8
"""Of the header's length, in front of it."""


def write_sharded_file(shards: Sequence[TensorShard], path: Path, ranks: Ranks) -> str | None:
    """Write a file that appears when it is whole. Returns the digest; None if not all ranks see one file.

    Every rank must call it, with the same tensors in the same order.
    Raises: StoreError, on every rank, if any could not write.
    """
    partial = path.with_suffix(".partial")
    header = _make_header(shards)
    run_on_first(ranks, lambda: _begin(partial, header, shards))
    try:
        if len(set(ranks.gather(_identify(partial)))) > 1:
            return None
        run_alike(ranks, lambda: _write_shards(partial, len(header), shards))
        return run_on_first(ranks, lambda: _finish(partial, path))
    finally:
        run_on_first(ranks, lambda: partial.unlink(missing_ok=True))


def _make_header(shards: Sequence[TensorShard]) -> bytes:
    fields = {}
    for one, start in zip(shards, _starts(shards), strict=True):
        fields[one.name] = {
            "dtype": _TYPES[one.part.dtype],
            "shape": one.shape,
            "data_offsets": [start, start + _num_bytes(one)],
        }
    text = json.dumps(fields).encode()
    # Readers map tensors into memory, where their first byte must be aligned.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _begin(partial: Path, header: bytes, shards: Sequence[TensorShard]) -> None:
    try:
        with partial.open("wb") as file:
            file.write(header)
            file.truncate(len(header) + sum(map(_num_bytes, shards)))
    except OSError as error:
        raise explain_write_failure(error, partial) from error


def _identify(partial: Path) -> tuple[int, ...] | None:
    """Return what tells a file from one of the same name on another machine; None if there is none."""
    try:
        found = partial.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _write_shards(partial: Path, begin: int, shards: Sequence[TensorShard]) -> None:
    try:
        with partial.open("r+b", buffering=0) as file:
            for one, start in zip(shards, _starts(shards), strict=True):
                content = one.part.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
                file.seek(begin + start + one.first * prod(one.shape[1:]) * one.part.element_size())
                while len(content):
                    content = content[file.write(content) :]
    except OSError as error:
        raise explain_write_failure(error, partial) from error


def _finish(partial: Path, path: Path) -> str:
    """Move the file into place. Returns the digest of its content as read back."""
    try:
        digest = tensors_digest(load_file(partial).items())
        partial.replace(path)
    except OSError as error:
        raise explain_write_failure(error, path) from error
    return digest


def _starts(shards: Sequence[TensorShard]) -> list[int]:
    return list(accumulate(map(_num_bytes, shards), initial=0))[:-1]


def _num_bytes(one: TensorShard) -> int:
    return prod(one.shape) * one.part.element_size()


def save_tensors(ranks: Ranks, tensors: Mapping[str, torch.Tensor], target: Path) -> None:
    """Write tensors, or this rank's parts of them, into an existing directory.

    Raises: StoreError if a rank cannot write its file; OSError or SafetensorError in a single process.
    """
    if ranks.num_ranks == 1:
        # What one rank holds alone is whole.
        whole = (
            (name, one.full_tensor() if isinstance(one, torch.distributed.tensor.DTensor) else one)
            for name, one in tensors.items()
        )
        stored = {name: tensor.cpu().contiguous() for name, tensor in whole}
        save_file(stored, target / "optimizer.safetensors")
        return
    try:
        save(
            dict(tensors),
            storage_writer=HuggingFaceStorageWriter(str(target), save_distributed=True),
        )
    except CheckpointException as error:
        raise StoreError(
            f"the optimizer state could not be written to {target} ({error})",
            allowed="a directory that every rank can write to, with room for masters and moments",
            next_step="free disk space and start the run again; it resumes at its last checkpoint",
        ) from error


def load_tensors(ranks: Ranks, wanted: Mapping[str, torch.Tensor], source: Path) -> dict[str, int]:
    """Fill tensors, or this rank's parts of them, from a directory. Returns the counters stored there.

    Raises: CorruptRecord, on every rank, if a part is missing or does not fit on any.
    """
    return run_alike(ranks, lambda: _load(wanted, source))[0]


def _load(wanted: Mapping[str, torch.Tensor], source: Path) -> dict[str, int]:
    """Read what this rank needs. Raises: CorruptRecord."""
    try:
        stored = json.loads((source / "learner.json").read_text())
        counters = {name: int(stored[name]) for name in ("version", "num_steps")}
        if not any(source.glob("*.safetensors")):
            raise FileNotFoundError("optimizer.safetensors is missing")
        reader = HuggingFaceStorageReader(str(source))
        metadata = reader.read_metadata()
        for name, tensor in wanted.items():
            _require_fit(name, metadata.state_dict_metadata[name], tensor)
        # What `torch.distributed.checkpoint.load` does on each rank. It would synchronise with the other
        # ranks, although nothing is to be agreed on, and warns where there are none.
        planner = DefaultLoadPlanner()
        planner.set_up_planner(dict(wanted), metadata, is_coordinator=True)
        reader.set_up_storage_reader(metadata, is_coordinator=True)
        plan = reader.prepare_local_plan(planner.create_local_plan())
        reader.read_data(planner.finish_plan(plan), planner).wait()
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CorruptRecord(
            f"the optimizer state in {source} cannot be restored ({type(error).__name__}: {error})",
            allowed="masters and both moments of every parameter, as a checkpoint holds them",
            next_step="remove this checkpoint; the run then resumes from the one before",
        ) from error
    return counters


def _require_fit(name: str, stored: object, wanted: torch.Tensor) -> None:
    """Compare a stored tensor with the one wanted. Raises: ValueError naming the tensor."""
    assert isinstance(stored, TensorStorageMetadata)
    num_stored = sum(chunk.sizes.numel() for chunk in stored.chunks)
    dtype = stored.properties.dtype
    if stored.size != wanted.shape or dtype != wanted.dtype or num_stored != wanted.numel():
        key, _, parameter = name.partition("/")
        raise ValueError(f"{key} of {parameter} is {dtype} {tuple(stored.size)}, {num_stored} values")
