"""The request of a preflight, and its probe programs."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from strop.hardware.allocation import Allocation, RoleDevices
from strop.hardware.process import ChildProcess, spawn, terminate


class Level(StrEnum):
    """The kind of checks. Each level assumes that the earlier ones passed."""

    READ = "a"
    """Counts, memory, processes, disk, clock, without computing. Under a second."""
    COMPUTE = "b"
    """A product with a known sum on each GPU, and copies there and back. About ten seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreflightRequest:
    """The requirements of one node of a run."""

    run_path: Path
    """The run's directory; logs of probes go below it."""
    allocation: Allocation | None = None
    """Its GPUs; None if it needs none."""
    levels: tuple[Level, ...] = (Level.READ,)
    node: str = field(default_factory=socket.gethostname)
    gpu_need_bytes: Mapping[str, int] = field(default_factory=dict)
    """Free memory that a role needs on each of its GPUs."""
    disk_need_bytes: int = 0
    memory_need_bytes: int = 0
    """Required free memory of the machine."""
    device: str = "cuda"
    """Device of the probes. `cpu` tries the checks themselves with a torch without CUDA."""
    own_lease_id: str | None = None
    """The lease of the run's own processes."""
    reference_at: float | None = None
    """Current time of another node's clock (Unix seconds); None only compares with the file system."""
    interfaces: Mapping[str, str] = field(default_factory=dict)
    """Variables that name network interfaces, for example GLOO_SOCKET_IFNAME."""
    num_nodes: int = 1
    """Nodes that compute together."""

    @property
    def num_gpus(self) -> int:
        """Number of allocated GPUs."""
        if self.allocation is None:
            return 0
        return sum(len(role.visible.ids) for role in self.allocation.roles.values())

    @property
    def devices(self) -> list[RoleDevices]:
        """The allocated devices of each role."""
        return [] if self.allocation is None else [*self.allocation.roles.values()]


# Probes are programs of a preflight; the last line of their output is JSON.

FOLDER_NAME = "preflight"
"""Folder of the probes' logs, below the run's directory."""
_POLL_S = 0.05


def tell(answer: Mapping[str, Any]) -> None:
    """Print a probe's answer."""
    sys.stdout.write(f"{json.dumps(answer)}\n")
    sys.stdout.flush()


def start_probe(
    module: str,
    words: Sequence[str],
    log_path: Path,
    variables: Mapping[str, str],
) -> ChildProcess:
    """Run a module as a program with one compute thread and an empty log."""
    log_path.unlink(missing_ok=True)
    env = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    # -P: a file in the current directory must not shadow strop's modules.
    return spawn([sys.executable, "-P", "-m", module, *words], log_path, env)


def await_probes(probes: Sequence[ChildProcess], limit_s: float) -> list[dict[str, Any] | None]:
    """Return the answer of each probe; None for one that exceeded the limit and was killed."""
    deadline = time.monotonic() + limit_s
    while any(probe.poll() is None for probe in probes) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    answers = [_read_answer(probe) if probe.poll() is not None else None for probe in probes]
    for probe in probes:
        terminate(probe, 0.0)
    return answers


def _read_answer(probe: ChildProcess) -> dict[str, Any]:
    for line in reversed(probe.tail(50).splitlines()):
        if line.startswith("{"):
            try:
                answer: dict[str, Any] = json.loads(line)
            except ValueError:
                continue
            return answer
    last = " / ".join(probe.tail(3).splitlines())
    return {"error": f"the probe ended with exit code {probe.poll()} and said nothing: {last}"}
