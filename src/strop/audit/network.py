"""The probe of the network: does a program that is judged reach anything beyond its sandbox?

The audit listens on this machine, and a program tries to be heard; beside that it tries names, a way
outwards and the sockets of others. Nothing is sent to anybody: connections are opened and closed, and
the way outwards is only asked for.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from strop.audit.measure import not_applicable
from strop.audit.report import ProbeResult
from strop.audit.targets import NO_PROGRAMS, Tally, find_targets, marker_of, try_breaches
from strop.audit.world import AuditWorld


@dataclass(frozen=True, kw_only=True, slots=True)
class HostDoors:
    """Where this machine listens while programs are judged."""

    loopback_ports: Mapping[str, int]
    """Port by address."""
    abstract_name: str | None
    """Without its leading zero byte; None where this system has no such sockets."""
    socket_path: str


async def probe_network(world: AuditWorld) -> ProbeResult:
    """A program reaches no address, no name and no socket beyond its sandbox."""
    targets = find_targets(world)
    if not targets:
        return not_applicable("network", NO_PROGRAMS)
    tally = Tally(probe="network", world=world)
    with open_doors(f"{marker_of(world)}net") as doors:
        await try_breaches(tally, targets, network_breaches(doors))
    if not tally.num:
        return not_applicable("network", "no right program is known")
    return tally.result("ways out of the sandbox")


@contextmanager
def open_doors(name: str) -> Iterator[HostDoors]:
    """Listen on loopback, under an abstract name and at a path, until the end of the block."""
    with ExitStack() as stack:
        ports = {}
        for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
            # A machine may be without one of the two.
            with suppress(OSError):
                ports[address] = _listen(stack, family, (address, 0)).getsockname()[1]
        abstract_name = None
        with suppress(OSError):
            _listen(stack, socket.AF_UNIX, f"\0{name}")
            abstract_name = name
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="strop-audit-")))
        folder.chmod(0o755)
        path = str(folder / "door")
        _listen(stack, socket.AF_UNIX, path)
        # Whether a sandbox shows it shall decide, and not whose it is.
        os.chmod(path, 0o777)
        yield HostDoors(loopback_ports=ports, abstract_name=abstract_name, socket_path=path)


def _listen(stack: ExitStack, family: int, address: tuple[str, int] | str) -> socket.socket:
    listener = stack.enter_context(socket.socket(family))
    listener.bind(address)
    listener.listen()
    return listener


_REACH = """
import os, socket, stat
def reaches(family, address, kind=socket.SOCK_STREAM):
    try:
        with socket.socket(family, kind) as caller:
            caller.settimeout(0.5)
            caller.connect(address)
        return True
    except (OSError, ValueError):
        return False
"""
_OUTWARDS = """
def breached():
    # Addresses that are kept for examples. Connecting a datagram socket only looks for a way to them.
    return reaches(socket.AF_INET, ("192.0.2.1", 9), socket.SOCK_DGRAM) or reaches(
        socket.AF_INET6, ("2001:db8::1", 9), socket.SOCK_DGRAM)
"""
_NAMES = """
def breached():
    try:
        return bool(socket.getaddrinfo("example.org", 80))
    except OSError:
        return False
"""
_FILES = """
def breached():
    places = [PATH]
    for top in ("/run", "/var/run", "/tmp", "/dev", "/var/lib"):
        for folder, _, names in os.walk(top):
            places += [os.path.join(folder, name) for name in names[:100]]
            if len(places) > 2000:
                break
    for place in places:
        try:
            if not stat.S_ISSOCK(os.stat(place).st_mode):
                continue
        except OSError:
            continue
        if reaches(socket.AF_UNIX, place) or reaches(socket.AF_UNIX, place, socket.SOCK_DGRAM):
            return True
    return False
"""


def network_breaches(doors: HostDoors) -> Mapping[str, str]:
    """Return checks that each try one way out of a sandbox."""
    found = {
        f"loopback of this machine ({address})": _connects(
            "socket.AF_INET6" if ":" in address else "socket.AF_INET", (address, port)
        )
        for address, port in doors.loopback_ports.items()
    }
    if doors.abstract_name is not None:
        found["abstract sockets of this machine"] = _connects("socket.AF_UNIX", f"\0{doors.abstract_name}")
    return found | {
        "socket files of this machine": _REACH + _FILES.replace("PATH", repr(doors.socket_path)),
        "a way outwards": _REACH + _OUTWARDS,
        "names are resolved": _REACH + _NAMES,
    }


def _connects(family: str, address: tuple[str, int] | str) -> str:
    return f"{_REACH}\ndef breached():\n    return reaches({family}, {address!r})\n"
