"""The checks of a node before the run begins there: a refusal costs seconds, a bad node the night."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable

from strop.errors import CheckRefused, Interrupted
from strop.hardware.allocation import Allocation
from strop.hardware.preflight import Level, NodeGroup, PreflightRequest, require_ready
from strop.launch.contract import JobPlan
from strop.launch.node.environment import NodeTask

MIN_FREE_BYTES = 256 << 20
"""Free bytes of the run's disk: fewer would not hold the logs of the attempt."""
ARRIVAL_LIMIT_S = 120.0
"""How much later than the first one the last node of a job may begin."""
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_LEVELS = {
    "none": (),
    "quick": (Level.READ,),
    "compute": (Level.READ, Level.COMPUTE),
    "collect": (Level.READ, Level.COMPUTE, Level.COLLECT),
    "site": (Level.READ, Level.COMPUTE, Level.COLLECT, Level.SITE),
}


def check_node(
    plan: JobPlan,
    task: NodeTask,
    allocation: Allocation,
    lease_id: str,
    say: Callable[[str], None],
    *,
    is_stopped: Callable[[], bool],
) -> None:
    """Run the preflight of this node at the level that the plan sets.

    Raises: CheckRefused naming what is wrong and where (exit code 76); Interrupted (75) if `is_stopped`
        becomes true while this node waits for the others.
    """
    levels = _LEVELS[plan.preflight]
    if not levels:
        return
    has_group = Level.COLLECT in levels and plan.resources.num_nodes > 1 and task.part == "main"
    request = PreflightRequest(
        run_path=task.member_path,
        allocation=allocation if allocation.roles else None,
        levels=tuple(level for level in levels if has_group or level is not Level.COLLECT),
        node=host_name(),
        disk_need_bytes=MIN_FREE_BYTES,
        own_lease_id=lease_id,
        interfaces={name: value for name in _INTERFACES if (value := os.environ.get(name))},
        group=_gather(plan, task, is_stopped) if has_group else None,
    )
    for finding in require_ready(request):
        say(f"{finding.code}: {finding}")


def host_name() -> str:
    """Return the name of this node, as its scheduler shows it."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def _gather(plan: JobPlan, task: NodeTask, is_stopped: Callable[[], bool]) -> NodeGroup:
    """Wait until all nodes of the main part have begun, and name them.

    Raises: CheckRefused naming the nodes that are missing; Interrupted.
    """
    deadline = time.monotonic() + ARRIVAL_LIMIT_S
    while missing := [node for node in range(plan.resources.num_nodes) if _host_of(task, node) is None]:
        if is_stopped():
            raise Interrupted(f"told to end while it waited for node {', '.join(map(str, missing))}")
        if time.monotonic() > deadline:
            raise CheckRefused(
                f"node {', '.join(map(str, missing))} of {plan.resources.num_nodes} has not begun within"
                f" {ARRIVAL_LIMIT_S:.0f} s",
                allowed="all nodes of a job, at about the same time",
                next_step="look for them in the scheduler's log; leave a bad one out with --exclude",
            )
        time.sleep(0.2)
    names = tuple(f"{_host_of(task, node)} (node {node})" for node in range(plan.resources.num_nodes))
    return NodeGroup(names=names, index=task.node, attempt_path=task.attempt_path, attempt=task.number)


def _host_of(task: NodeTask, node: int) -> str | None:
    try:
        return str(json.loads((task.attempt_path / f"agent-{node}.json").read_bytes())["host"])
    except (OSError, ValueError, KeyError):
        return None
