"""The suite's network namespace, so that nothing leaves this machine, and its listeners.

The network has a loopback, an address like that of a host's interface, and the address of cloud metadata
services; all three exist only there.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from strop.sandbox.linux import CLONE_NEWNET, enter_namespaces, unshare

METADATA = "169.254.169.254"
INTERFACE = "198.51.100.1"
"""An address of a range reserved for documentation."""
LISTED, INWARD = "listed", "inward"
_SETTLE_LIMIT_S = 10.0
_TALK_LIMIT_S = 10.0
_MAX_BYTES = 1 << 16


@contextmanager
def own_network() -> Iterator[bool]:
    """Move this thread, and its new children, into a new network for the block; yield False if impossible.

    Needs root and the program ip. Other threads stay in the host's network.
    """
    ip = shutil.which("ip")
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            if ip is None or os.geteuid() != 0:
                raise OSError
            unshare(CLONE_NEWNET)
        except OSError:
            yield False
            return
        try:
            yield _set_up(ip)
        finally:
            enter_namespaces(before, CLONE_NEWNET)
    finally:
        os.close(before)


def _set_up(ip: str) -> bool:
    def run(*words: str) -> bool:
        return subprocess.run([ip, *words], check=False, capture_output=True).returncode == 0

    is_up = run("link", "set", "lo", "up")
    # On a kernel without dummy interfaces the loopback gets the addresses.
    name = "outside" if run("link", "add", "outside", "type", "dummy") else "lo"
    for address in (METADATA, INTERFACE):
        is_up = is_up and run("address", "add", f"{address}/32", "dev", name)
    return is_up and run("link", "set", name, "up")


@dataclass(kw_only=True)
class Door:
    """A listener and the bytes that it received."""

    name: str
    family: int
    kind: int
    address: tuple[str, int] | str
    heard: list[bytes] = field(default_factory=list)
    answer: bytes = b""

    @property
    def port(self) -> int:
        """The port of a TCP or UDP listener."""
        return int(self.address[1])

    @property
    def words(self) -> list[object]:
        """The values for an attack program, as JSON."""
        return [self.name, int(self.family), int(self.kind), self.address]

    async def heard_of(self, token: str) -> bool:
        """Return whether a token was received, once all bytes sent before have arrived."""
        own = secrets.token_bytes(8)
        async with asyncio.timeout(_SETTLE_LIMIT_S):
            with socket.socket(self.family, self.kind) as knock:
                knock.connect(self.address)
                knock.send(own)
            while True:
                if own in self.heard:
                    return any(token.encode() in data for data in self.heard)
                await asyncio.sleep(0.001)


@asynccontextmanager
async def open_doors(folder: Path, *, has_own_network: bool) -> AsyncIterator[dict[str, Door]]:
    """Listen for the block at every address of this host; return the listeners by name."""
    doors: dict[str, Door] = {}
    closing = []
    for door in _list_doors(folder, has_own_network=has_own_network):
        with suppress(OSError):
            closing.append(await _open(door))
            doors[door.name] = door
    target = doors["loopback"].port
    doors[LISTED].answer = f"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:{target}/\r\n\r\n".encode()
    try:
        yield doors
    finally:
        for server in closing:
            server.close()


def _list_doors(folder: Path, *, has_own_network: bool) -> list[Door]:
    inet, inet6, unix = socket.AF_INET, socket.AF_INET6, socket.AF_UNIX
    stream, datagram = socket.SOCK_STREAM, socket.SOCK_DGRAM
    doors = [
        Door(name="loopback", family=inet, kind=stream, address=("127.0.0.1", 0)),
        Door(name="loopback of IPv6", family=inet6, kind=stream, address=("::1", 0)),
        Door(name=LISTED, family=inet, kind=stream, address=("127.0.0.1", 0)),
        Door(name=INWARD, family=inet, kind=stream, address=("127.0.0.1", 0)),
        Door(name="abstract socket", family=unix, kind=stream, address=f"\0strop-bait-{os.getpid()}"),
        Door(name="socket file", family=unix, kind=stream, address=str(folder / "socket")),
    ]
    if has_own_network:
        doors += [
            Door(name="interface", family=inet, kind=stream, address=(INTERFACE, 0)),
            Door(name="metadata", family=inet, kind=stream, address=(METADATA, 80)),
            Door(name="name server", family=inet, kind=datagram, address=(INTERFACE, 53)),
        ]
    return doors


async def _open(door: Door) -> asyncio.Server | asyncio.DatagramTransport:
    listener = socket.socket(door.family, door.kind)
    try:
        listener.bind(door.address)
    except OSError:
        listener.close()
        raise
    if isinstance(door.address, tuple):
        # With the port that the kernel chose, without the two further values of IPv6.
        host, port = listener.getsockname()[:2]
        door.address = (host, port)
    elif door.name == "socket file":
        os.chmod(door.address, 0o777)
    listener.setblocking(False)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(_TALK_LIMIT_S):
                door.heard.append(await reader.read(_MAX_BYTES))
                writer.write(door.answer)
        writer.close()

    if door.kind == socket.SOCK_DGRAM:
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_datagram_endpoint(lambda: _Datagrams(door.heard), sock=listener)
        return transport
    start = asyncio.start_unix_server if door.family == socket.AF_UNIX else asyncio.start_server
    return await start(talk, sock=listener)


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self, heard: list[bytes]) -> None:
        self._heard = heard

    def datagram_received(self, data: bytes, address: object) -> None:
        self._heard.append(data)
