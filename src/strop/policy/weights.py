"""Weights as files: publication to engines, export as a Hugging Face directory, and files of many ranks.

`write_sharded_file` writes one safetensors file of a whole model, to which each rank writes its rows. Only a
few words cross between ranks, where gathering a model moves every weight. All ranks must share a file system,
which is tested: each must see the file that the first created. The format:
https://huggingface.co/docs/safetensors, section Format.

The state of an optimizer is readable on any number of ranks. One process writes `optimizer.safetensors` with
whole tensors. Several write one file each, in the format of `torch.distributed.checkpoint`'s Hugging Face
storage: plain safetensors, with the place of every slice in their headers. Both are read through that
storage, each rank only its rows.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import save
from transformers.utils import logging as transformers_logging

from strop.errors import CorruptRecord, StoreError
from strop.io.atomic import explain_write_failure
from strop.policy.language_model import LanguageModel, load_module
from strop.policy.lora import find_merge_flaw, merge_adapters
from strop.policy.optimizer import Ranks, TensorShard, run_alike, run_on_first
from strop.policy.publication import digest_each, find_difference, read_published, tensors_digest, unfit
from strop.tokenizer import Tokenizer

# The tokenizer's files, and the stop settings, so that the export ends replies where the policy did.
_COPIED_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)


def weights_digest(model: LanguageModel) -> str:
    """Hash the compute copies of a model, adapters merged."""
    return tensors_digest(own_tensors(model).items())


def merged_tensors(model: LanguageModel, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a model's tensors with the adapters merged into the weights.

    Raises: StoreError if the merged weights do not reproduce the live model.
    """
    if model.adapters is None or not tensors:
        return dict(tensors)
    merged = merge_adapters(tensors, model.adapters)
    flaw = find_merge_flaw(model.module, tensors, merged)
    if flaw is not None:
        raise StoreError(f"the merged weights are not the live policy: {flaw}")
    return merged


def own_tensors(model: LanguageModel) -> dict[str, torch.Tensor]:
    """Return the compute copies of a model by name, on the CPU, adapters merged."""
    copies = {name: copy.detach().cpu() for name, copy in model.named_parameters()}
    return merged_tensors(model, copies)


def publish_tensors(tensors: Mapping[str, torch.Tensor], path: Path) -> str:
    """Write tensors to one safetensors file, atomically. Returns the digest.

    Raises: StoreError if it cannot be written.
    """
    partial = path.with_suffix(".partial")
    try:
        save_file(dict(tensors), partial)
        partial.replace(path)
    except (OSError, SafetensorError) as error:
        partial.unlink(missing_ok=True)
        raise StoreError(
            f"the weights could not be written to {path} ({error})",
            allowed="a writable directory with room for one copy of the weights",
            next_step="free disk space and start the run again; it resumes at its last checkpoint",
        ) from error
    return tensors_digest(tensors.items())


def load_published(model: LanguageModel, source: Path | str, *, expected_digest: str) -> None:
    """Replace a model's compute copies by published ones, all of them or none.

    Raises: WeightMismatch if the source cannot be read, has another digest, or does not hold exactly
    the model's tensors in the model's types and shapes.
    """
    tensors = read_published(source, expected_digest=expected_digest)
    flaw = find_difference(dict(model.named_parameters()), tensors)
    if flaw is not None:
        raise unfit(source, flaw)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[name])


def find_strange(live: Mapping[str, str], path: Path) -> list[str]:
    """Return the names of tensors that are not those of a model directory; `live` are digests by name.

    Stored values are converted to the type of the live tensor. Tensors that a family stores under other
    names, or in other pieces, are compared after loading the model once more. Raises: OSError or
    SafetensorError if a file cannot be read; ConfigError if it does not fill the model.
    """
    stored: dict[str, str] = {}
    for shard in listed_shards(path):
        with safe_open(path / shard, framework="pt") as file:
            names = [name for name in file.keys() if name in live]  # noqa: SIM118  (no mapping)
            stored |= digest_each((name, file.get_tensor(name).to(_type_of(live[name]))) for name in names)
    if missing := live.keys() - stored.keys():
        dtype = _type_of(live[min(missing)])
        again = load_module(path, dtype)
        others = ((name, tensor) for name, tensor in again.named_parameters() if name in missing)
        stored |= digest_each((name, tensor.to(_type_of(live[name]))) for name, tensor in others)
    return sorted(name for name, digest in live.items() if stored.get(name) != digest)


def _type_of(digest: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, digest.partition("/")[0].removeprefix("torch."))
    return dtype


def export_tensors(module: Any, live: Mapping[str, torch.Tensor], tokenizer_dir: Path, target: Path) -> str:
    """Write a Hugging Face model directory of `live` weights for a transformers module. Returns their digest.

    The exported tensors are the compute copies. The files are read back and compared, so that an export with
    other weights or other stops than the live policy is refused.

    Raises: StoreError if the files are not those of the live policy.
    """
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    # Buffers, such as the balance of experts, belong to a model's files and are never trained.
    stored = module.state_dict().keys()
    buffers = {name: buffer.cpu() for name, buffer in module.named_buffers() if name in stored}
    module.save_pretrained(target, state_dict=dict(live) | buffers)
    for name in _COPIED_FILES:
        if (tokenizer_dir / name).exists():
            shutil.copyfile(tokenizer_dir / name, target / name)
    flaw = _find_export_flaw(live, tokenizer_dir, target)
    if flaw is not None:
        raise StoreError(
            f"the export {target} is not the live policy: {flaw}",
            allowed="files that hold exactly the policy's tensors",
            next_step="check the disk; the previous checkpoint is intact",
        )
    return tensors_digest(live.items())


def _find_export_flaw(live: Mapping[str, torch.Tensor], tokenizer_dir: Path, target: Path) -> str | None:
    """Read an export back and describe the first difference to the live policy."""
    try:
        stored: dict[str, torch.Tensor] = {}
        for shard in listed_shards(target):
            stored |= load_file(target / shard)
        if not live.keys() <= stored.keys():
            # Files of families with experts have other tensor names than the module.
            stored = dict(load_module(target, "auto").named_parameters())
        exported, own = Tokenizer.load(target), Tokenizer.load(tokenizer_dir)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        return f"it cannot be read back ({type(error).__name__}: {error})"
    flaw = find_difference(live, {name: tensor for name, tensor in stored.items() if name in live})
    if flaw is not None:
        return flaw
    changed = next((name for name in live if not torch.equal(live[name], stored[name])), None)
    if changed is not None:
        return f"{changed} has other values"
    if exported.stop_token_ids != own.stop_token_ids:
        return f"it stops at {sorted(exported.stop_token_ids)}, not at {sorted(own.stop_token_ids)}"
    return None


def listed_shards(target: Path) -> list[str]:
    """Return the names of the files that a loader would read: those of the index if there is one."""
    index = target / "model.safetensors.index.json"
    if not index.exists():
        return ["model.safetensors"]
    return sorted(set(json.loads(index.read_text())["weight_map"].values()))


def read_names(path: Path) -> list[str]:
    """Return the names of the tensors in a safetensors file."""
    with safe_open(path, framework="pt") as file:
        return list(file.keys())


_TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_LENGTH_BYTES = 8
"""Bytes of the header's length, which precedes it."""


def write_sharded_file(shards: Sequence[TensorShard], path: Path, ranks: Ranks) -> str | None:
    """Write a file, atomically. Returns the digest; None if the ranks do not share a file system.

    Every rank must call it, with the same tensors in the same order.
    Raises: StoreError, on every rank, if any could not write.
    """
    partial = path.with_suffix(".partial")
    fields = {}
    for shard, start in zip(shards, _starts(shards), strict=True):
        fields[shard.name] = {
            "dtype": _TYPES[shard.part.dtype],
            "shape": shard.shape,
            "data_offsets": [start, start + _num_bytes(shard)],
        }
    text = json.dumps(fields).encode()
    # Readers map tensors into memory, where their first byte must be aligned.
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    run_on_first(ranks, lambda: _begin(partial, header, shards))
    try:
        if len(set(ranks.gather(_identify(partial)))) > 1:
            return None
        run_alike(ranks, lambda: _write_shards(partial, len(header), shards))
        return run_on_first(ranks, lambda: _finish(partial, path))
    finally:
        run_on_first(ranks, lambda: partial.unlink(missing_ok=True))


def _begin(partial: Path, header: bytes, shards: Sequence[TensorShard]) -> None:
    try:
        with partial.open("wb") as file:
            file.write(header)
            file.truncate(len(header) + sum(map(_num_bytes, shards)))
    except OSError as error:
        raise explain_write_failure(error, partial) from error


def _identify(partial: Path) -> tuple[int, ...] | None:
    """Return facts that differ from a file of the same name on another machine; None if there is no file."""
    try:
        facts = partial.stat()
    except OSError:
        return None
    return facts.st_ino, facts.st_mtime_ns, facts.st_size


def _write_shards(partial: Path, begin: int, shards: Sequence[TensorShard]) -> None:
    try:
        with partial.open("r+b", buffering=0) as file:
            for shard, start in zip(shards, _starts(shards), strict=True):
                content = shard.part.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
                file.seek(begin + start + shard.first * prod(shard.shape[1:]) * shard.part.element_size())
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


def _num_bytes(shard: TensorShard) -> int:
    return prod(shard.shape) * shard.part.element_size()


def save_tensors(ranks: Ranks, tensors: Mapping[str, torch.Tensor], target: Path) -> None:
    """Write tensors, or this rank's parts of them, into an existing directory.

    Raises: StoreError if a rank cannot write its file; OSError or SafetensorError in a single process.
    """
    if ranks.num_ranks == 1:
        whole = (
            (name, tensor.full_tensor() if isinstance(tensor, torch.distributed.tensor.DTensor) else tensor)
            for name, tensor in tensors.items()
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
    """Read this rank's rows. Raises: CorruptRecord."""
    try:
        stored = json.loads((source / "learner.json").read_text())
        counters = {name: int(stored[name]) for name in ("version", "num_steps")}
        if not any(source.glob("*.safetensors")):
            raise FileNotFoundError("optimizer.safetensors is missing")
        reader = HuggingFaceStorageReader(str(source))
        metadata = reader.read_metadata()
        for name, tensor in wanted.items():
            _require_fit(name, metadata.state_dict_metadata[name], tensor)
        # The steps of `torch.distributed.checkpoint.load` on each rank. It would synchronise with the other
        # ranks without need, and warns where there are none.
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
