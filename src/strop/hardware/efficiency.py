"""Which share of a machine's speed generation and learning reach: the small measured model of `strop plan`.

Four numbers, each a share or an overhead that depends on the program and not on the model's size. They
are measured once per machine (`strop plan --measure`) and kept in the user's cache; where nothing was
measured, the committed defaults below are taken, which name their measurement. Needs no torch.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from strop.hardware.machine import describe_machine
from strop.io.atomic import explain_write_failure, write_bytes_atomically
from strop.io.cache import user_cache_dir

EFFICIENCY_NAME = "efficiency.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Efficiency:
    """What real work reaches of the speeds of one large product and one large copy."""

    learn_frac: float
    """Of the product's rate, in forward and backward passes."""
    decode_frac: float
    """Of the product's rate, in prefill and decoding of many rows."""
    decode_layer_s: float
    """Seconds that every layer adds to every decode step, however few its rows."""
    update_frac: float
    """Of the copy's rate, in the optimizer's pass over masters, moments, gradients and copies."""
    cpu_name: str | None
    """Where it was measured; None for an accelerator."""
    source: str
    """The measurement, in words."""
    is_measured: bool = False
    """Whether it was measured on the machine that is planned for."""


CPU_EFFICIENCY = Efficiency(
    learn_frac=0.77,
    decode_frac=0.66,
    decode_layer_s=0.0002,
    update_frac=0.36,
    cpu_name=None,
    source="SmolLM2-135M in bfloat16 on two AMD EPYC cores with 425 GFLOP/s, fitted to the steps in"
    " benchmarks/results/grpo-*-2026-11-21 and generate-*-2026-11-21",
)
"""Of processors."""
GPU_EFFICIENCY = Efficiency(
    learn_frac=0.3,
    decode_frac=0.5,
    decode_layer_s=0.00004,
    update_frac=0.7,
    cpu_name=None,
    source="not measured by strop: published shares of peak of small dense models on H100 and H200 (prime-rl:"
    " 0.11 to 0.36 in learning), ten kernels of 4 us per layer and decode step",
)
"""Of accelerators."""


def read_efficiency(cache_dir: Path | None = None) -> Efficiency | None:
    """Return what was measured on this processor before, or None. Without torch."""
    path = (cache_dir or user_cache_dir()) / EFFICIENCY_NAME
    try:
        found = Efficiency(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        # Not measured, or by another version of strop: the same to a planner.
        return None
    # A cache on a shared home directory may come from another machine.
    return found if found.cpu_name == describe_machine().cpu_name else None


def write_efficiency(found: Efficiency, cache_dir: Path | None = None) -> Path:
    """Remember a measurement; return the file.

    Raises: StoreError if the cache cannot be written.
    """
    path = (cache_dir or user_cache_dir()) / EFFICIENCY_NAME
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise explain_write_failure(error, path) from error
    write_bytes_atomically(path, json.dumps(asdict(found), indent=1).encode())
    return path
