"""Addresses to listen on, the ports that are listened on, and the variables of a node's roles.

Loopback is the default, because other users of the network can connect to its addresses.
"""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from strop.errors import CheckRefused
from strop.hardware.identity import describe_process

LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915
"""Get the IPv4 address of an interface; netdevice(7)."""
_UNROUTED = ("192.0.2.1", 9)
"""An address reserved for documentation (RFC 5737). Connecting a datagram socket sends nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ListeningPort:
    """A TCP port that a process listens on."""

    host: str
    port: int
    pid: int | None
    """None for a process of another user or in another container."""

    def __str__(self) -> str:
        """Name it for a message."""
        if self.pid is None:
            return f"{self.host}:{self.port} (a process that is not visible from here)"
        command = describe_process(self.pid)[1] or "command unknown"
        return f"{self.host}:{self.port} (process {self.pid}: {command})"


def find_host_address(num_nodes: int, interface: str | None = None) -> str:
    """Return the address to listen on: loopback for one node, for several an address that other nodes reach.

    `interface` names the network between nodes, as GLOO_SOCKET_IFNAME does; without it the host's name
    decides, then the default route.
    Raises: CheckRefused if there is no such interface, or no address but loopback.
    """
    if num_nodes <= 1:
        return LOOPBACK
    if interface is not None:
        return _read_interface(interface)
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


def read_listening_ports() -> list[ListeningPort]:
    """Return the listening TCP ports of this network namespace; none if the system does not list them."""
    import psutil

    try:
        sockets = psutil.net_connections(kind="tcp")
    except (psutil.Error, OSError, RuntimeError):
        return []
    ports = [
        ListeningPort(host=entry.laddr.ip, port=entry.laddr.port, pid=entry.pid)
        for entry in sockets
        if entry.status == psutil.CONN_LISTEN
    ]
    return sorted(ports, key=lambda listening: (listening.port, listening.host))


def _read_interface(name: str) -> str:
    request = struct.pack("256s", name.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)
        except OSError as error:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise CheckRefused(
                f"interface {name!r} has no IPv4 address here ({error.strerror})",
                allowed=f"one of this node's interfaces: {names}",
                next_step="correct the interface's name, or leave it out",
            ) from error
    return socket.inet_ntoa(answer[20:24])


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
