"""Attacks on the network: rows 16 and 17. They reach for listeners of the suite, and for nothing else."""

from __future__ import annotations

import json

from strop.errors import SandboxRefused
from strop.sandbox.attack.contract import Attack, Code, Seen, always, attack, by_namespace
from strop.sandbox.attack.stage import Stage, read_or_empty, seen
from strop.sandbox.choose import make_backend
from strop.sandbox.contract import IsolationLevel, SandboxSpec

ATTACKS: list[Attack] = []
_HEARD = "what the suite's listener heard"
_CALL = """
for _, family, kind, address in json.loads(sys.argv[2]):
    caller = socket.socket(family, kind)
    caller.settimeout(2)
    attempt(caller.connect, tuple(address) if isinstance(address, list) else address)
    attempt(caller.send, TOKEN.encode())
    caller.close()
"""
_RAW = """
kept = [
    attempt(socket.socket, family, kind, protocol)
    for family, kind, protocol in (
        (socket.AF_INET, socket.SOCK_RAW, 1),
        (socket.AF_INET6, socket.SOCK_RAW, 58),
        (socket.AF_PACKET, socket.SOCK_RAW, 3 << 8),
        (socket.AF_PACKET, socket.SOCK_DGRAM, 3 << 8),
    )
]
hold()
"""


@attack(
    ATTACKS,
    16,
    tries="call this host's loopback, IPv4 and IPv6",
    judged=_HEARD,
    expects=by_namespace("netns"),
)
async def _reach_loopback(stage: Stage) -> Seen:
    return await _reach(stage, "loopback", "loopback of IPv6")


@attack(
    ATTACKS,
    16,
    tries="call an address of this host's interface",
    judged=_HEARD,
    expects=by_namespace("netns"),
)
async def _reach_interface(stage: Stage) -> Seen:
    return await _reach(stage, "interface")


@attack(
    ATTACKS,
    16,
    tries="call the address from which clouds serve metadata",
    judged=_HEARD,
    expects=by_namespace("netns"),
)
async def _reach_metadata(stage: Stage) -> Seen:
    return await _reach(stage, "metadata")


@attack(ATTACKS, 16, tries="ask a name server, by UDP", judged=_HEARD, expects=by_namespace("netns"))
async def _reach_name_server(stage: Stage) -> Seen:
    return await _reach(stage, "name server")


@attack(ATTACKS, 16, tries="connect to an abstract Unix socket", judged=_HEARD, expects=by_namespace("netns"))
async def _reach_abstract_socket(stage: Stage) -> Seen:
    return await _reach(stage, "abstract socket")


@attack(
    ATTACKS, 16, tries="connect to a Unix socket in a file", judged=_HEARD, expects=by_namespace("mountns")
)
async def _reach_socket_file(stage: Stage) -> Seen:
    return await _reach(stage, "socket file")


@attack(
    ATTACKS,
    16,
    tries="call a server in another sandbox, by TCP and an abstract socket",
    judged="what the other server heard",
    expects=by_namespace("netns"),
)
async def _reach_other(stage: Stage) -> Seen:
    await stage.python(_CALL, json.dumps(stage.control.doors()))
    is_heard = await stage.control.visits(stage.token)
    return seen(Code.EXPOSED if is_heard else Code.BLOCKED, "heard" if is_heard else "nothing was heard")


@attack(
    ATTACKS,
    16,
    tries="open raw sockets and packet sockets",
    judged="sockets of its process, seen on the host",
    expects=always(Code.BLOCKED),
)
async def _raw_sockets(stage: Stage) -> Seen:
    async with stage.held(_RAW) as (pids, result):
        if result is not None:
            return seen(Code.EXPOSED, f"it ended: {result.kind.value} {result.stderr[-200:]!r}")
        # A table begins with its header; without such sockets there is nothing behind it.
        tables = {kind: read_or_empty(f"/proc/{pids[0]}/net/{kind}") for kind in ("raw", "raw6", "packet")}
    found = [kind for kind, table in tables.items() if len(table.splitlines()) > 1]
    return seen(Code.EXPOSED if found else Code.BLOCKED, ", ".join(found) or "none was made")


@attack(
    ATTACKS,
    17,
    tries="be given a network that the backend does not have: a list of allowed hosts",
    judged="whether a sandbox is made",
    expects=always(Code.BLOCKED),
)
async def _unknown_network(stage: Stage) -> Seen:
    spec = SandboxSpec(network="allow:example.invalid", min_level=IsolationLevel.NONE)
    try:
        async with await make_backend(stage.isolation.backend).create(spec) as sandbox:
            return seen(Code.EXPOSED, f"made, with network {sandbox.isolation.network}")
    except SandboxRefused as refusal:
        return seen(Code.BLOCKED, f"refused: {refusal.kind}")


async def _reach(stage: Stage, *names: str) -> Seen:
    doors = [stage.bait.doors[name] for name in names if name in stage.bait.doors]
    if not doors:
        # Only in a network of the suite's own may anything be there.
        code = Code.BLOCKED if stage.isolation.netns else Code.EXPOSED
        return seen(code, "not made, for want of a network of the suite's own; by the record")
    await stage.python(_CALL, json.dumps([door.words for door in doors]))
    heard = [door.name for door in doors if await door.heard_of(stage.token)]
    return seen(Code.EXPOSED if heard else Code.BLOCKED, ", ".join(heard) or "nothing was heard")
