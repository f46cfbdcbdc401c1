"""Attacks on the network: rows 16 and 17. They only target listeners of the suite."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

from strop.errors import SandboxRefused
from strop.sandbox.attack.contract import Attack, Code, Observation, Work, always, attack, by_namespace
from strop.sandbox.attack.doors import INTERFACE, INWARD, LISTED, METADATA
from strop.sandbox.attack.rights import holds
from strop.sandbox.attack.stage import Stage
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
_ASK = """
host, _, port = os.environ["http_proxy"].rpartition("/")[2].partition(":")
for head in json.loads(sys.argv[2]):
    caller = socket.create_connection((host, int(port)), 20)
    caller.sendall(head.replace("TOKEN", TOKEN).encode("latin-1"))
    attempt(caller.recv, 4096)
    # If a tunnel was opened, this goes through it.
    attempt(caller.sendall, sys.argv[3].replace("TOKEN", TOKEN).encode())
    while attempt(caller.recv, 4096):
        pass
    caller.close()
"""
_FOLLOW = """
import urllib.request
attempt(urllib.request.urlopen, sys.argv[2], None, 20)
"""
_FAMILIES = """
confined = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)
kinds = [(family, kind, 0) for family in set(range(64)).difference(confined) for kind in range(1, 6)]
kinds += [(socket.AF_NETLINK, socket.SOCK_RAW, protocol) for protocol in range(1, 32)]
kinds += [(socket.AF_PACKET, kind, 3 << 8) for kind in (socket.SOCK_DGRAM, socket.SOCK_RAW)]
kinds += [(socket.AF_INET, socket.SOCK_RAW, 1), (socket.AF_INET6, socket.SOCK_RAW, 58)]
kept = [attempt(socket.socket, *kind) for kind in kinds]
hold()
"""


async def _reach(stage: Stage, names: tuple[str, ...]) -> Observation:
    doors = [stage.bait.doors[name] for name in names if name in stage.bait.doors]
    if not doors:
        # The suite listens there only in its own network.
        code = Code.BLOCKED if stage.isolation.netns else Code.EXPOSED
        return Observation(code, "not made, for want of a network of the suite's own; by the record")
    await stage.python(_CALL, json.dumps([door.words for door in doors]))
    heard = [door.name for door in doors if await door.heard_of(stage.token)]
    return Observation(Code.EXPOSED if heard else Code.BLOCKED, ", ".join(heard) or "nothing was heard")


ATTACKS += [
    Attack(
        row=16,
        name=f"reach-{name}",
        tries=tries,
        judged=_HEARD,
        expects=by_namespace("mountns" if doors == ("socket file",) else "netns"),
        work=partial(_reach, names=doors),
    )
    for name, tries, doors in (
        ("loopback", "call this host's loopback, IPv4 and IPv6", ("loopback", "loopback of IPv6")),
        ("interface", "call an address of this host's interface", ("interface",)),
        ("metadata", "call the address from which clouds serve metadata", ("metadata",)),
        ("name-server", "ask a name server, by UDP", ("name server",)),
        ("abstract-socket", "connect to an abstract Unix socket", ("abstract socket",)),
        ("socket-file", "connect to a Unix socket in a file", ("socket file",)),
    )
]


@attack(
    ATTACKS,
    16,
    tries="call a server in another sandbox, by TCP and an abstract socket",
    judged="what the other server heard",
    expects=by_namespace("netns"),
)
async def _reach_other(stage: Stage) -> Observation:
    await stage.python(_CALL, json.dumps(stage.control.doors()))
    is_heard = await stage.control.visits(stage.token)
    return Observation(
        Code.EXPOSED if is_heard else Code.BLOCKED, "heard" if is_heard else "nothing was heard"
    )


@attack(
    ATTACKS,
    16,
    tries="open sockets of every family but files', IP and netlink's routes, and raw ones",
    judged="sockets of its process, seen on the host",
    expects=always(Code.BLOCKED),
)
async def _socket_families(stage: Stage) -> Observation:
    return await holds(stage, _FAMILIES, (), lambda link: link.startswith("socket:"))


@attack(
    ATTACKS,
    17,
    tries="be given a list of hosts that is open: every host, every port, a network",
    judged="whether a sandbox is made",
    expects=always(Code.BLOCKED),
)
async def _open_list(stage: Stage) -> Observation:
    for network in ("allow:*:443", "allow:example.invalid", "allow:0x7f.1:80", "allow:", "bridge"):
        spec = SandboxSpec(network=network, min_level=IsolationLevel.NONE)
        try:
            async with await stage.backend.create(spec) as sandbox:
                return Observation(Code.EXPOSED, f"made, with network {sandbox.isolation.network}")
        except SandboxRefused as refusal:
            kind = refusal.kind
    return Observation(Code.BLOCKED, f"refused: {kind}")


def _listed_attack(tries: str) -> Callable[[Work], Work]:
    return attack(
        ATTACKS,
        17,
        tries=f"with a list of hosts: {tries}",
        judged="what the suite's listeners heard, and tries in the log of refusals",
        expects=by_namespace("netns"),
        has_list=True,
    )


@_listed_attack("ask for other names, with a secret in them too")
async def _list_other_host(stage: Stage) -> Observation:
    port = stage.bait.doors[LISTED].port
    names = (
        "TOKEN.example.invalid",
        "TOKEN.localhost",
        f"localhost:{port}.example.invalid",
        "localhost.evil",
    )
    return await _ask(stage, *(f"CONNECT {name}:{port} HTTP/1.1" for name in names))


@_listed_attack("ask for another port of a host in it")
async def _list_other_port(stage: Stage) -> Observation:
    targets = [f"{host}:{stage.bait.doors['loopback'].port}" for host in ("localhost", "127.0.0.1")]
    tunnels = [f"CONNECT {target} HTTP/1.1" for target in targets]
    return await _ask(stage, *tunnels, *(f"GET http://{target}/TOKEN HTTP/1.1" for target in targets))


@_listed_attack("ask for addresses, in every spelling, of IPv6 and of metadata too")
async def _list_addresses(stage: Stage) -> Observation:
    doors = stage.bait.doors
    hosts = ["127.1", "2130706433", "0x7f000001", "0177.0.0.1", "0", "[::ffff:127.0.0.1]", "[::1]", "[::]"]
    targets = [f"{host}:{doors['loopback'].port}" for host in (*hosts, "127.0.0.2", INTERFACE)]
    targets += [f"{host}:{doors[LISTED].port}" for host in ("127.1", "[::ffff:7f00:1]", "[::1]")]
    targets += [f"{METADATA}:80", f"[::ffff:{METADATA}]:80"]
    return await _ask(stage, *(f"CONNECT {target} HTTP/1.1" for target in targets))


@_listed_attack("ask for a name in it that leads to this host's own network")
async def _list_rebound_name(stage: Stage) -> Observation:
    target = f"localhost:{stage.bait.doors[INWARD].port}"
    return await _ask(stage, f"CONNECT {target} HTTP/1.1", f"GET http://{target}/TOKEN HTTP/1.1")


@_listed_attack("be sent elsewhere by a host in it")
async def _list_redirect(stage: Stage) -> Observation:
    await stage.python(_FOLLOW, f"http://localhost:{stage.bait.doors[LISTED].port}/{stage.token}")
    return await _heard_by_list(stage, 1)


@_listed_attack("hide a request behind, and in, one for a host in it")
async def _list_hidden_request(stage: Stage) -> Observation:
    port, other = (stage.bait.doors[name].port for name in (LISTED, "loopback"))
    hidden = f"GET http://127.0.0.1:{other}/TOKEN HTTP/1.1"
    first = f"GET http://localhost:{port}/ HTTP/1.1"
    # The first request is answered and the second is dropped, so neither is in the log.
    await stage.python(_ASK, json.dumps([f"{first}\r\n\r\n{hidden}\r\n\r\n"]), "")
    return await _ask(
        stage,
        f"{first}\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n{hidden}",
        f"{first}\r\nContent-Length: 0\r\nContent-Length: 9\r\n\r\n{hidden}",
        f"{first}\r\nHost: a\n\n{hidden}",
        f"GET http://localhost:{port}@127.0.0.1:{other}/TOKEN HTTP/1.1",
        f"GET http://127.0.0.1:{other}\\@localhost:{port}/TOKEN HTTP/1.1",
    )


@_listed_attack("go round its proxy, by TCP, UDP and Unix sockets")
async def _list_way_round(stage: Stage) -> Observation:
    await stage.python(_CALL, json.dumps([door.words for door in stage.bait.doors.values()]))
    return await _ask(stage)


async def _ask(stage: Stage, *requests: str) -> Observation:
    """Send requests for unlisted hosts to the proxy, each followed by a token; then a listed one."""
    await stage.python(_ASK, json.dumps([f"{request}\r\n\r\n" for request in requests]), "TOKEN")
    observed = await _heard_by_list(stage, len(requests), has_listed=False)
    if observed.code > Code.BLOCKED:
        return observed
    # A listed request must work, or the others failed for another reason.
    target = f"127.0.0.1:{stage.bait.doors[LISTED].port}"
    await stage.python(_ASK, json.dumps([f"CONNECT {target} HTTP/1.1\r\n\r\n"]), "TOKEN")
    return await _heard_by_list(stage, len(requests))


async def _heard_by_list(stage: Stage, num_refused: int, *, has_listed: bool = True) -> Observation:
    heard = {door.name for door in stage.bait.doors.values() if await door.heard_of(stage.token)}
    if heard != ({LISTED} if has_listed else set()):
        return Observation(
            Code.EXPOSED, f"heard by: {', '.join(sorted(heard)) or 'nobody, nor by what is listed'}"
        )
    num_logged = (await stage.sandbox.stats()).refused_calls
    code = Code.BLOCKED if num_logged == num_refused else Code.EXPOSED
    return Observation(code, f"{num_logged} of {num_refused} tries are in the log of refusals")
