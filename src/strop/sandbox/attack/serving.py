"""Attacks on the sandbox service by its clients: row 25, only on backend `remote`."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Iterable
from contextlib import AsyncExitStack, suppress
from urllib.parse import urlsplit

from strop.io.endpoints import Endpoint
from strop.sandbox.attack.contract import SMALL, Attack, Code, Observation, always, attack
from strop.sandbox.attack.stage import Stage, parent_of, peak_bytes
from strop.sandbox.contract import MIB, IsolationLevel, SandboxSpec
from strop.sandbox.family import find_descendants
from strop.sandbox.remote import RemoteBackend, RemoteSandbox
from strop.sandbox.wire import CONNECT_PATH, FRAMES_PATH, PROTOCOL, SANDBOX_KEY_HEADER, SERVICE_KEY_HEADER

ATTACKS: list[Attack] = []
_ANSWER_LIMIT_S = 20.0
_BODY_BYTES = 1 << 30
_MAX_GROWTH_BYTES = 64 * MIB
_MAX_SILENT = 500
_OWN_FILES = 300
"""Descriptors reserved for other purposes of this process."""
_TARGETS = ("GET /list", "GET /metrics", "GET /runtime/{id}", "POST /start", "POST /stop", "POST /nodes/n")
_ODD_IDS = ("..", "../keys", "%2e%2e%2fkeys", "..%2f..%2fkeys", "%00", "a%2fb", "%0d%0ax:y", "a" * 5000)


@attack(
    ATTACKS,
    25,
    tries="use the service, and a sandbox at its node, without a key, with wrong ones, and with each other's",
    judged="statuses of all answers, and whether the sandbox answers",
    expects=always(Code.BLOCKED),
)
async def _service_without_key(stage: Stage) -> Observation:
    service, sandbox = _of(stage)
    wrong = ("", "wrong", service.key[:-1], f"{service.key}x")
    statuses = set()
    for key in (*wrong, sandbox.address.key):
        for target in _TARGETS:
            request = target.format(id=stage.token)
            status, _ = await _ask(service.url, f"{request} HTTP/1.1", f"{SERVICE_KEY_HEADER}: {key}")
            statuses.add(status)
    upgrade = ("connection: upgrade", f"upgrade: {PROTOCOL}")
    for key in (*wrong, service.key):
        for path in (FRAMES_PATH, f"{CONNECT_PATH}?port=1"):
            head = (f"GET {path} HTTP/1.1", f"{SANDBOX_KEY_HEADER}: {key}", *upgrade)
            status, _ = await _ask(sandbox.address.url, *head)
            statuses.add(status)
    is_kept = statuses == {401} and await stage.is_alive() == "alive"
    return Observation(Code.BLOCKED if is_kept else Code.EXPOSED, f"answers: {sorted(statuses)}")


@attack(
    ATTACKS,
    25,
    tries="ask with its key for ids that climb, have slashes, NUL, line ends, or 5,000 characters",
    judged="statuses of all answers, and keys in them",
    expects=always(Code.BLOCKED),
)
async def _service_odd_ids(stage: Stage) -> Observation:
    service, _ = _of(stage)
    answers = [
        await _ask(service.url, f"GET /{place}/{name} HTTP/1.1", f"{SERVICE_KEY_HEADER}: {service.key}")
        for place in ("runtime", "sessions")
        for name in _ODD_IDS
    ]
    statuses = sorted({status for status, _ in answers})
    has_key = any(service.key.encode() in text for _, text in answers)
    is_kept = all(400 <= status < 500 for status in statuses) and not has_key
    return Observation(
        Code.BLOCKED if is_kept else Code.EXPOSED, f"answers: {statuses}, a key in them: {has_key}"
    )


@attack(
    ATTACKS,
    25,
    tries="send bodies of 1 GiB, with and without their length",
    judged="statuses of the answers, and the memory of the service's processes",
    expects=always(Code.BLOCKED),
)
async def _service_large_body(stage: Stage) -> Observation:
    service, _ = _of(stage)
    # The daemon is the node's child, and the node a child of the process above node and controller.
    keeper = parent_of(parent_of(parent_of(stage.sandbox.supervisor_pid)))
    pids = [pid for pid in find_descendants(keeper) if parent_of(pid) == keeper]
    before = {pid: peak_bytes(pid) for pid in pids}
    key = f"{SERVICE_KEY_HEADER}: {service.key}"
    statuses = set()
    for header, chunk in (
        (f"content-length: {_BODY_BYTES}", bytes(MIB)),
        ("transfer-encoding: chunked", b"%x\r\n" % MIB + bytes(MIB) + b"\r\n"),
    ):
        parts = (chunk for _ in range(_BODY_BYTES // MIB))
        status, _ = await _ask(service.url, "POST /start HTTP/1.1", key, header, parts=parts)
        statuses.add(status)
    growth = max(peak_bytes(pid) - before[pid] for pid in pids)
    # 0: the connection was closed while the body was sent, and the answer was lost.
    is_kept = statuses <= {0, 413} and growth < _MAX_GROWTH_BYTES and len(pids) == 2
    return Observation(
        Code.BLOCKED if is_kept else Code.EXPOSED, f"answers: {sorted(statuses)}, {growth >> 20} MiB more"
    )


@attack(
    ATTACKS,
    25,
    tries=f"hold up to {_MAX_SILENT} connections that say nothing, or half of a request",
    judged="whether others still get a sandbox",
    expects=always(Code.CONTAINED),
)
async def _service_silent_connections(stage: Stage) -> Observation:
    service, _ = _of(stage)
    where = urlsplit(service.url)
    num_connections = min(_MAX_SILENT, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _OWN_FILES)
    async with AsyncExitStack() as stack:
        for number in range(num_connections):
            _, writer = await asyncio.open_connection(where.hostname, where.port)
            stack.callback(writer.close)
            writer.write(b"GET /list HTTP/1.1\r\n" if number % 2 else b"")
        spec = SandboxSpec(limits=SMALL, min_level=IsolationLevel.NONE)
        async with await stage.backend.create(spec) as sandbox:
            result = await sandbox.exec(["/bin/true"], wall_limit_s=_ANSWER_LIMIT_S)
    code = Code.CONTAINED if result.exit_code == 0 else Code.EXPOSED
    return Observation(code, f"another was made beside {num_connections} connections")


def _of(stage: Stage) -> tuple[Endpoint, RemoteSandbox]:
    assert isinstance(stage.backend, RemoteBackend)
    assert isinstance(stage.sandbox, RemoteSandbox)
    return stage.backend.endpoint, stage.sandbox


async def _ask(url: str, *head: str, parts: Iterable[bytes] = ()) -> tuple[int, bytes]:
    """Send a request, and return status and text of the answer; 0 if there is none."""
    where = urlsplit(url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    lines = [*head, "host: x"] if "upgrade" in "".join(head) else [*head, "host: x", "connection: close"]

    async def send() -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()

    sending = None
    try:
        writer.write("\r\n".join([*lines, "", ""]).encode())
        sending = asyncio.ensure_future(send())
        async with asyncio.timeout(_ANSWER_LIMIT_S):
            text = b""
            with suppress(ConnectionError):
                text = await reader.readuntil(b"\r\n\r\n")
                with suppress(TimeoutError):
                    text += await asyncio.wait_for(reader.read(), timeout=1.0)
    finally:
        if sending is not None:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        writer.transport.abort()
    return (int(text.split()[1]) if text else 0), text
