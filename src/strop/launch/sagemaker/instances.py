"""What the instance types of SageMaker have: GPUs, cores, memory. Prices are not here: they change.

Source: the tables of instance types on AWS's pages (families p4, p5, g5, g6, g6e, m5, c5). Not here: types
without bfloat16 (p3, g4dn) and those of other makers' accelerators.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True, kw_only=True, slots=True)
class Instance:
    """One instance."""

    gpu: str | None
    """As `strop plan --hardware` takes it; None: it has none."""
    num_gpus: int
    num_cores: int
    """Physical: half of its vCPUs."""
    memory_gib: int


# Family and GPU | size: GPUs, vCPUs, GiB.
_ROWS = """
p4d a100-40 | 24xlarge 8 96 1152
p4de a100-80 | 24xlarge 8 96 1152
p5 h100 | 4xlarge 1 16 256, 48xlarge 8 192 2048
p5e h200 | 48xlarge 8 192 2048
p5en h200 | 48xlarge 8 192 2048
g5 a10g | xlarge 1 4 16, 2xlarge 1 8 32, 4xlarge 1 16 64, 8xlarge 1 32 128, 16xlarge 1 64 256
g5 a10g | 12xlarge 4 48 192, 24xlarge 4 96 384, 48xlarge 8 192 768
g6 l4 | xlarge 1 4 16, 2xlarge 1 8 32, 4xlarge 1 16 64, 8xlarge 1 32 128, 16xlarge 1 64 256
g6 l4 | 12xlarge 4 48 192, 24xlarge 4 96 384, 48xlarge 8 192 768
g6e l40s | xlarge 1 4 32, 2xlarge 1 8 64, 4xlarge 1 16 128, 8xlarge 1 32 256, 16xlarge 1 64 512
g6e l40s | 12xlarge 4 48 384, 24xlarge 4 96 768, 48xlarge 8 192 1536
m5 - | large 0 2 8, xlarge 0 4 16, 2xlarge 0 8 32, 4xlarge 0 16 64, 12xlarge 0 48 192, 24xlarge 0 96 384
c5 - | xlarge 0 4 8, 2xlarge 0 8 16, 4xlarge 0 16 32, 9xlarge 0 36 72, 18xlarge 0 72 144
"""


def find_instance(instance_type: str) -> Instance | None:
    """Return what an instance type such as ml.g6e.48xlarge has, None for one that is not in the table."""
    return _read_table().get(instance_type.removeprefix("ml."))


@cache
def _read_table() -> Mapping[str, Instance]:
    found = {}
    for row in _ROWS.strip().splitlines():
        head, _, sizes = row.partition("|")
        family, gpu = head.split()
        for entry in sizes.split(","):
            size, num_gpus, num_vcpus, memory_gib = entry.split()
            found[f"{family}.{size}"] = Instance(
                gpu=None if gpu == "-" else gpu,
                num_gpus=int(num_gpus),
                num_cores=int(num_vcpus) // 2,
                memory_gib=int(memory_gib),
            )
    return found
