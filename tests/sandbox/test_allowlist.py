"""A sandbox that may reach a list of hosts and ports reaches these, and nothing else."""

from __future__ import annotations

import asyncio
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from strop.errors import SandboxRefused
from strop.sandbox import IsolationLevel, make_backend
from strop.sandbox.allowlist import AllowList, parse_network
from strop.sandbox.local import LocalBackend
from strop.sandbox.proxy import serve_caller
from tests.fixtures.sandboxes import (
    on_every_backend,
    spec_of,
    with_own_root,
)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("allow:Packages.example.org:443", "allow:packages.example.org:443"),
        ("allow:b:2,a.b.:1,b:2", "allow:a.b:1,b:2"),
        ("allow:10.0.0.7:8000", "allow:10.0.0.7:8000"),
        ("allow:[FD00:0::1]:80,[::ffff:1.2.3.4]:1", "allow:[::ffff:102:304]:1,[fd00::1]:80"),
        ("allow:xn--bcher-kva.example:1,_x.y-z:65535", "allow:_x.y-z:65535,xn--bcher-kva.example:1"),
    ],
)
def test_a_list_has_one_spelling(text: str, meant: str) -> None:
    assert str(parse_network(text)) == meant
    assert parse_network("none") is parse_network("host") is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "bridge",
        "allow:",
        "allow:a",
        "allow:a:",
        "allow:a:0",
        "allow:a:65536",
        "allow:a:-1",
        "allow:a:٣",
        "allow:a:80,",
        "allow:*:80",
        "allow:*.a:80",
        "allow:http://a:80",
        "allow:a b:80",
        "allow:bücher:80",
        "allow:127.1:80",
        "allow:2130706433:80",
        "allow:0x7f000001:80",
        "allow:0177.0.0.1:80",
        "allow:a.0x1:80",
        "allow:[::1%lo]:80",
        "allow:[1.2.3.4]:80",
        "allow:-a:80",
        "allow:" + "a" * 64 + ":80",
        "allow:" + ",".join(f"a{number}:80" for number in range(101)),
    ],
)
@on_every_backend
def test_what_is_no_list_is_refused(backend: str, text: str) -> None:
    with pytest.raises(SandboxRefused) as caught:
        asyncio.run(make_backend(backend).create(replace(spec_of(), network=text)))
    assert caught.value.kind == "network"
    assert "none" in str(caught.value)


@pytest.mark.parametrize(
    ("address", "may"),
    [
        ("151.101.0.223", True),
        ("2a04:4e42::223", True),
        ("::ffff:151.101.0.223", True),
        # Named, with this port.
        ("10.0.0.7", True),
        ("fd00::1", True),
        ("10.0.0.8", False),
        ("127.0.0.1", False),
        ("0.0.0.0", False),
        ("::", False),
        ("::1", False),
        ("::ffff:127.0.0.1", False),
        ("::127.0.0.1", False),
        ("64:ff9b::7f00:1", False),
        ("2002:7f00:1::", False),
        ("169.254.169.254", False),
        ("fe80::1%eth0", False),
        ("fd00:ec2::254", False),
        ("100.100.100.200", False),
        ("168.63.129.16", False),
        ("192.168.1.1", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
    ],
)
def test_what_a_name_may_lead_to(address: str, may: bool) -> None:
    allowed = parse_network("allow:packages.example.org:443,10.0.0.7:443,[fd00::1]:443,10.0.0.8:80")
    assert allowed is not None
    assert allowed.may_connect(address, 443) is may


class _Server(ThreadingHTTPServer):
    """Says what it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[tuple[str, str, bytes]] = []

    @property
    def port(self) -> int:
        return int(self.server_address[1])


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        assert isinstance(self.server, _Server)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.asked.append((self.path, self.headers["Host"], body))
        self.send_response(200)
        self.send_header("Content-Length", str(len(body) + 6))
        self.end_headers()
        self.wfile.write(b"heard " + body)

    do_POST = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def serving() -> Iterator[_Server]:
    with _Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def proxy_to(allowed: AllowList) -> Iterator[tuple[int, list[tuple[str, str]]]]:
    """A proxy of this process: its port, and what it has refused."""
    refused: list[tuple[str, str]] = []
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:

        async def serve(caller: socket.socket) -> None:
            with caller:
                await serve_caller(caller, lambda *told: refused.append(told), allowed=allowed)

        async def run() -> None:
            async with asyncio.TaskGroup() as tasks:
                while not ended.is_set():
                    if (await asyncio.to_thread(select.select, [listener], [], [], 0.02))[0]:
                        tasks.create_task(serve(listener.accept()[0]))

        ended = threading.Event()
        thread = threading.Thread(target=lambda: asyncio.run(run()))
        thread.start()
        try:
            yield listener.getsockname()[1], refused
        finally:
            ended.set()
            thread.join()


def say(port: int, data: bytes) -> bytes:
    """Say something to a port and return all of its answer."""
    answer = b""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as caller:
        caller.sendall(data)
        while more := caller.recv(1 << 16):
            answer += more
            if answer.endswith(b"heard "):
                break
    return answer


def test_requests_and_tunnels_reach_what_is_listed() -> None:
    with serving() as server:
        port = server.port
        allowed = AllowList(endpoints=frozenset({("127.0.0.1", port), ("localhost", port)}))
        with proxy_to(allowed) as (proxy, refused):
            head = (
                f"GET http://LOCALHOST:{port}/a?b#c HTTP/1.1\r\nHost: other\r\nProxy-Authorization: x\r\n\r\n"
            )
            assert b" 200 OK" in say(proxy, head.encode())
            body = f"POST http://127.0.0.1:{port} HTTP/1.1\r\nContent-Length: 4\r\n\r\nbody".encode()
            # What stands behind the body is another request, which nobody has looked at.
            assert say(proxy, body + b"GET /hidden HTTP/1.1\r\n\r\n").endswith(b"heard body")
            tunnel = f"CONNECT 127.0.0.1:{port} HTTP/1.1\r\n\r\nGET /through HTTP/1.1\r\nHost: t\r\n\r\n"
            assert b"established" in (answer := say(proxy, tunnel.encode()))
            assert answer.endswith(b"heard ")
        assert server.asked == [
            ("/a?b", f"localhost:{port}", b""),
            ("/", f"127.0.0.1:{port}", b"body"),
            ("/through", "t", b""),
        ]
        assert refused == []


@pytest.mark.parametrize(
    ("first", "status"),
    [
        ("CONNECT 127.0.0.1:1 HTTP/1.1", 403),
        ("CONNECT other.example:{port} HTTP/1.1", 403),
        ("CONNECT sub.localhost:{port} HTTP/1.1", 403),
        ("CONNECT 127.0.0.2:{port} HTTP/1.1", 403),
        ("CONNECT [::1]:{port} HTTP/1.1", 403),
        ("CONNECT [::ffff:127.0.0.1]:{port} HTTP/1.1", 403),
        # The name is listed, and what it leads to is not.
        ("CONNECT localhost:{port} HTTP/1.1", 403),
        ("CONNECT 127.1:{port} HTTP/1.1", 400),
        ("CONNECT 2130706433:{port} HTTP/1.1", 400),
        ("CONNECT 0x7f000001:{port} HTTP/1.1", 400),
        ("CONNECT 127.0.0.1:{port}:80 HTTP/1.1", 400),
        ("CONNECT 127.0.0.1 HTTP/1.1", 400),
        ("CONNECT x@127.0.0.1:{port} HTTP/1.1", 400),
        ("GET http://127.0.0.1/ HTTP/1.1", 403),
        ("GET http://secret.other.example/ HTTP/1.1", 403),
        ("GET http://127.0.0.1:{port}@other.example/ HTTP/1.1", 400),
        ("GET http://other.example\\@127.0.0.1:{port}/ HTTP/1.1", 400),
        ("GET http://127.0.0.1:x/ HTTP/1.1", 400),
        ("GET https://127.0.0.1:{port}/ HTTP/1.1", 400),
        ("GET file:///etc/passwd HTTP/1.1", 400),
        ("GET / HTTP/1.1\r\nHost: 127.0.0.1:{port}", 400),
        ("GET http://127.0.0.1:{port}/ HTTP/2.0", 400),
        ("GET http://127.0.0.1:{port}/ ", 400),
        ("GET http://127.0.0.1:{port}/\x00 HTTP/1.1", 400),
        ("\x05\x01\x00", 400),
        ("GET http://127.0.0.1:{port}/ HTTP/1.1\r\n folded: x", 400),
        ("GET http://127.0.0.1:{port}/ HTTP/1.1\r\nspaced : x", 400),
        ("GET http://127.0.0.1:{port}/ HTTP/1.1\r\nX: a\nHost: b", 400),
        ("POST http://127.0.0.1:{port}/ HTTP/1.1\r\nTransfer-Encoding: chunked", 411),
        ("POST http://127.0.0.1:{port}/ HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2", 400),
        ("POST http://127.0.0.1:{port}/ HTTP/1.1\r\nContent-Length: +1", 400),
        ("GET http://127.0.0.1:{port}/ HTTP/1.1\r\nX: " + "x" * (1 << 17), 400),
    ],
)
def test_all_else_is_refused_and_told(first: str, status: int) -> None:
    with serving() as server:
        allowed = AllowList(endpoints=frozenset({("127.0.0.1", server.port), ("localhost", server.port)}))
        if "CONNECT localhost" in first:
            allowed = AllowList(endpoints=frozenset({("localhost", server.port)}))
        with proxy_to(allowed) as (proxy, refused):
            head = first.replace("{port}", str(server.port)) + "\r\n\r\n"
            answer = say(proxy, head.encode("latin-1"))
        assert answer.startswith(f"HTTP/1.1 {status} ".encode())
        assert len(refused) == 1
        assert len(refused[0][0]) <= 1000
        assert refused[0][0].isprintable()
        assert server.asked == []


def test_a_listed_server_that_is_not_there_is_no_refusal() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as closed:
        port = closed.getsockname()[1]
    with proxy_to(AllowList(endpoints=frozenset({("127.0.0.1", port), ("a.invalid", 1)}))) as (
        proxy,
        refused,
    ):
        for target in (f"127.0.0.1:{port}", "a.invalid:1"):
            assert say(proxy, f"CONNECT {target} HTTP/1.1\r\n\r\n".encode()).startswith(b"HTTP/1.1 502 ")
    assert refused == []


def test_a_name_is_resolved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that leads elsewhere the second time: what was looked at is what is connected to."""
    answers = iter([("10.1.2.3", 0), ("127.0.0.1", 0)])
    asked = []

    def resolve(host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (next(answers)[0], port))]

    with serving() as server:
        port = server.port
        with proxy_to(AllowList(endpoints=frozenset({("a.example", port)}))) as (proxy, refused):
            monkeypatch.setattr(socket, "getaddrinfo", resolve)
            words = f"CONNECT a.example:{port} HTTP/1.1\r\n\r\n".encode()
            with socket.socket() as caller:
                caller.connect(("127.0.0.1", proxy))
                caller.sendall(words)
                assert caller.recv(1 << 16).startswith(b"HTTP/1.1 403 ")
                # Not a name that is not listed.
                monkeypatch.undo()
    assert asked == ["a.example"]
    assert refused == [(f"a.example:{port}", "its name leads to 10.1.2.3: not public, nor in the list")]


@with_own_root
async def test_refusals_of_a_sandbox_are_told_and_counted(
    backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What it reaches is asked by the attacks with a list of hosts."""
    # As good as without a list.
    level = IsolationLevel.NAMESPACE if backend == "bubblewrap" else IsolationLevel.CONTAINER
    spec = replace(spec_of(), network="allow:localhost:9,127.0.0.1:9", min_level=level)
    async with await LocalBackend(backend).create(spec) as sandbox:
        assert sandbox.isolation.network == "allow:127.0.0.1:9,localhost:9"
        code = "import urllib.request as r; r.urlopen('https://secret.other.example/', timeout=20)"
        for _ in range(2):
            await sandbox.exec([*sandbox.python_argv, "-c", code], wall_limit_s=60)
        calls = [call.partition(": ")[0] for call in sandbox.refused_calls]
        assert calls == ["secret.other.example:443"] * 2
        assert (await sandbox.stats()).refused_calls == 2
    assert "secret.other.example:443" in caplog.text
