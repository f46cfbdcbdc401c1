"""Level c: whether the nodes of a run reach each other, and compute together fast enough."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from strop.errors import StropError
from strop.hardware.findings import Finding, find_refusal
from strop.hardware.ports import (
    HeldPort,
    find_host_address,
    find_interface,
    hold_port,
    publish_ports,
    wait_for_ports,
)
from strop.hardware.preflight.request import (
    FOLDER_NAME,
    NodeGroup,
    PreflightRequest,
    await_probes,
    start_probe,
)
from strop.hardware.visible_devices import VISIBLE_DEVICES

_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_PORTS_NAME = "preflight-ports.json"
_RENDEZVOUS = "rendezvous"
_START_S = 60.0
"""Additional time for importing torch on the slowest node."""
_EXCLUDE = "exclude that node and tell its administrators"


def check_collective(request: PreflightRequest) -> list[Finding]:
    """Sum a known tensor over all nodes. Every node calls this; the first one serves the rendezvous."""
    group = request.group
    if group is None or len(group.names) < 2:
        return []
    try:
        answer = _take_part(request, group)
    except StropError as refusal:
        return [find_refusal("rendezvous", refusal, where=group.names[0])]
    return list(judge_collective(group, answer))


def _take_part(request: PreflightRequest, group: NodeGroup) -> dict[str, Any] | None:
    """Run this node's probe; return its answer."""
    held: HeldPort | None = None
    if group.index == 0:
        held = hold_port(find_host_address(len(group.names), group.interface))
        address = held.address
        publish_ports(
            group.attempt_path, group.attempt, {_RENDEZVOUS: address}, node=group.name, name=_PORTS_NAME
        )
    else:
        published = wait_for_ports(
            group.attempt_path,
            group.attempt,
            [_RENDEZVOUS],
            node=group.names[0],
            wait_limit_s=group.wait_limit_s,
            name=_PORTS_NAME,
        )
        address = published.addresses[_RENDEZVOUS]
    try:
        return _run_probe(request, group, address, held)
    finally:
        if held is not None:
            held.close()


def _run_probe(
    request: PreflightRequest, group: NodeGroup, address: str, held: HeldPort | None
) -> dict[str, Any] | None:
    # Only this node's first device, if it has one.
    roles = () if request.allocation is None else request.allocation.roles.values()
    first = (role for role in roles if role.visible.ids)
    shown = next(({**role.variables, VISIBLE_DEVICES: role.visible.ids[0]} for role in first), {})
    words = ["--names", json.dumps(group.names), "--rank", str(group.index), "--address", address]
    words += ["--device", request.device if shown else "cpu", "--wait-limit-s", str(group.wait_limit_s)]
    if held is not None:
        words += ["--descriptor", str(held.fileno())]
    variables = dict(shown)
    # By default gloo uses the address of the host's name, which is loopback on many nodes.
    interface = group.interface or find_interface(address.rpartition(":")[0])
    if interface is not None:
        variables |= {
            name: interface for name in _INTERFACE_VARIABLES if group.interface or not os.environ.get(name)
        }
    probe = start_probe(
        f"{__package__}.collective_probe",
        words,
        request.run_path / FOLDER_NAME / f"{request.node}-collective.log",
        variables,
        pass_fds=() if held is None else (held.fileno(),),
    )
    (answer,) = await_probes([probe], 2 * group.wait_limit_s + _START_S)
    return answer


def judge_collective(group: NodeGroup, answer: dict[str, Any] | None) -> Iterator[Finding]:
    """Turn a probe's answer into findings that name nodes."""
    first = group.names[0]
    if answer is None:
        yield _blame(group.name, "node_stuck", f"{group.name} did not answer at all", "a node that computes")
    elif answer.get("missing"):
        # The nodes that are behind the others are at fault.
        stages = {
            "come": ("node_missing", "has not come to the rendezvous"),
            "start": ("node_stuck", "came, and has not started"),
            "join": ("node_stuck", "has not joined the others"),
            "sum": ("node_stuck", "has not finished the sum"),
            "pair": ("node_stuck", "has not finished its exchange with the first node"),
        }
        code, what = stages[answer["stage"]]
        cause = f" ({answer['error']})" if "error" in answer else f" within {answer['limit_s']:g} s"
        for name in answer["missing"]:
            yield _blame(name, code, f"node {name} {what}{cause}", "all nodes, at every stage")
    elif answer.get("stage") == "reach":
        yield _blame(
            group.name,
            "unreachable",
            f"{group.name} does not reach {first}: {answer['error']}",
            "nodes that reach the first one",
        )
    elif answer.get("stage") == "lost":
        yield _blame(
            first, "node_stuck", f"{first} has gone: {answer['error']}", "nodes that stay to the end"
        )
    elif "error" in answer:
        yield _blame(group.name, "collective", f"on {group.name}: {answer['error']}", "a sum without errors")
    elif not answer["is_exact"]:
        problem = f"the sum over {len(group.names)} nodes is wrong on {group.name}"
        yield _blame(group.name, "collective", problem, "the sum of known numbers, which is exact in float32")
    else:
        yield from _name_slow(group, answer["pairs"])


def _name_slow(group: NodeGroup, pairs: Mapping[str, float]) -> Iterator[Finding]:
    """Blame each node whose exchange with the first one is slow; if all of several are, the first one."""
    first = group.names[0]
    slow = {name: speed for name, speed in pairs.items() if speed < group.min_bytes_per_s}
    is_first = len(pairs) > 1 and len(slow) == len(pairs)
    for name, speed in slow.items():
        yield _blame(
            first if is_first else name,
            "bandwidth",
            f"{name} and {first} exchange {speed / 1e6:.1f} MB/s",
            f"{group.min_bytes_per_s / 1e6:.1f} MB/s at least",
        )


def _blame(node: str, code: str, problem: str, allowed: str) -> Finding:
    return Finding(code=code, given=problem, allowed=allowed, next_step=_EXCLUDE, where=node)
