"""Addresses to listen on, and the variables of a node's roles.

Loopback is the default, because other users of the network can connect to its addresses.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping

from strop.errors import CheckRefused

LOOPBACK = "127.0.0.1"
_UNROUTED = ("192.0.2.1", 9)
"""An address reserved for documentation (RFC 5737). Connecting a datagram socket sends nothing."""


def find_host_address(num_nodes: int, interface: str | None = None) -> str:
    """Return the address to listen on: loopback for one node, for several an address that other nodes reach.

    `interface` names the network between nodes, as GLOO_SOCKET_IFNAME does; without it the host's name
    decides, then the default route.
    Raises: CheckRefused if there is no such interface, or no address but loopback.
    """
    import psutil

    if num_nodes <= 1:
        return LOOPBACK
    if interface is not None:
        by_name = psutil.net_if_addrs()
        addresses = [entry.address for entry in by_name.get(interface, ()) if entry.family == socket.AF_INET]
        if not addresses:
            raise CheckRefused(
                f"interface {interface!r} has no IPv4 address here",
                allowed=f"one of this node's interfaces: {', '.join(by_name)}",
                next_step="correct the interface's name, or leave it out",
            )
        return str(addresses[0])
    try:
        resolved = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        resolved = []
    candidates = [*(str(entry[4][0]) for entry in resolved), *_find_route()]
    outside = [address for address in candidates if not address.startswith("127.")]
    if outside:
        return outside[0]
    raise CheckRefused(
        f"{socket.gethostname()} has no address that {num_nodes - 1} other nodes could reach",
        allowed="a name that resolves to an address of the network between the nodes",
        next_step="name the interface of that network in GLOO_SOCKET_IFNAME",
    )


def _find_route() -> list[str]:
    """Return the source address of packets on the default route. No packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect(_UNROUTED)
        except OSError:
            return []
        return [str(asking.getsockname()[0])]


# Environment variables that a node's agent sets for the roles that it starts.

NODE_VARIABLE = "STROP_NODE"
"""The index of a role's node, from 0."""
NUM_NODES_VARIABLE = "STROP_NUM_NODES"
ADDRESS_VARIABLE = "STROP_NODE_ADDRESS"
"""The address of node 0 for the other nodes."""
NAMES_VARIABLE = "STROP_JOB_NAMES"
"""Comma-separated names of the job's variables and secrets, which every process of the run must have."""


def count_nodes(environ: Mapping[str, str]) -> int:
    """Return the number of nodes of this process's job; 1 outside of a job."""
    return int(environ.get(NUM_NODES_VARIABLE, "1"))
