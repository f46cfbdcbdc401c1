"""Ports that stay ours from their choice to their use.

A port is chosen by binding it, to a number that the system picks, and the socket is kept until the program
that listens has it: by inheriting the descriptor, or because it binds by itself and publishes what it got.
Who looks for a free number and closes the socket gives it to whoever asks next. Where a program takes
nothing but a number, `start_on_port` tries again with another one, and says so.
Loopback is the default: an address of the network lets other users of it connect.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from strop.errors import CheckRefused, explain_refusal

LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915
"""Asks for the IPv4 address of an interface; netdevice(7)."""
_LISTENING = "0A"
"""State of a socket in /proc/net/tcp, see proc_pid_net(5)."""
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class ListeningPort:
    """A TCP port that somebody listens on."""

    host: str
    port: int
    pid: int | None
    """None where the process is another user's, or in another container."""

    def __str__(self) -> str:
        """Name it for a message."""
        return f"{self.host}:{self.port} ({describe_listener(self)})"


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
            explain_refusal(
                f"{host}:{port} cannot be bound ({error.strerror}){by}",
                allowed="an address of this machine and a port that nobody has",
                next_step="name no port, so that a free one is picked, or another one",
            )
        ) from error
    return HeldPort(bound)


def start_on_port(
    start: Callable[[int], Started | None], *, host: str = LOOPBACK, on_retry: Callable[[str], None]
) -> Started:
    """Start a program that takes nothing but a number, with a number that was free a moment ago.

    `start` returns None if the program found its port taken: then another one is tried, and `on_retry` is
    told. Only for programs that can neither inherit a socket nor say what they bound.
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
        explain_refusal(
            f"{_NUM_TRIES} ports of {host} were taken one after the other between choice and use",
            allowed="a machine where a port that was free a moment ago still is",
            next_step="see what else binds ports on this machine, then start again",
        )
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
    candidates = [*_resolve(socket.gethostname()), *_find_route()]
    outside = [address for address in candidates if not address.startswith("127.")]
    if outside:
        return outside[0]
    raise CheckRefused(
        explain_refusal(
            f"{socket.gethostname()} has no address that {num_nodes - 1} other nodes could reach",
            allowed="a name that resolves to an address of the network between the nodes",
            next_step="name the interface of that network in GLOO_SOCKET_IFNAME",
        )
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
    """Return the TCP ports that are listened on in this network namespace. Linux; elsewhere none."""
    inodes = {inode: place for name in ("tcp", "tcp6") for place, inode in _read_table(name)}
    owners = _find_owners(set(inodes)) if inodes else {}
    found = [
        ListeningPort(host=host, port=port, pid=owners.get(inode)) for inode, (host, port) in inodes.items()
    ]
    return sorted(found, key=lambda one: (one.port, one.host))


def describe_listener(found: ListeningPort) -> str:
    """Say which process listens, as far as it can be seen."""
    if found.pid is None:
        return "a process that is not visible from here"
    try:
        words = Path(f"/proc/{found.pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        words = []
    command = b" ".join(words).decode(errors="replace").strip()
    return f"process {found.pid}: {command or 'command unknown'}"


def _read_table(name: str) -> Iterator[tuple[tuple[str, int], str]]:
    try:
        lines = Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    except OSError:
        return
    for line in lines:
        fields = line.split()
        if fields[3] == _LISTENING:
            address, _, port = fields[1].partition(":")
            yield (_read_address(address), int(port, 16)), fields[9]


def _read_address(text: str) -> str:
    """Read an address as the kernel prints it: words of 32 bits, each in the order of this machine."""
    words = [int(text[start : start + 8], 16) for start in range(0, len(text), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    return socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, packed)


def _find_owners(inodes: set[str]) -> dict[str, int]:
    """Return the process of each socket, of those that this user may look into."""
    found = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with suppress(OSError):
            for descriptor in os.listdir(f"/proc/{entry}/fd"):
                target = os.readlink(f"/proc/{entry}/fd/{descriptor}")
                inode = target.removeprefix("socket:[").rstrip("]")
                if inode in inodes:
                    found[inode] = int(entry)
    return found


def _read_interface(name: str) -> str:
    request = struct.pack("256s", name.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)
        except OSError as error:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise CheckRefused(
                explain_refusal(
                    f"interface {name!r} has no IPv4 address here ({error.strerror})",
                    allowed=f"one of this node's interfaces: {names}",
                    next_step="correct the interface's name, or leave it out",
                )
            ) from error
    return socket.inet_ntoa(answer[20:24])


def _resolve(name: str) -> list[str]:
    try:
        found = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(entry[4][0]) for entry in found]


def _find_route(to: tuple[str, int] = _UNROUTED) -> list[str]:
    """Return the address that packets to an address would carry as theirs. None is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect(to)
        except OSError:
            return []
        return [str(asking.getsockname()[0])]
