"""Addresses to listen on."""

from __future__ import annotations

import socket

import pytest

from strop.errors import CheckRefused
from strop.hardware.ports import find_host_address


def test_nodes_listen_where_others_reach_them() -> None:
    assert find_host_address(1) == "127.0.0.1"
    assert find_host_address(2, "lo") == "127.0.0.1"
    with pytest.raises(CheckRefused, match=r"interface 'eno7' has no IPv4 address here.*Allowed: .*lo"):
        find_host_address(2, "eno7")


def test_several_nodes_never_listen_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    # The name of many a node is that of its loopback in /etc/hosts: then the way out decides.
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    monkeypatch.setattr("strop.hardware.ports._find_route", lambda: ["10.0.0.7"])
    assert find_host_address(2) == "10.0.0.7"
    monkeypatch.setattr("strop.hardware.ports._find_route", list)
    with pytest.raises(CheckRefused, match="localhost has no address that 1 other nodes could reach"):
        find_host_address(2)
