"""What a preflight is asked to look at."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from strop.hardware.allocation import Allocation


class Level(StrEnum):
    """How much is tried. Each level takes those before it for granted."""

    READ = "a"
    """Counts, memory, processes, disk, clock: nothing is computed. Under a second."""
    COMPUTE = "b"
    """A product with a known sum on each GPU, and copies there and back. About ten seconds."""
    COLLECT = "c"
    """A sum over all nodes with a known result and a least speed. About thirty seconds."""
    SITE = "d"
    """The site's own diagnosis and error counters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeGroup:
    """The nodes that compute together."""

    names: tuple[str, ...]
    """Of all nodes, in their order; the first one keeps the meeting place."""
    index: int
    """Which of them this is."""
    attempt_path: Path
    """Directory of the attempt, which all nodes see."""
    attempt: int
    """Its number."""
    interface: str | None = None
    """Network interface between the nodes; None finds it."""
    min_bytes_per_s: float = 50e6
    """Of payload that a node must exchange with the first one: half of what 1 Gbit/s carries."""
    wait_limit_s: float = 60.0
    """For all nodes to come together, and again for their sum."""

    @property
    def name(self) -> str:
        """This node's."""
        return self.names[self.index]


@dataclass(frozen=True, kw_only=True, slots=True)
class PreflightRequest:
    """What one node of a run needs."""

    run_path: Path
    """Where it will write; logs of probes go below it."""
    allocation: Allocation | None = None
    """Its GPUs; None if it needs none."""
    levels: tuple[Level, ...] = (Level.READ,)
    node: str = field(default_factory=socket.gethostname)
    gpu_need_bytes: Mapping[str, int] = field(default_factory=dict)
    """What a role needs free on each of its GPUs."""
    disk_need_bytes: int = 0
    memory_need_bytes: int = 0
    """Of the machine's memory."""
    device: str = "cuda"
    """Where probes compute. `cpu`: to try the checks themselves where torch was built without CUDA."""
    own_lease_id: str | None = None
    """Whose processes are not strangers."""
    reference_at: float | None = None
    """What another node's clock says now (Unix seconds); None compares with the file system alone."""
    interfaces: Mapping[str, str] = field(default_factory=dict)
    """Variables that name network interfaces, for example GLOO_SOCKET_IFNAME."""
    group: NodeGroup | None = None
    """None: the run has one node, and there is nothing to collect."""
    is_strict: bool = False
    """Whether what the site's tools find forbids a start, and is not a warning."""

    @property
    def num_gpus(self) -> int:
        """How many GPUs it has been given."""
        if self.allocation is None:
            return 0
        return sum(len(role.visible.ids) for role in self.allocation.roles.values())
