"""The filter of system calls: its numbers are the kernel's, and it decides as it says."""

from __future__ import annotations

import errno
import re
import struct
from pathlib import Path

import pytest

from strop.sandbox.seccomp import CALLS, CLONE, CLONE3, SOCKET, SOCKETPAIR, make_filter

HEADERS = (
    Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    Path("/usr/aarch64-linux-gnu/include/asm-generic/unistd.h"),
)
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOWED, REFUSED, UNKNOWN = 0x7FFF0000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
NO_FAMILY, NO_PROTOCOL = 0x50000 | errno.EAFNOSUPPORT, 0x50000 | errno.EPROTONOSUPPORT


@pytest.mark.parametrize("column", [0, 1], ids=["x86_64", "aarch64"])
def test_the_numbers_are_those_of_the_kernels_headers(column: int) -> None:
    if not HEADERS[column].exists():
        pytest.skip(f"{HEADERS[column]} is not here")
    found = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", HEADERS[column].read_text()))
    # Headers may be older than a call; what they have must be the same.
    known = {**CALLS, "clone": CLONE, "clone3": CLONE3, "socket": SOCKET, "socketpair": SOCKETPAIR}
    wrong = {name for name, pair in known.items() if name in found and str(pair[column]) != found[name]}
    assert wrong == set()
    assert len(known.keys() & found.keys()) > 35


def decide(program: bytes, architecture: int, number: int, argument: int = 0, third: int = 0) -> int:
    """Interpret a filter as the kernel does."""
    data = struct.pack("<IIQQQQ", number, architecture, 0, argument, 0, third)
    lines = list(struct.iter_unpack("=HBBI", program))
    at, value = 0, 0
    while True:
        code, yes, no, operand = lines[at]
        at += 1
        if code == 0x06:
            return int(operand)
        if code == 0x20:
            value = struct.unpack_from("<I", data, operand)[0]
            continue
        holds = {0x15: value == operand, 0x35: value >= operand, 0x45: bool(value & operand)}[code]
        at += yes if holds else no


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_it_refuses_what_it_names_and_nothing_else(machine: str) -> None:
    program, column = make_filter(machine), list(ARCHITECTURES).index(machine)
    own = ARCHITECTURES[machine]
    named = {pair[column] for pair in CALLS.values()} - {None}
    for number in range(500):
        expected = REFUSED if number in named else UNKNOWN if number == CLONE3[column] else ALLOWED
        if number in (SOCKET[column], SOCKETPAIR[column]):
            expected = NO_FAMILY
        assert decide(program, own, number) == expected, number
    for family in range(64):
        allowed = {0, 1, 6, 17, 58} if family in (2, 10) else {0} if family == 16 else set(range(300))
        for protocol in range(300):
            expected = ALLOWED if protocol in allowed else NO_PROTOCOL
            expected = expected if family in (1, 2, 10, 16) else NO_FAMILY
            assert decide(program, own, SOCKET[column], family, protocol) == expected, (family, protocol)
        expected = ALLOWED if family == 1 else NO_FAMILY
        assert decide(program, own, SOCKETPAIR[column], family) == expected, family
    # A thread's flags, a fork's, and each flag that makes a namespace.
    for flags, expected in (
        (0x3D0F00, ALLOWED),
        (17, ALLOWED),
        *((1 << bit, REFUSED) for bit in range(26, 31)),
    ):
        assert decide(program, own, CLONE[column], flags) == expected, hex(flags)
    assert decide(program, own, CLONE[column], 0x20000) == REFUSED
    # Other numbers mean other calls there.
    assert decide(program, 0x40000003, 1) == UNKNOWN
    assert decide(program, own, 0x40000001) == UNKNOWN
    assert make_filter("riscv64") == b""
