"""Ports that are held from choice to use, and the file that says where an attempt listens."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from strop.errors import CheckRefused
from strop.hardware.ports import (
    find_host_address,
    hold_port,
    read_listening_ports,
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


def test_several_nodes_never_listen_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    # The name of many a node is that of its loopback in /etc/hosts: then the way out decides.
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    monkeypatch.setattr("strop.hardware.ports._find_route", lambda: ["10.0.0.7"])
    assert find_host_address(2) == "10.0.0.7"
    monkeypatch.setattr("strop.hardware.ports._find_route", list)
    with pytest.raises(CheckRefused, match="localhost has no address that 1 other nodes could reach"):
        find_host_address(2)
