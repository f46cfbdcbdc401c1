"""Weights as bytes: digests, publication to engines, export as a Hugging Face directory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from transformers.utils import logging as transformers_logging

from strop.errors import StoreError
from strop.policy.language_model import LanguageModel, load_module
from strop.policy.lora import find_merge_flaw, merge_adapters
from strop.policy.publication import digest_each, find_difference, read_published, tensors_digest, unfit
from strop.tokenizer import Tokenizer

# Besides the tokenizer's: the stop settings, verbatim, so that the export ends where the policy did.
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
    """Return a model's tensors without adapters: what those say is added to the weights.

    Raises: StoreError if the merged weights do not say what the live model says.
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
    """Write tensors to one safetensors file that appears when it is whole. Returns the digest.

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

    Stored values are brought to the type that the live tensor has. What a family stores under other names, or
    in other pieces, is loaded once more and compared as it then is.
    Raises: OSError or SafetensorError if a file cannot be read; ConfigError if it does not fill the model.
    """
    stored: dict[str, str] = {}
    for shard in _listed_shards(path):
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
    """Write a Hugging Face model directory of given weights for a transformers module. Returns their digest.

    The exported tensors are the compute copies. The files are read back and compared, so that an
    export which is not the live policy, or ends elsewhere, never counts as one.

    Raises: StoreError if what was written is not what the policy holds.
    """
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    module.save_pretrained(target, state_dict=dict(live) | _stored_buffers(module))
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
    """Read an export back and name the first thing in which it is not the live policy."""
    try:
        stored: dict[str, torch.Tensor] = {}
        for shard in _listed_shards(target):
            stored |= load_file(target / shard)
        if not live.keys() <= stored.keys():
            # Families with experts are stored under other names than they are computed with.
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


def _stored_buffers(module: Any) -> dict[str, torch.Tensor]:
    """Return what belongs to a model's files and is never trained, as the balance of experts."""
    stored = module.state_dict().keys()
    return {name: buffer.cpu() for name, buffer in module.named_buffers() if name in stored}


def _listed_shards(target: Path) -> list[str]:
    """Name the files that a loader would read: those of the index where there is one."""
    index = target / "model.safetensors.index.json"
    if not index.exists():
        return ["model.safetensors"]
    return sorted(set(json.loads(index.read_text())["weight_map"].values()))
