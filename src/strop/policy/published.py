"""Reading what a policy published, wherever it lies, and refusing what is not that.

Needs torch and safetensors and nothing else, so that an engine's process with pins of its own can import it.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from strop.errors import WeightMismatch, explain_refusal
from strop.policy.broadcast import receive_tensors
from strop.policy.digest import tensors_digest


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
        explain_refusal(
            given,
            allowed="exactly the tensors that the policy published",
            next_step="the engine keeps its old weights; start the run again to publish anew",
        )
    )
