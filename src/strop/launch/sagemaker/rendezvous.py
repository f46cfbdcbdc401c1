"""Rendezvous of a job's hosts, and the connections between them until all end with one exit code.

The first host listens; the others connect, identify themselves, and wait for all. Each reports its exit code
and cause; the first host determines the verdict and sends it to the others. Reports of other hosts are
written to the files that the agent reads on a shared file system (`exit/<node>`, `alive`), so an agent
behaves the same everywhere. The first host's rendezvous file of the roles (`record.fence`) is copied to all
hosts; it holds a token, so both sides first prove in a handshake that they know the job's shared key. An
evaluation's files go from the other hosts to the first one (`evaluation_files`).

A lost connection counts as a lost host: no host waits forever. The loss of a host whose roles may be lost
ends no other host: the run itself decides how to go on.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from strop.errors import CheckRefused, StoreError
from strop.launch.attempts import combine
from strop.launch.sagemaker import places
from strop.launch.sagemaker.opt_ml import Hosts, OptMl
from strop.launch.secrets import write_private

PORT = 7777
HEARTBEAT_EVERY_S = 2.0
SILENCE_LIMIT_S = 30.0
END_LIMIT_S = 30.0
"""Seconds for the other hosts to end once the first host has its verdict."""
_PAUSE_S = 0.2
_GREETING_LIMIT_S = 5.0
_LOST = 1


class Rendezvous:
    """One host's connections to the others. Created by `join_hosts`."""

    def __init__(self, hosts: Hosts, links: dict[int, socket.socket], attempt_path: Path) -> None:
        self._hosts, self._links, self._attempt_path = hosts, links, attempt_path
        self._may_be_lost: Collection[int] = ()
        self._lost: set[int] = set()
        self._shared_path: Path | None = None
        self._sent: dict[str, Any] | None = None
        self.codes: dict[int, int] = {}
        """Reported exit codes by node, including this node's."""
        self.causes: list[tuple[int, str]] = []
        """Nodes and their causes, in the order of arrival."""
        self.verdict: int | None = None
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._heard_at = dict.fromkeys(links, time.monotonic())
        self._stopped = threading.Event()

    @property
    def is_head(self) -> bool:
        """Whether this is the first host."""
        return self._hosts.is_head

    def start(
        self,
        *,
        shared_path: Path | None = None,
        may_be_lost: Collection[int] = (),
    ) -> None:
        """Start to listen on every link, and to send heartbeats.

        `shared_path`: a JSON file that the first host copies to the others, and removes there with its own.
        `may_be_lost`: nodes whose loss ends no other node.
        """
        self._shared_path, self._may_be_lost = shared_path, may_be_lost
        if shared_path is not None and self._hosts.is_head and self._links:
            copying = threading.Thread(
                target=self._send_shared_file, args=(shared_path,), name="file-to-hosts", daemon=True
            )
            copying.start()
        for node, link in self._links.items():
            threading.Thread(target=self._listen, args=(node, link), name=f"host-{node}", daemon=True).start()
        threading.Thread(target=self._send_heartbeats, name="heartbeats-to-hosts", daemon=True).start()

    def finish(self, exit_code: int, cause: str) -> int:
        """Report the end of this host; return the exit code of all hosts."""
        self._note(self._hosts.node, exit_code, cause)
        self.send({"kind": "exit", "node": self._hosts.node, "code": exit_code, "cause": cause})
        if not self._hosts.is_head:
            if exit_code == 0:
                # This host is done; the first one may take hours more, and its loss would be noticed.
                self._wait(lambda: self.verdict is not None or 0 in self.codes, None)
            self._wait(lambda: self.verdict is not None, END_LIMIT_S * 2)
            return exit_code or _LOST if self.verdict is None else self.verdict
        self._wait(lambda: len(self.codes) == len(self._hosts.names), END_LIMIT_S)
        is_success = exit_code == 0
        # After the first host's success the others are stopped, so their codes are no failures.
        nodes = [node for node in range(len(self._hosts.names)) if node not in self._lost]
        codes = [self.codes.get(node, 0 if is_success else None) for node in nodes]
        self.verdict = combine(codes)
        self.send({"kind": "verdict", "code": self.verdict})
        return self.verdict

    def close(self) -> None:
        """End all links."""
        self._stopped.set()
        for link in self._links.values():
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
            link.close()

    def _listen(self, node: int, link: socket.socket) -> None:
        try:
            for message in _read_messages(link):
                self._heard_at[node] = time.monotonic()
                self._take(node, message)
        except (OSError, ValueError):
            pass
        self._note_loss(node)

    def _take(self, node: int, message: dict[str, Any]) -> None:
        kind = message.get("kind")
        if kind == "exit":
            self._note(int(message["node"]), int(message["code"]), str(message["cause"]))
            if self._hosts.is_head:
                self.send(message, skip=node)
        elif kind == "verdict":
            with self._changed:
                self.verdict = int(message["code"])
                self._changed.notify_all()
        elif kind == "alive" and not self._hosts.is_head:
            with suppress(OSError):
                (self._attempt_path / "alive").write_text(str(time.time()))
        elif kind == "file" and not self._hosts.is_head and self._shared_path is not None:
            content = message.get("content")
            # On a full disk the reader that waits for the file reports that it is missing.
            with suppress(OSError, StoreError):
                if content is None:
                    self._shared_path.unlink(missing_ok=True)
                else:
                    self._shared_path.parent.mkdir(parents=True, exist_ok=True)
                    write_private(self._shared_path, content)

    def _note(self, node: int, code: int, cause: str) -> None:
        with self._changed:
            if node in self.codes:
                return
            self.codes[node] = code
            if cause:
                self.causes.append((node, cause))
            self._changed.notify_all()
        if node != self._hosts.node:
            with suppress(OSError):
                path = self._attempt_path / "exit" / str(node)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(str(code))

    def _note_loss(self, node: int) -> None:
        """Note the loss of a host, whose link ended without an exit code."""
        if self._stopped.is_set() or node in self.codes or self.verdict is not None:
            return
        host = self._hosts.names[node]
        cause = f"host {host} was lost: its control connection ended without an exit code"
        if node in self._may_be_lost:
            # The run knows the roles of that host, and decides whether it goes on.
            with self._changed:
                self._lost.add(node)
                self.codes[node] = _LOST
                self._changed.notify_all()
            sys.stderr.write(f"{cause}; the run decides what follows\n")
            return
        self._note(node, _LOST, cause)
        if self._hosts.is_head:
            self.send({"kind": "exit", "node": node, "code": _LOST, "cause": cause}, skip=node)

    def _send_heartbeats(self) -> None:
        while not self._stopped.wait(HEARTBEAT_EVERY_S):
            self.send({"kind": "alive"})
            for node, heard_at in list(self._heard_at.items()):
                if time.monotonic() - heard_at > SILENCE_LIMIT_S and node not in self.codes:
                    self._note_loss(node)

    def _send_shared_file(self, path: Path) -> None:
        """Send the file whenever it changes, and None once it is removed."""
        while not self._stopped.wait(_PAUSE_S):
            content = None
            with suppress(OSError, ValueError):
                # The file is written atomically.
                parsed = json.loads(path.read_bytes())
                content = parsed if isinstance(parsed, dict) else None
            if content != self._sent:
                self._sent = content
                self.send({"kind": "file", "content": content})

    def send(self, message: Mapping[str, Any], *, skip: int | None = None) -> None:
        """Send a message over every link; its listener notices a lost link."""
        data = json.dumps(message).encode() + b"\n"
        for node, link in self._links.items():
            if node != skip:
                with suppress(OSError), self._sending:
                    link.sendall(data)

    def _wait(self, is_done: Callable[[], bool], limit_s: float | None) -> None:
        with self._changed:
            self._changed.wait_for(is_done, timeout=limit_s)


def join_hosts(
    hosts: Hosts,
    attempt_path: Path,
    *,
    key: str,
    limit_s: float,
    port: int,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Rendezvous:
    """Wait until all hosts have joined and proven that they know the job's `key`.

    Raises: CheckRefused naming the hosts missing after the limit, or after a stop.
    """
    if len(hosts.names) == 1:
        return Rendezvous(hosts, {}, attempt_path)
    if hosts.is_head:
        links = _gather(hosts, key, port, limit_s, is_stopped)
    else:
        links = {0: _connect(hosts, key, port, limit_s, is_stopped)}
    return Rendezvous(hosts, links, attempt_path)


def find_address(host: str, limit_s: float) -> str:
    """Return the address of a host; in a container's first seconds names may not resolve.

    Raises: CheckRefused naming the host.
    """
    deadline = time.monotonic() + limit_s
    while True:
        try:
            return socket.gethostbyname(host)
        except OSError as error:
            if time.monotonic() > deadline:
                raise _missing([host], limit_s, f"its name does not resolve ({error})") from error
            time.sleep(_PAUSE_S)


def _gather(
    hosts: Hosts, key: str, port: int, limit_s: float, is_stopped: Callable[[], bool]
) -> dict[int, socket.socket]:
    links: dict[int, socket.socket] = {}
    challenges: dict[int, str] = {}
    deadline = time.monotonic() + limit_s
    with socket.create_server(("", port), backlog=len(hosts.names)) as server:
        server.settimeout(_PAUSE_S)
        while len(links) < len(hosts.names) - 1:
            if time.monotonic() > deadline or is_stopped():
                for link in links.values():
                    link.close()
                missing = [host for node, host in enumerate(hosts.names) if node and node not in links]
                why = "they never came" if not is_stopped() else "a stop was requested"
                raise _missing(missing, limit_s, why)
            with suppress(TimeoutError):
                link, _ = server.accept()
                greeting = _greet(link, hosts, key)
                if greeting is None:
                    link.close()
                else:
                    node = hosts.names.index(greeting["host"])
                    links[node], challenges[node] = link, str(greeting.get("challenge"))
    for node, link in links.items():
        proof = prove(key, "head", hosts.names[node], challenges[node])
        _send_to(link, {"kind": "start", "proof": proof})
        link.settimeout(None)
    return links


def _greet(link: socket.socket, hosts: Hosts, key: str) -> dict[str, Any] | None:
    """Challenge a peer; return its greeting if it is a host of this job that knows the key."""
    link.settimeout(_GREETING_LIMIT_S)
    challenge = secrets.token_hex(16)
    try:
        _send_to(link, {"challenge": challenge})
        greeting = next(_read_messages(link), {})
    except (OSError, ValueError):
        return None
    host = greeting.get("host")
    is_ours = host in hosts.names[1:] and is_proof(greeting.get("proof"), key, "host", host, challenge)
    return greeting if is_ours else None


def _connect(
    hosts: Hosts, key: str, port: int, limit_s: float, is_stopped: Callable[[], bool]
) -> socket.socket:
    deadline, why = time.monotonic() + limit_s, ""
    while True:
        try:
            link = socket.create_connection((hosts.head, port), timeout=5.0)
        except OSError as error:
            why = str(error)
        else:
            why = _introduce(link, hosts, key, deadline, is_stopped)
            if not why:
                link.settimeout(None)
                return link
            link.close()
        if time.monotonic() > deadline or is_stopped():
            raise _missing([hosts.head], limit_s, why or "a stop was requested")
        time.sleep(_PAUSE_S)


def _introduce(
    link: socket.socket, hosts: Hosts, key: str, deadline: float, is_stopped: Callable[[], bool]
) -> str:
    """Answer the first host's challenge and wait for the start; return the failure, '' on success."""
    greeting = _read_line(link, min(deadline, time.monotonic() + _GREETING_LIMIT_S), is_stopped)
    if greeting is None:
        return "the listener there sent nothing"
    challenge = secrets.token_hex(16)
    proof = prove(key, "host", hosts.current, str(greeting.get("challenge")))
    with suppress(OSError):
        _send_to(link, {"host": hosts.current, "challenge": challenge, "proof": proof})
    start = _read_line(link, deadline, is_stopped)
    if start is None:
        return "not all hosts came"
    is_head = start.get("kind") == "start"
    if not is_head or not is_proof(start.get("proof"), key, "head", hosts.current, challenge):
        return "the listener there does not know the job's key"
    return ""


def _send_to(link: socket.socket, message: dict[str, Any]) -> None:
    link.sendall(json.dumps(message).encode() + b"\n")


def _read_line(link: socket.socket, deadline: float, is_stopped: Callable[[], bool]) -> dict[str, Any] | None:
    """Return the next message; None if the link ends, the deadline passes, or the line is no JSON object."""
    link.settimeout(_PAUSE_S)
    line = b""
    while time.monotonic() < deadline and not is_stopped():
        try:
            # Byte by byte, because the bytes after the line are for `_listen`.
            byte = link.recv(1)
        except TimeoutError:
            continue
        except OSError:
            return None
        if not byte:
            return None
        line += byte
        if byte == b"\n":
            with suppress(ValueError):
                message = json.loads(line)
                return message if isinstance(message, dict) else None
            return None
    return None


def _missing(names: list[str], limit_s: float, why: str) -> CheckRefused:
    return CheckRefused(
        f"host {', '.join(names)} did not join within {limit_s:.0f} s ({why})",
        allowed="all hosts of the job, which reach each other by name",
        next_step="look at the logs of that host, and at the security group's rule to itself",
    )


def _read_messages(link: socket.socket) -> Iterator[dict[str, Any]]:
    buffer = b""
    while data := link.recv(65536):
        buffer += data
        while b"\n" in buffer:
            line, _, buffer = buffer.partition(b"\n")
            message = json.loads(line)
            if isinstance(message, dict):
                yield message


# The shared-key handshake: the key is 32 random bytes, made at submission and sent in the channel `config`,
# never in a request, which everyone who may describe the job can read. Each side answers the other's
# challenge with a MAC of it. Not covered: later messages are neither encrypted nor signed; `encrypt_traffic`
# of the site profile lets the platform encrypt them.

_NUM_BYTES = 32


def make_key() -> bytes:
    """Return the text of a new key."""
    return secrets.token_hex(_NUM_BYTES).encode()


def read_key(tree: OptMl) -> str:
    """Return the key from the channel `config`. Raises: CheckRefused without one."""
    path = tree.channel_path(places.CONFIG_CHANNEL) / places.LINK_KEY
    try:
        key = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckRefused(f"{path} cannot be read ({type(error).__name__})") from error
    if len(key) != 2 * _NUM_BYTES:
        raise CheckRefused(f"{path} holds {len(key)} characters, not {2 * _NUM_BYTES}")
    return key


def prove(key: str, side: str, host: str, challenge: str) -> str:
    """Return the answer of a side, 'head' or 'host', to the other's challenge. `host`: the joining host."""
    return hmac.digest(key.encode(), f"{side} {host} {challenge}".encode(), "sha256").hex()


def is_proof(answer: object, key: str, side: str, host: object, challenge: str) -> bool:
    """Whether an answer proves knowledge of the key."""
    return isinstance(answer, str) and hmac.compare_digest(
        answer.encode(), prove(key, side, str(host), challenge).encode()
    )
