"""What tensors are, bit for bit: their digest, and where two sets of them differ in form.

Needs torch and nothing else, so that an engine's process with pins of its own can import it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch


def tensors_digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Hash names, types, shapes and bytes of tensors, in order of name. Returns 64 hex digits."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors, key=lambda pair: pair[0]):
        digest.update(f"{name}/{tensor.dtype}/{tuple(tensor.shape)}".encode())
        flat = tensor.detach().cpu().contiguous().view(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def find_difference(own: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> str | None:
    """Name the first tensor that is missing, left over, or of another type or shape."""
    for name in sorted(own.keys() | other.keys()):
        if name not in other:
            return f"{name} is missing"
        if name not in own:
            return f"{name} is unknown to the model"
        if own[name].shape != other[name].shape or own[name].dtype != other[name].dtype:
            return f"{name} is {other[name].dtype} {tuple(other[name].shape)}"
    return None
