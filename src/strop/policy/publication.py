"""Published weights: reads them from a file or a GPU, and computes their digests.

Needs no package but torch and safetensors, so that the process of an engine with other pins can import it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from strop.errors import WeightMismatch
from strop.policy.device_wires import DIGEST_PREFIX, SCHEMES, device_digest, receive_on_device

_MAX_THREADS = 8
"""Threads that hash."""


def read_published(source: Path | str, *, expected_digest: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file, or those that a sender offers at an address.

    Raises: WeightMismatch if they cannot be read, or have another digest.
    """
    if str(source).startswith(SCHEMES):
        tensors = receive_on_device(str(source))
    else:
        try:
            tensors = load_file(source)
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise _mismatch(f"published weights {source} cannot be read ({error})") from error
    is_on_device = expected_digest.startswith(DIGEST_PREFIX)
    actual = (device_digest if is_on_device else tensors_digest)(tensors.items())
    if actual != expected_digest:
        raise _mismatch(f"published weights {source} have digest {actual}, not {expected_digest}")
    return tensors


def unfit(source: Path | str, flaw: str) -> WeightMismatch:
    """Return the error for tensors that are not those of the model."""
    return _mismatch(f"published weights {source} do not fit the model: {flaw}")


def _mismatch(problem: str) -> WeightMismatch:
    return WeightMismatch(
        problem,
        allowed="exactly the tensors that the policy published",
        next_step="the engine keeps its old weights; start the run again to publish anew",
    )


def tensors_digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Hash name, type, shape and hashed bytes of each tensor, in order of name. Returns 64 hex digits.

    SHA-256 throughout. Tensors are hashed in parallel, since one core hashes 1 to 2 GB/s.
    """
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as threads:
        ordered = sorted(tensors, key=lambda pair: pair[0])
        lines = threads.map(lambda pair: f"{pair[0]}/{tensor_digest(pair[1])}", ordered)
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return type, shape and SHA-256 of one tensor, between slashes."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    content = hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()
    return f"{tensor.dtype}/{tuple(tensor.shape)}/{content}"


def digest_each(tensors: Iterable[tuple[str, torch.Tensor]], *, is_kept: bool = True) -> dict[str, str]:
    """Return the digest of each tensor by its name. Only a few tensors are held at once.

    Without `is_kept` the tensors are consumed and not hashed: of several ranks only one hashes.
    """
    num_threads, left = min(_MAX_THREADS, os.cpu_count() or 1), iter(tensors)
    digests: dict[str, str] = {}
    with ThreadPoolExecutor(num_threads) as threads:
        while batch := dict(islice(left, num_threads)):
            if is_kept:
                digests |= zip(batch, threads.map(tensor_digest, batch.values()), strict=True)
    return digests


def find_difference(own: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> str | None:
    """Describe the first tensor that is missing, unexpected, or of another type or shape."""
    for name in sorted(own.keys() | other.keys()):
        if name not in other:
            return f"{name} is missing"
        if name not in own:
            return f"{name} is unknown to the model"
        if own[name].shape != other[name].shape or own[name].dtype != other[name].dtype:
            return f"{name} is {other[name].dtype} {tuple(other[name].shape)}"
    return None
