"""Ports that are held from choice to use, and the file that says where an attempt listens."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from strop.errors import CheckRefused, StoreError
from strop.hardware.ports import (
    PORTS_NAME,
    find_host_address,
    find_interface,
    hold_port,
    publish_ports,
    read_listening_ports,
    read_ports,
    start_on_port,
    wait_for_ports,
)

# Listens on an inherited descriptor, says so, answers one caller.
_CHILD = """
import socket, sys
listening = socket.socket(fileno=int(sys.argv[1]))
listening.listen()
print("listens", flush=True)
caller, _ = listening.accept()
caller.sendall(b"hello")
caller.close()
"""


def test_a_held_port_is_nobody_elses_and_a_child_listens_on_it() -> None:
    with hold_port() as held:
        assert held.address == f"127.0.0.1:{held.port}"
        with pytest.raises(
            CheckRefused, match=rf"127\.0\.0\.1:{held.port} cannot be bound \(Address already"
        ):
            hold_port(port=held.port)
        with subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(held.fileno())],
            pass_fds=[held.fileno()],
            stdout=subprocess.PIPE,
            text=True,
        ) as child:
            # The child has it now; closing ours does not set it free.
            assert child.stdout is not None
            assert child.stdout.readline() == "listens\n"
            held.close()
            with pytest.raises(CheckRefused, match=rf"taken by 127\.0\.0\.1:\d+ \(process {child.pid}: "):
                hold_port(port=held.port)
            with socket.create_connection(("127.0.0.1", held.port), timeout=240) as caller:
                assert caller.recv(5) == b"hello"
            assert child.wait(240) == 0


def test_a_hundred_ports_at_once_are_a_hundred_ports() -> None:
    ports = [hold_port() for _ in range(100)]
    assert len({held.port for held in ports}) == 100
    for held in ports:
        held.close()


def test_a_descriptor_can_be_given_away() -> None:
    held = hold_port()
    with socket.socket(fileno=held.detach()) as mine:
        held.close()
        mine.listen()
        assert mine.getsockname() == (held.host, held.port)


def test_an_address_of_another_machine_cannot_be_bound() -> None:
    with pytest.raises(CheckRefused, match=r"203\.0\.113\.77:0 cannot be bound"):
        hold_port("203.0.113.77")


def test_listeners_are_named() -> None:
    with hold_port() as held, socket.socket(fileno=held.detach()) as listening:
        listening.listen()
        by_port = {entry.port: entry for entry in read_listening_ports()}
        assert (by_port[held.port].host, by_port[held.port].pid) == ("127.0.0.1", os.getpid())
        assert f"process {os.getpid()}: " in str(by_port[held.port])
    with hold_port("::1") as held, socket.socket(fileno=held.detach()) as listening:
        listening.listen()
        assert {entry.port: entry.host for entry in read_listening_ports()}[held.port] == "::1"


def test_nodes_listen_where_others_reach_them() -> None:
    assert find_host_address(1) == "127.0.0.1"
    assert find_host_address(2, "lo") == "127.0.0.1"
    with pytest.raises(CheckRefused, match=r"interface 'eno7' has no IPv4 address here .*Allowed: .*lo"):
        find_host_address(2, "eno7")


def test_the_interface_on_the_way_to_a_peer_is_found() -> None:
    assert find_interface("127.0.0.1") == "lo"
    # Of an IPv6 peer nothing is known; no such address has a way here.
    assert find_interface("::1") is None


def test_several_nodes_never_listen_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    # The name of many a node is that of its loopback in /etc/hosts: then the way out decides.
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    monkeypatch.setattr("strop.hardware.ports._find_route", lambda: ["10.0.0.7"])
    assert find_host_address(2) == "10.0.0.7"
    monkeypatch.setattr("strop.hardware.ports._find_route", list)
    with pytest.raises(CheckRefused, match="localhost has no address that 1 other nodes could reach"):
        find_host_address(2)


def test_ports_of_an_attempt_are_read_by_that_attempt_only(tmp_path: Path) -> None:
    assert read_ports(tmp_path, 3) is None
    path = publish_ports(tmp_path, 3, {"store": "10.0.0.1:4711"}, node="n1")
    assert path == tmp_path / PORTS_NAME
    published = read_ports(tmp_path, 3)
    assert published is not None
    assert (published.node, published.addresses) == ("n1", {"store": "10.0.0.1:4711"})
    # For the next attempt that is not its own yet.
    assert read_ports(tmp_path, 4) is None
    publish_ports(tmp_path, 4, {"store": "10.0.0.2:4712"}, node="n2")
    for late in (
        lambda: read_ports(tmp_path, 3),
        lambda: publish_ports(tmp_path, 3, {}, node="n1"),
        lambda: wait_for_ports(tmp_path, 3, ["store"], node="n1", wait_limit_s=120),
    ):
        with pytest.raises(
            StoreError, match=r"this is attempt 3, and .*ports.json is of attempt 4, by node n2"
        ):
            late()


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"attempt": 1, "node": "n", "addresses": 3}'])
def test_a_file_of_another_form_says_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / PORTS_NAME).write_text(text)
    assert read_ports(tmp_path, 1) is None


def test_who_waits_is_told_which_node_is_missing(tmp_path: Path) -> None:
    publish_ports(tmp_path, 1, {"store": "10.0.0.1:1"}, node="n1")
    with pytest.raises(
        StoreError, match=r"node n2 has not said within 0\.1 s where engine of attempt 1 can be"
    ):
        wait_for_ports(tmp_path, 1, ["store", "engine"], node="n2", wait_limit_s=0.1)


def test_who_waits_gets_it_when_it_is_there(tmp_path: Path) -> None:
    timer = threading.Timer(0.2, publish_ports, (tmp_path, 1, {"store": "h:1"}), {"node": "n1"})
    timer.start()
    began = time.monotonic()
    published = wait_for_ports(tmp_path, 1, ["store"], node="n1", wait_limit_s=120)
    assert published.addresses == {"store": "h:1"}
    assert time.monotonic() - began >= 0.1
    timer.join()


def test_a_program_that_takes_numbers_alone_is_started_on_another_one() -> None:
    notices: list[str] = []
    tried: list[int] = []

    def start(port: int) -> str | None:
        tried.append(port)
        return None if len(tried) < 3 else f"runs on {port}"

    assert start_on_port(start, on_retry=notices.append) == f"runs on {tried[2]}"
    assert notices == [
        f"port {port} of 127.0.0.1 was taken between its choice and its use, try {number}"
        for number, port in enumerate(tried[:2], start=1)
    ]
    with pytest.raises(CheckRefused, match=r"5 ports of 127\.0\.0\.1 were taken one after the other"):
        start_on_port(lambda _: None, on_retry=notices.append)
