"""An optimizer's tensors on disk: safetensors files, readable on any number of ranks.

One process writes `optimizer.safetensors` with whole tensors. Several write one file each, in the form
of `torch.distributed.checkpoint`'s Hugging Face storage: plain safetensors, with the place of every
slice in their headers. Both are read through that storage, each rank only the rows that it keeps.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import save

from strop.errors import CorruptRecord, StoreError, explain_refusal
from strop.policy.ranks import Ranks, run_alike


def save_tensors(ranks: Ranks, tensors: Mapping[str, torch.Tensor], target: Path) -> None:
    """Write tensors, or this rank's parts of them, into an existing directory.

    Raises: StoreError if a rank cannot write its file; OSError or SafetensorError in a single process.
    """
    if ranks.num_ranks == 1:
        stored = {name: _whole(tensor).cpu().contiguous() for name, tensor in tensors.items()}
        save_file(stored, target / "optimizer.safetensors")
        return
    try:
        save(
            dict(tensors),
            storage_writer=HuggingFaceStorageWriter(str(target), save_distributed=True),
        )
    except CheckpointException as error:
        raise StoreError(
            explain_refusal(
                f"the optimizer state could not be written to {target} ({error})",
                allowed="a directory that every rank can write to, with room for masters and moments",
                next_step="free disk space and start the run again; it resumes at its last checkpoint",
            )
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
        # What `torch.distributed.checkpoint.load` does on each rank. It would meet the other ranks on the
        # way, although nothing is to be agreed on, and warns where there are none.
        planner = DefaultLoadPlanner()
        planner.set_up_planner(dict(wanted), metadata, is_coordinator=True)
        reader.set_up_storage_reader(metadata, is_coordinator=True)
        plan = reader.prepare_local_plan(planner.create_local_plan())
        reader.read_data(planner.finish_plan(plan), planner).wait()
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CorruptRecord(
            explain_refusal(
                f"the optimizer state in {source} cannot be restored ({type(error).__name__}: {error})",
                allowed="masters and both moments of every parameter, as a checkpoint holds them",
                next_step="remove this checkpoint; the run then resumes from the one before",
            )
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


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that one rank holds alone as a plain one."""
    return tensor.full_tensor() if isinstance(tensor, torch.distributed.tensor.DTensor) else tensor
