"""What a preflight is asked to look at."""

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
from strop.hardware.visible_devices import is_one_by_one


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
    """Of all nodes, in their order; the first one keeps the rendezvous."""
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

    @property
    def computing(self) -> list[RoleDevices]:
        """What the run's own processes compute on; other GPUs are for programs in sandboxes."""
        roles = {} if self.allocation is None else self.allocation.roles
        return [role for name, role in roles.items() if not is_one_by_one(name)]


# Programs that a preflight starts; each prints one line of JSON last.

FOLDER_NAME = "preflight"
"""Of the logs of probes, below the run's directory."""
_POLL_S = 0.05


def tell(answer: Mapping[str, Any]) -> None:
    """Print the answer, in the probe itself."""
    sys.stdout.write(f"{json.dumps(answer)}\n")
    sys.stdout.flush()


def start_probe(
    module: str,
    words: Sequence[str],
    log_path: Path,
    variables: Mapping[str, str],
    *,
    pass_fds: Sequence[int] = (),
) -> ChildProcess:
    """Start a module as a program with one compute thread; its log begins anew."""
    log_path.unlink(missing_ok=True)
    env = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    # -P: a file in the current directory never stands in for one of strop's modules.
    return spawn([sys.executable, "-P", "-m", module, *words], log_path, env, pass_fds=pass_fds)


def await_probes(probes: Sequence[ChildProcess], limit_s: float) -> list[dict[str, Any] | None]:
    """Return the answer of each probe; None for one without an answer within the limit, which is killed."""
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
