"""Ports that stay reserved from their choice to their use.

A port is chosen by binding it, to a number that the system picks, and the socket is held until the listening
program has it: the program inherits the descriptor, or binds a port itself and publishes it. A port that is
chosen and closed again may be taken by another program. For a program that accepts only a number,
`start_on_port` retries with another one and reports it.
Loopback is the default, because other users of the network can connect to its addresses.
"""

from __future__ import annotations

import fcntl
import json
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from strop.errors import CheckRefused, StoreError
from strop.hardware.identity import describe_process
from strop.io.atomic import write_bytes_atomically

LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915
"""Get the IPv4 address of an interface; netdevice(7)."""
_NUM_TRIES = 5
_UNROUTED = ("192.0.2.1", 9)
"""An address reserved for documentation (RFC 5737). Connecting a datagram socket sends nothing."""
Started = TypeVar("Started")


class HeldPort:
    """A bound socket, held until a program takes it over; a `with` block closes it at the end."""

    def __init__(self, bound: socket.socket) -> None:
        self._socket = bound
        self.host, self.port = bound.getsockname()[:2]

    @property
    def address(self) -> str:
        """Host and port for clients."""
        return f"{self.host}:{self.port}"

    def fileno(self) -> int:
        """Return the descriptor, for `pass_fds` of the listening program."""
        return self._socket.fileno()

    def detach(self) -> int:
        """Return the descriptor; the caller closes it from now on."""
        return self._socket.detach()

    def close(self) -> None:
        """Free the port, or close this process's copy once another process has it."""
        self._socket.close()

    def __enter__(self) -> HeldPort:
        """Return the port."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()


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


def hold_port(host: str = LOOPBACK, port: int = 0) -> HeldPort:
    """Bind and hold a port; 0 lets the system pick a free one.

    Raises: CheckRefused naming the process that has the port, or an address of another machine.
    """
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        others = [listening for listening in read_listening_ports() if listening.port == port]
        by = f", taken by {others[0]}" if others else ""
        raise CheckRefused(
            f"{host}:{port} cannot be bound ({error.strerror}){by}",
            allowed="an address of this machine and a port that is free",
            next_step="name no port, so that a free one is picked, or another one",
        ) from error
    return HeldPort(bound)


def start_on_port(
    start: Callable[[int], Started | None], *, host: str = LOOPBACK, on_retry: Callable[[str], None]
) -> Started:
    """Start a program that accepts only a port number, with one that was free a moment ago.

    `start` returns None if the program found its port taken; then `on_retry` is called and another port is
    tried. Only for programs that can neither inherit a socket nor report their port.
    Raises: CheckRefused after five tries.
    """
    for number in range(1, _NUM_TRIES + 1):
        with hold_port(host) as held:
            port = held.port
        started = start(port)
        if started is not None:
            return started
        on_retry(f"port {port} of {host} was taken between its choice and its use, try {number}")
    raise CheckRefused(
        f"{_NUM_TRIES} ports of {host} were taken one after the other between choice and use",
        allowed="a machine where a port that was free a moment ago still is",
        next_step="look which other programs bind ports on this machine, then start again",
    )


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


def find_interface(peer: str) -> str | None:
    """Return this node's interface on the route to an address; None if there is no route."""
    for address in _find_route((peer, _UNROUTED[1])):
        for _, name in socket.if_nameindex():
            with suppress(CheckRefused):
                if _read_interface(name) == address:
                    return name
    return None


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


def _find_route(to: tuple[str, int] = _UNROUTED) -> list[str]:
    """Return the source address of packets to an address. No packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect(to)
        except OSError:
            return []
        return [str(asking.getsockname()[0])]


# Addresses of an attempt's programs, for its other nodes: `ports.json` in the attempt's directory, with the
# attempt's number. A late reader of an earlier attempt is refused instead of connecting to a newer one.

PORTS_NAME = "ports.json"
_POLL_S = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """The published addresses of an attempt."""

    attempt: int
    """Its number, which grows with each attempt."""
    node: str
    """The node that published them."""
    addresses: Mapping[str, str]
    """From name to host:port."""


def publish_ports(
    attempt_path: Path, attempt: int, addresses: Mapping[str, str], *, node: str, name: str = PORTS_NAME
) -> Path:
    """Publish the addresses of an attempt as one atomic file; return the file.

    Several publishers use one `name` each. Raises: StoreError if a later attempt has published there already,
    or the file cannot be written.
    """
    read_ports(attempt_path, attempt, name=name)
    path = attempt_path / name
    content = {"attempt": attempt, "node": node, "addresses": dict(addresses)}
    write_bytes_atomically(path, json.dumps(content, indent=1).encode())
    return path


def read_ports(attempt_path: Path, attempt: int, *, name: str = PORTS_NAME) -> Published | None:
    """Return the addresses of an attempt; None while they are not published, or the file has another format.

    Raises: StoreError if a later attempt has begun.
    """
    path = attempt_path / name
    try:
        content = json.loads(path.read_bytes())
        latest = Published(
            attempt=int(content["attempt"]),
            node=str(content["node"]),
            addresses={str(key): str(value) for key, value in content["addresses"].items()},
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    if latest.attempt > attempt:
        raise StoreError(
            f"this is attempt {attempt}, and {path} is of attempt {latest.attempt}, by node {latest.node}",
            allowed="the newest attempt: one that was replaced must not talk to its successor",
            next_step="nothing; the newer attempt goes on, and this one ends here",
        )
    return latest if latest.attempt == attempt else None


def wait_for_ports(
    attempt_path: Path,
    attempt: int,
    wanted: Sequence[str],
    *,
    node: str,
    wait_limit_s: float,
    name: str = PORTS_NAME,
) -> Published:
    """Wait until an attempt has published the wanted names.

    Raises: StoreError naming the node that should have published them, or if a later attempt has begun.
    """
    deadline = time.monotonic() + wait_limit_s
    while True:
        published = read_ports(attempt_path, attempt, name=name)
        missing = [key for key in wanted if published is None or key not in published.addresses]
        if published is not None and not missing:
            return published
        if time.monotonic() >= deadline:
            raise StoreError(
                f"node {node} has not said within {wait_limit_s:g} s where {', '.join(missing)} of"
                f" attempt {attempt} can be reached ({attempt_path / name})",
                allowed="a node that starts with the others and sees the same disk",
                next_step=f"read the logs of node {node}; exclude it if it does not start",
            )
        time.sleep(_POLL_S)


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
