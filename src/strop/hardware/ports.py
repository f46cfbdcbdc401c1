"""Ports that stay ours from their choice to their use.

A port is chosen by binding it, to a number that the system picks, and the socket is kept until the program
that listens has it: by inheriting the descriptor, or because it binds by itself and publishes what it got.
A port that is looked up and closed again may be taken by the next program that asks. Where a program accepts
only a number, `start_on_port` retries with another one and reports it.
Loopback is the default: an address of the network lets other users of it connect.
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
"""Asks for the IPv4 address of an interface; netdevice(7)."""
_NUM_TRIES = 5
_UNROUTED = ("192.0.2.1", 9)
"""Of a network that is for documents only (RFC 5737). Connecting a datagram socket sends nothing."""
Started = TypeVar("Started")


class HeldPort:
    """A bound socket, kept until it is handed over; in `with`, closed at the end."""

    def __init__(self, bound: socket.socket) -> None:
        self._socket = bound
        self.host, self.port = bound.getsockname()[:2]

    @property
    def address(self) -> str:
        """Host and port, as others reach it."""
        return f"{self.host}:{self.port}"

    def fileno(self) -> int:
        """Return the descriptor, for `pass_fds` of the program that is to listen on it."""
        return self._socket.fileno()

    def detach(self) -> int:
        """Hand the descriptor over for good: from here on its new owner closes it."""
        return self._socket.detach()

    def close(self) -> None:
        """Give the port back, or let go of it once another process has it."""
        self._socket.close()

    def __enter__(self) -> HeldPort:
        """Hold it."""
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
    """None where the process is another user's, or in another container."""

    def __str__(self) -> str:
        """Name it for a message."""
        if self.pid is None:
            return f"{self.host}:{self.port} (a process that is not visible from here)"
        command = describe_process(self.pid)[1] or "command unknown"
        return f"{self.host}:{self.port} (process {self.pid}: {command})"


def hold_port(host: str = LOOPBACK, port: int = 0) -> HeldPort:
    """Bind a port and keep it; 0 lets the system pick one that is free.

    Raises: CheckRefused naming who has a port that was asked for, or an address that is not ours.
    """
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        others = [found for found in read_listening_ports() if found.port == port]
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
    """Start a program that takes nothing but a number, with a number that was free a moment ago.

    `start` returns None if the program found its port taken: then another one is tried, and `on_retry` is
    called. Only for programs that can neither inherit a socket nor report what they bound.
    Raises: CheckRefused if that goes on.
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
        next_step="see what else binds ports on this machine, then start again",
    )


def find_host_address(num_nodes: int, interface: str | None = None) -> str:
    """Return the address to listen on: loopback for one node, the one that other nodes reach for several.

    `interface` names the network between nodes, as GLOO_SOCKET_IFNAME does; without it the host's own name
    decides, then the way that packets to elsewhere would take.
    Raises: CheckRefused if there is no such interface, or no address but loopback.
    """
    if num_nodes <= 1:
        return LOOPBACK
    if interface is not None:
        return _read_interface(interface)
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        found = []
    candidates = [*(str(entry[4][0]) for entry in found), *_find_route()]
    outside = [address for address in candidates if not address.startswith("127.")]
    if outside:
        return outside[0]
    raise CheckRefused(
        f"{socket.gethostname()} has no address that {num_nodes - 1} other nodes could reach",
        allowed="a name that resolves to an address of the network between the nodes",
        next_step="name the interface of that network in GLOO_SOCKET_IFNAME",
    )


def find_interface(peer: str) -> str | None:
    """Return this node's interface on the way to another address; None where none has a way."""
    for address in _find_route((peer, _UNROUTED[1])):
        for _, name in socket.if_nameindex():
            with suppress(CheckRefused):
                if _read_interface(name) == address:
                    return name
    return None


def read_listening_ports() -> list[ListeningPort]:
    """Return the TCP ports that are listened on in this network namespace, none where nothing tells."""
    import psutil

    try:
        sockets = psutil.net_connections(kind="tcp")
    except (psutil.Error, OSError, RuntimeError):
        return []
    found = [
        ListeningPort(host=one.laddr.ip, port=one.laddr.port, pid=one.pid)
        for one in sockets
        if one.status == psutil.CONN_LISTEN
    ]
    return sorted(found, key=lambda one: (one.port, one.host))


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
    """Return the address that packets to an address would carry as theirs. None is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect(to)
        except OSError:
            return []
        return [str(asking.getsockname()[0])]


# Addresses of an attempt's programs, for its other nodes: `ports.json` in the attempt's directory, with the
# attempt's number. A late reader of an earlier attempt is refused instead of being sent to strangers.

PORTS_NAME = "ports.json"
_POLL_S = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """What one attempt listens on."""

    attempt: int
    """Its number, which grows with each attempt."""
    node: str
    """The node that published it."""
    addresses: Mapping[str, str]
    """Name to host:port."""


def publish_ports(
    attempt_path: Path, attempt: int, addresses: Mapping[str, str], *, node: str, name: str = PORTS_NAME
) -> Path:
    """Publish where an attempt listens, as one file that appears whole; return the file.

    Several publishers take a `name` each. Raises: StoreError if a later attempt has published there already,
    or the file cannot be written.
    """
    path = attempt_path / name
    there = _read(path)
    if there is not None and there.attempt > attempt:
        raise _stale(path, attempt, there)
    content = {"attempt": attempt, "node": node, "addresses": dict(addresses)}
    write_bytes_atomically(path, json.dumps(content, indent=1).encode())
    return path


def read_ports(attempt_path: Path, attempt: int, *, name: str = PORTS_NAME) -> Published | None:
    """Return where an attempt listens; None while it has not published that.

    Raises: StoreError if a later attempt has begun.
    """
    path = attempt_path / name
    there = _read(path)
    if there is not None and there.attempt > attempt:
        raise _stale(path, attempt, there)
    return there if there is not None and there.attempt == attempt else None


def wait_for_ports(
    attempt_path: Path,
    attempt: int,
    wanted: Sequence[str],
    *,
    node: str,
    wait_limit_s: float,
    name: str = PORTS_NAME,
) -> Published:
    """Wait until an attempt has published certain names.

    Raises: StoreError naming the node that was to publish them and has not, or if a later attempt has begun.
    """
    deadline = time.monotonic() + wait_limit_s
    while True:
        found = read_ports(attempt_path, attempt, name=name)
        missing = [one for one in wanted if found is None or one not in found.addresses]
        if found is not None and not missing:
            return found
        if time.monotonic() >= deadline:
            raise StoreError(
                f"node {node} has not said within {wait_limit_s:g} s where {', '.join(missing)} of"
                f" attempt {attempt} can be reached ({attempt_path / name})",
                allowed="a node that starts with the others and sees the same disk",
                next_step=f"read the logs of node {node}; exclude it if it does not start",
            )
        time.sleep(_POLL_S)


def _read(path: Path) -> Published | None:
    """Return what a file says; None where there is none, or what it says has another form."""
    try:
        content = json.loads(path.read_bytes())
        return Published(
            attempt=int(content["attempt"]),
            node=str(content["node"]),
            addresses={str(key): str(value) for key, value in content["addresses"].items()},
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _stale(path: Path, attempt: int, there: Published) -> StoreError:
    return StoreError(
        f"this is attempt {attempt}, and {path} is of attempt {there.attempt}, by node {there.node}",
        allowed="the newest attempt: one that was replaced must not talk to its successor",
        next_step="nothing; the newer attempt goes on, and this one ends here",
    )


# Environment variables that a node's agent sets for the roles that it starts.

NODE_VARIABLE = "STROP_NODE"
"""Which node of its attempt a role is on, from 0."""
NUM_NODES_VARIABLE = "STROP_NUM_NODES"
ADDRESS_VARIABLE = "STROP_NODE_ADDRESS"
"""Of node 0, as the other nodes reach it."""
NAMES_VARIABLE = "STROP_JOB_NAMES"
"""Names of the job's variables and secrets, with commas: every process of the run must have them."""


def count_nodes(environ: Mapping[str, str]) -> int:
    """Return how many nodes this process's job has; 1 outside of one."""
    return int(environ.get(NUM_NODES_VARIABLE, "1"))
