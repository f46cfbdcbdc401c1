"""What tensors are, bit for bit: their digest, and where two sets of them differ in form.

Needs torch and nothing else, so that an engine's process with pins of its own can import it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import torch

_MAX_THREADS = 8


def tensors_digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Hash name, type, shape and hashed bytes of each tensor, in order of name. Returns 64 hex digits.

    SHA-256 throughout. Tensors are hashed side by side, since one core hashes 1 to 2 GB/s.
    """
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as threads:
        lines = threads.map(_describe, sorted(tensors, key=lambda pair: pair[0]))
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return type, shape and SHA-256 of one tensor, between slashes."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    content = hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()
    return f"{tensor.dtype}/{tuple(tensor.shape)}/{content}"


def digest_each(tensors: Iterable[tuple[str, torch.Tensor]], *, is_kept: bool = True) -> dict[str, str]:
    """Return the digest of each tensor by its name. No more than a few are held at once.

    Where it is not `is_kept` all are taken and none is hashed: of several ranks one does that work.
    """
    num_threads, left = min(_MAX_THREADS, os.cpu_count() or 1), iter(tensors)
    found: dict[str, str] = {}
    with ThreadPoolExecutor(num_threads) as threads:
        while batch := dict(islice(left, num_threads)):
            if is_kept:
                found |= zip(batch, threads.map(tensor_digest, batch.values()), strict=True)
    return found


def _describe(named: tuple[str, torch.Tensor]) -> str:
    return f"{named[0]}/{tensor_digest(named[1])}"


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
