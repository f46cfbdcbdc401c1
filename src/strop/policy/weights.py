"""Weights as bytes: digests, publication to engines, export as a Hugging Face directory."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers.utils import logging as transformers_logging

from strop.errors import StoreError, WeightMismatch, explain_refusal
from strop.policy.language_model import LanguageModel
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


def tensors_digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Hash names, types, shapes and bytes of tensors, in order of name. Returns 64 hex digits."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors, key=lambda pair: pair[0]):
        digest.update(f"{name}/{tensor.dtype}/{tuple(tensor.shape)}".encode())
        flat = tensor.detach().cpu().contiguous().view(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def weights_digest(model: LanguageModel) -> str:
    """Hash the compute copies of a model."""
    return tensors_digest(model.named_parameters())


def publish_weights(model: LanguageModel, path: Path) -> str:
    """Write the compute copies to one safetensors file, in the policy's own type. Returns the digest."""
    tensors = {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}
    partial = path.with_suffix(".partial")
    try:
        save_file(tensors, partial)
        partial.replace(path)
    except (OSError, SafetensorError) as error:
        partial.unlink(missing_ok=True)
        raise StoreError(
            explain_refusal(
                f"the weights could not be written to {path} ({error})",
                allowed="a writable directory with room for one copy of the weights",
                next_step="free disk space and start the run again; it resumes at its last checkpoint",
            )
        ) from error
    return tensors_digest(tensors.items())


def load_published(model: LanguageModel, path: Path, *, expected_digest: str) -> None:
    """Replace a model's compute copies by published ones, all of them or none.

    Raises: WeightMismatch if the file cannot be read, has another digest, or does not hold exactly
    the model's tensors in the model's types and shapes.
    """
    try:
        tensors = load_file(path)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise _mismatch(f"published weights {path} cannot be read ({error})") from error
    actual_digest = tensors_digest(tensors.items())
    if actual_digest != expected_digest:
        raise _mismatch(f"published weights {path} have digest {actual_digest}, not {expected_digest}")
    flaw = _find_difference(dict(model.named_parameters()), tensors)
    if flaw is not None:
        raise _mismatch(f"published weights {path} do not fit the model: {flaw}")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[name])


def _find_difference(own: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> str | None:
    """Name the first tensor that is missing, left over, or of another type or shape."""
    for name in sorted(own.keys() | other.keys()):
        if name not in other:
            return f"{name} is missing"
        if name not in own:
            return f"{name} is unknown to the model"
        if own[name].shape != other[name].shape or own[name].dtype != other[name].dtype:
            return f"{name} is {other[name].dtype} {tuple(other[name].shape)}"
    return None


def _mismatch(given: str) -> WeightMismatch:
    return WeightMismatch(
        explain_refusal(
            given,
            allowed="exactly the tensors that the policy published",
            next_step="the engine keeps its old weights; start the run again to publish anew",
        )
    )


def export_model(model: LanguageModel, tokenizer_dir: Path, target: Path) -> None:
    """Write a Hugging Face model directory that transformers and vLLM load as it stands.

    The exported tensors are the compute copies. The files are read back and compared, so that an
    export which is not the live policy, or ends elsewhere, never counts as one.

    Raises: StoreError if what was written is not what the policy holds.
    """
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model.module.save_pretrained(target)
    for name in _COPIED_FILES:
        if (tokenizer_dir / name).exists():
            shutil.copyfile(tokenizer_dir / name, target / name)
    flaw = _find_export_flaw(model, tokenizer_dir, target)
    if flaw is not None:
        raise StoreError(
            explain_refusal(
                f"the export {target} is not the live policy: {flaw}",
                allowed="files that hold exactly the policy's tensors",
                next_step="check the disk; the previous checkpoint is intact",
            )
        )


def _find_export_flaw(model: LanguageModel, tokenizer_dir: Path, target: Path) -> str | None:
    """Read an export back and name the first thing in which it is not the live policy."""
    try:
        stored: dict[str, torch.Tensor] = {}
        for shard in _listed_shards(target):
            stored |= load_file(target / shard)
        exported, own = Tokenizer.load(target), Tokenizer.load(tokenizer_dir)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        return f"it cannot be read back ({type(error).__name__}: {error})"
    live = {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}
    flaw = _find_difference(live, {name: tensor for name, tensor in stored.items() if name in live})
    if flaw is not None:
        return flaw
    changed = next((name for name in live if not torch.equal(live[name], stored[name])), None)
    if changed is not None:
        return f"{changed} has other values"
    if exported.stop_token_ids != own.stop_token_ids:
        return f"it stops at {sorted(exported.stop_token_ids)}, not at {sorted(own.stop_token_ids)}"
    return None


def _listed_shards(target: Path) -> list[str]:
    """Name the files that a loader would read: those of the index where there is one."""
    index = target / "model.safetensors.index.json"
    if not index.exists():
        return ["model.safetensors"]
    return sorted(set(json.loads(index.read_text())["weight_map"].values()))
