"""Published weights: reading them wherever they lie, and their digests.

Needs no package but torch and safetensors, so that an engine's process with pins of its own can import it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from strop.errors import StoreError, WeightMismatch
from strop.hardware.leftovers import SHARED_MEMORY
from strop.policy.broadcast import receive_tensors

_MAX_THREADS = 8
"""Of hashing."""


def read_published(source: Path | str, *, expected_digest: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file, or those that come from a `tcp://` address.

    Raises: WeightMismatch if they cannot be read, or have another digest.
    """
    if str(source).startswith("tcp://"):
        tensors = receive_tensors(str(source))
    else:
        try:
            tensors = load_file(source)
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise _mismatch(f"published weights {source} cannot be read ({error})") from error
    actual = tensors_digest(tensors.items())
    if actual != expected_digest:
        raise _mismatch(f"published weights {source} have digest {actual}, not {expected_digest}")
    return tensors


def unfit(source: Path | str, flaw: str) -> WeightMismatch:
    """Return the refusal of tensors that are not those of the model."""
    return _mismatch(f"published weights {source} do not fit the model: {flaw}")


def _mismatch(given: str) -> WeightMismatch:
    return WeightMismatch(
        given,
        allowed="exactly the tensors that the policy published",
        next_step="the engine keeps its old weights; start the run again to publish anew",
    )


def memory_dir() -> str | None:
    """Return a folder in memory, where the system has one."""
    return str(SHARED_MEMORY) if os.access(SHARED_MEMORY, os.W_OK) else None


def fetch_object(uri: str, target: Path) -> None:
    """Download a publication: an object, or the record of an adapter.

    Raises: WeightMismatch if it is not there, or not what was sent.
    """
    from strop.store.opening import open_store

    try:
        open_store(uri).get(uri, target)
    except StoreError as error:
        raise WeightMismatch(
            f"the weights at {uri} did not come ({error})",
            allowed="a publication that both sides reach",
            next_step="the engine keeps its old weights; start the run again to publish anew",
        ) from error


@contextmanager
def fetched(uri: str) -> Iterator[str]:
    """Yield the path of a copy of an object in memory, for as long as it is loaded.

    Raises: WeightMismatch, see `fetch_object`.
    """
    with TemporaryDirectory(prefix="strop-weights-", dir=memory_dir()) as folder:
        target = Path(folder) / uri.rpartition("/")[2]
        fetch_object(uri, target)
        yield str(target)


def tensors_digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Hash name, type, shape and hashed bytes of each tensor, in order of name. Returns 64 hex digits.

    SHA-256 throughout. Tensors are hashed side by side, since one core hashes 1 to 2 GB/s.
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
