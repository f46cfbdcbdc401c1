"""The control connection of a job's hosts: who is there, who has ended, and with which code all end.

The first host listens; the others connect, say who they are, and wait until all are there. Then each says
when it ends, and why; the first host tells the others. What comes from other hosts is written where the
agent looks for it on a shared file system (`exit/<node>`, `alive`), so an agent behaves the same everywhere.
The file by which roles of several hosts meet is repeated in the same way. It holds a token, so both sides
first prove that they know the job's key (`link_proof`).
A lost connection is a lost host: nobody waits for ever. One that only lends what a run can do without ends
nobody else: whoever used it knows better what is left.
"""

from __future__ import annotations

import json
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from strop.errors import CheckRefused, StoreError, explain_refusal
from strop.launch.exit_codes import combine
from strop.launch.sagemaker.link_proof import is_proof, prove
from strop.launch.sagemaker.opt_ml import Hosts
from strop.launch.secrets import write_private

PORT = 7777
SIGN_EVERY_S = 2.0
SILENCE_LIMIT_S = 30.0
END_LIMIT_S = 30.0
"""How long the others may take to end once the first host has its verdict."""
_PAUSE_S = 0.2
_GREETING_LIMIT_S = 5.0
_LOST = 1


class Control:
    """One host's side. Make it with `join_hosts`."""

    def __init__(self, hosts: Hosts, links: dict[int, socket.socket], attempt_path: Path) -> None:
        self._hosts, self._links, self._attempt_path = hosts, links, attempt_path
        self._dispensable: Collection[int] = ()
        self._lost: set[int] = set()
        self._meeting_path: Path | None = None
        self._meeting: dict[str, Any] | None = None
        self.codes: dict[int, int] = {}
        """Exit codes of nodes that have said theirs, this one's too."""
        self.causes: list[tuple[int, str]] = []
        """Nodes and their causes, in the order in which they became known."""
        self.verdict: int | None = None
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._heard_at = dict.fromkeys(links, time.monotonic())
        self._stopped = threading.Event()

    @property
    def is_head(self) -> bool:
        """Whether this host decides."""
        return self._hosts.is_head

    def start(self, *, meeting_path: Path | None = None, dispensable: Collection[int] = ()) -> None:
        """Begin to listen to every link, and to give signs of life.

        `meeting_path`: a file of JSON that appears and goes on the first host, and is to do so on all.
        `dispensable`: nodes whose loss ends nobody else.
        """
        self._meeting_path, self._dispensable = meeting_path, dispensable
        if meeting_path is not None and self._hosts.is_head and self._links:
            threading.Thread(target=self._repeat_meeting, name="meeting-to-hosts", daemon=True).start()
        for node, link in self._links.items():
            threading.Thread(target=self._listen, args=(node, link), name=f"host-{node}", daemon=True).start()
        threading.Thread(target=self._give_signs, name="signs-to-hosts", daemon=True).start()

    def finish(self, exit_code: int, cause: str) -> int:
        """Say that this host has ended; return the code that all end with."""
        self._note(self._hosts.node, exit_code, cause)
        self._tell({"kind": "exit", "node": self._hosts.node, "code": exit_code, "cause": cause})
        if not self._hosts.is_head:
            self._wait(lambda: self.verdict is not None, END_LIMIT_S * 2)
            return exit_code or _LOST if self.verdict is None else self.verdict
        self._wait(lambda: len(self.codes) == len(self._hosts.names), END_LIMIT_S)
        is_success = exit_code == 0
        # After the first host's success the others are told to end: how they do so is no failure.
        nodes = [node for node in range(len(self._hosts.names)) if node not in self._lost]
        codes = [self.codes.get(node, 0 if is_success else None) for node in nodes]
        self.verdict = combine(codes)
        self._tell({"kind": "verdict", "code": self.verdict})
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
        self._lose(node)

    def _take(self, node: int, message: dict[str, Any]) -> None:
        kind = message.get("kind")
        if kind == "exit":
            self._note(int(message["node"]), int(message["code"]), str(message["cause"]))
            if self._hosts.is_head:
                self._tell(message, but=node)
        elif kind == "verdict":
            with self._changed:
                self.verdict = int(message["code"])
                self._changed.notify_all()
        elif kind == "alive" and not self._hosts.is_head:
            with suppress(OSError):
                (self._attempt_path / "alive").write_text(str(time.time()))
        elif kind == "meeting" and not self._hosts.is_head and self._meeting_path is not None:
            _write_meeting(self._meeting_path, message.get("content"))

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

    def _lose(self, node: int) -> None:
        """A link that ends without a code is a host that was lost."""
        if self._stopped.is_set() or node in self.codes or self.verdict is not None:
            return
        host = self._hosts.names[node]
        cause = f"host {host} was lost: its control connection ended without an exit code"
        if node in self._dispensable:
            # The run knows what lived there, and goes on or ends by itself.
            with self._changed:
                self._lost.add(node)
                self.codes[node] = _LOST
                self._changed.notify_all()
            sys.stderr.write(f"{cause}; the run decides what follows\n")
            return
        self._note(node, _LOST, cause)
        if self._hosts.is_head:
            self._tell({"kind": "exit", "node": node, "code": _LOST, "cause": cause}, but=node)

    def _give_signs(self) -> None:
        while not self._stopped.wait(SIGN_EVERY_S):
            self._tell({"kind": "alive"})
            for node, heard_at in list(self._heard_at.items()):
                if time.monotonic() - heard_at > SILENCE_LIMIT_S and node not in self.codes:
                    self._lose(node)

    def _repeat_meeting(self) -> None:
        """Send the file that is there, and that there is none any more."""
        while not self._stopped.wait(_PAUSE_S):
            content = _read_meeting(self._meeting_path)
            if content != self._meeting:
                self._meeting = content
                self._tell({"kind": "meeting", "content": content})

    def _tell(self, message: dict[str, Any], *, but: int | None = None) -> None:
        data = json.dumps(message).encode() + b"\n"
        for node, link in self._links.items():
            if node != but:
                # Its own listener notices the loss.
                with suppress(OSError), self._sending:
                    link.sendall(data)

    def _wait(self, is_done: Callable[[], bool], limit_s: float) -> None:
        with self._changed:
            self._changed.wait_for(is_done, timeout=limit_s)


def join_hosts(
    hosts: Hosts,
    attempt_path: Path,
    *,
    key: str,
    limit_s: float,
    port: int = PORT,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Control:
    """Wait until all hosts are there, each of which has proven that it knows the job's `key`.

    Raises: CheckRefused naming the hosts that are missing after the limit, or that a stop was asked for.
    """
    if len(hosts.names) == 1:
        return Control(hosts, {}, attempt_path)
    if hosts.is_head:
        links = _gather(hosts, key, port, limit_s, is_stopped)
    else:
        links = {0: _connect(hosts, key, port, limit_s, is_stopped)}
    return Control(hosts, links, attempt_path)


def find_address(host: str, limit_s: float) -> str:
    """Return the address of a host; names may not resolve in a container's first seconds.

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
            _refuse_late(hosts, links, deadline, limit_s, is_stopped)
            with suppress(TimeoutError):
                link, _ = server.accept()
                said = _greet(link, hosts, key)
                if said is None:
                    link.close()
                else:
                    node = hosts.names.index(said["host"])
                    links[node], challenges[node] = link, str(said.get("challenge"))
    for node, link in links.items():
        proof = prove(key, "head", hosts.names[node], challenges[node])
        _send(link, {"kind": "start", "proof": proof})
        link.settimeout(None)
    return links


def _greet(link: socket.socket, hosts: Hosts, key: str) -> dict[str, Any] | None:
    """Return what a host of this job says of itself; None for a stranger."""
    link.settimeout(_GREETING_LIMIT_S)
    challenge = secrets.token_hex(16)
    try:
        _send(link, {"challenge": challenge})
        said = next(_read_messages(link), {})
    except (OSError, ValueError):
        return None
    host = said.get("host")
    is_ours = host in hosts.names[1:] and is_proof(said.get("proof"), key, "host", host, challenge)
    return said if is_ours else None


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
            raise _missing([hosts.head], limit_s, why or "a stop was asked for")
        time.sleep(_PAUSE_S)


def _introduce(
    link: socket.socket, hosts: Hosts, key: str, deadline: float, is_stopped: Callable[[], bool]
) -> str:
    """Say who this host is and wait for the start; return why there was none, empty once there was."""
    greeting = _read_line(link, min(deadline, time.monotonic() + _GREETING_LIMIT_S), is_stopped)
    if greeting is None:
        return "whoever listens there said nothing"
    challenge = secrets.token_hex(16)
    proof = prove(key, "host", hosts.current, str(greeting.get("challenge")))
    with suppress(OSError):
        _send(link, {"host": hosts.current, "challenge": challenge, "proof": proof})
    start = _read_line(link, deadline, is_stopped)
    if start is None:
        return "not all hosts came"
    is_head = start.get("kind") == "start"
    if not is_head or not is_proof(start.get("proof"), key, "head", hosts.current, challenge):
        return "whoever listens there does not know the job's key"
    return ""


def _send(link: socket.socket, message: dict[str, Any]) -> None:
    link.sendall(json.dumps(message).encode() + b"\n")


def _read_line(link: socket.socket, deadline: float, is_stopped: Callable[[], bool]) -> dict[str, Any] | None:
    """Return the next message; None if the link ends, the deadline passes, or it is none."""
    link.settimeout(_PAUSE_S)
    said = b""
    while time.monotonic() < deadline and not is_stopped():
        try:
            # Byte by byte: what follows the line belongs to the listener.
            found = link.recv(1)
        except TimeoutError:
            continue
        except OSError:
            return None
        if not found:
            return None
        said += found
        if found == b"\n":
            with suppress(ValueError):
                message = json.loads(said)
                return message if isinstance(message, dict) else None
            return None
    return None


def _refuse_late(
    hosts: Hosts,
    links: dict[int, socket.socket],
    deadline: float,
    limit_s: float,
    is_stopped: Callable[[], bool],
) -> None:
    if time.monotonic() <= deadline and not is_stopped():
        return
    for link in links.values():
        link.close()
    missing = [host for node, host in enumerate(hosts.names) if node and node not in links]
    raise _missing(missing, limit_s, "they never came" if not is_stopped() else "a stop was asked for")


def _missing(names: list[str], limit_s: float, why: str) -> CheckRefused:
    return CheckRefused(
        explain_refusal(
            f"host {', '.join(names)} did not join within {limit_s:.0f} s ({why})",
            allowed="all hosts of the job, which reach each other by name",
            next_step="look at the logs of that host, and at the security group's rule to itself",
        )
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


def _read_meeting(path: Path | None) -> dict[str, Any] | None:
    """Return what stands in the file by which roles meet; None without it. It appears whole."""
    with suppress(OSError, ValueError):
        if path is not None:
            content = json.loads(path.read_bytes())
            return content if isinstance(content, dict) else None
    return None


def _write_meeting(path: Path, content: dict[str, Any] | None) -> None:
    """Repeat the file here, for this user alone, or remove it."""
    # A full disk: whoever waits for the file says that it did not come.
    with suppress(OSError, StoreError):
        if content is None:
            path.unlink(missing_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_private(path, content)
