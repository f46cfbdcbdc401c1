"""The list of hosts that a sandbox may reach: `allow:HOST:PORT,HOST:PORT`.

A host is a name, an IPv4 address, or an IPv6 address in brackets. It matches exactly: no subdomain, no other
port. A name is resolved outside, and its address must be public or itself in the list, with the port. So a
name that its owner points at the host's network or at a cloud's metadata service is refused, and a service of
a private network is listed by name and address.

Covered: every spelling of an address, IPv4 addresses inside of IPv6 ones. Not covered: a listed host that
forwards requests.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv4Address, IPv6Address, IPv6Network, ip_address

from strop.errors import SandboxRefused

PREFIX = "allow:"
ALLOWED = f"none, host, or {PREFIX}HOST:PORT,HOST:PORT"
_MAX_ENDPOINTS = 100
_MAX_HOST = 253
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
# A C library parses a name whose last label looks like this as an address.
_NUMBER = re.compile(r"0x[0-9a-f]*|[0-9]+")
_UNICAST = IPv6Network("2000::/3")
_EMBEDDING = tuple(map(IPv6Network, ("2002::/16", "2001::/32")))
"""IPv6 networks whose addresses embed an IPv4 address (RFC 3056, 4380)."""
_METADATA = IPv4Address("168.63.129.16")
"""Azure's metadata service, the only one at a public address."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AllowList:
    """Hosts and ports in canonical form."""

    endpoints: frozenset[tuple[str, int]]

    def __str__(self) -> str:
        """Return the list in a spec's format, sorted."""
        return PREFIX + ",".join(
            f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in sorted(self.endpoints)
        )

    def has(self, host: str, port: int) -> bool:
        """Return whether a program may connect to a host and port."""
        return (host, port) in self.endpoints

    def may_connect(self, address: str, port: int) -> bool:
        """Return whether the proxy may connect to an address that an allowed name resolved to."""
        bare, percent, _ = address.partition("%")
        # A zone names an interface of this host.
        return not percent and ((normalize_host(bare), port) in self.endpoints or _is_public(bare))


def parse_network(text: str) -> AllowList | None:
    """Return the list of a spec's `network`; None for 'none' and 'host'.

    Raises: ValueError naming the fault.
    """
    if text in ("none", "host"):
        return None
    if not text.startswith(PREFIX):
        raise ValueError("there is no such network")
    endpoints = frozenset(map(parse_endpoint, text.removeprefix(PREFIX).split(",")))
    if len(endpoints) > _MAX_ENDPOINTS:
        raise ValueError(f"it names {len(endpoints)} hosts and ports; at most {_MAX_ENDPOINTS} may be")
    return AllowList(endpoints=endpoints)


def refuse_network(network: str, backend: str) -> None:
    """Refuse a network that is malformed or that the backend does not support.

    Raises: SandboxRefused with kind network.
    """
    why, next_step = "", "leave the network out: there is none then"
    try:
        if parse_network(network) is not None and backend == "process":
            why, next_step = "it has this host's network", "use backend bubblewrap, podman or docker"
    except ValueError as error:
        why = str(error)
    if why:
        raise SandboxRefused(
            f"network {network!r} in a {backend} sandbox: {why}",
            allowed="none or host" if backend == "process" else ALLOWED,
            next_step=next_step,
            kind="network",
        )


def parse_endpoint(text: str) -> tuple[str, int]:
    """Return host and port of `HOST:PORT`, the host in canonical form. Raises: ValueError."""
    host, colon, port = text.rpartition(":")
    if not colon or not (port.isascii() and port.isdecimal() and len(port) <= 5 and 0 < int(port) < 1 << 16):
        raise ValueError(f"{text!r} is not HOST:PORT")
    return normalize_host(host), int(port)


def normalize_host(text: str) -> str:
    """Return a host in canonical form: lower case, no trailing dot, an IPv6 address at its shortest.

    Raises: ValueError for what is neither a name nor an address.
    """
    host = text.lower().removesuffix(".")
    is_in_brackets = host.startswith("[") and host.endswith("]")
    try:
        return str(IPv6Address(host[1:-1] if is_in_brackets else host)) if "%" not in host else _no_host(text)
    except AddressValueError:
        if is_in_brackets or ":" in host:
            _no_host(text)
    try:
        return str(IPv4Address(host))
    except AddressValueError:
        labels = host.split(".")
    is_name = len(host) <= _MAX_HOST and all(map(_LABEL.fullmatch, labels))
    if not is_name or _NUMBER.fullmatch(labels[-1]):
        _no_host(text)
    return host


def _no_host(text: str) -> str:
    raise ValueError(f"{text!r} is no host: a name, an IPv4 address or an IPv6 address in brackets")


def _is_public(text: str) -> bool:
    address = ip_address(text)
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return _is_public(str(address.ipv4_mapped))
        if address not in _UNICAST or any(address in network for network in _EMBEDDING):
            return False
    return address.is_global and not address.is_multicast and address != _METADATA
