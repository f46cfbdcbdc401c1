"""The parts a supervisor is made of, each by itself."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import socket
import struct
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.sandbox import Limits, agent, cgroup
from strop.sandbox.agent import LENGTHS, MAX_HEADER_BYTES, Capture, Channel, measure_tree, pack, unpack
from strop.sandbox.cgroup import Controller, find_controllers, make_cgroup
from strop.sandbox.client import Client
from strop.sandbox.ground import leave_ground, private_user, run_program
from strop.sandbox.seccomp import CALLS, CLONE, CLONE3, SOCKET, SOCKETPAIR, make_filter
from tests.fixtures.sandboxes import in_sandbox


@given(
    st.lists(st.binary(max_size=40), max_size=12),
    st.integers(min_value=0, max_value=20),
    st.integers(min_value=0, max_value=20),
)
def test_a_capture_keeps_head_and_tail_of_any_stream(parts: list[bytes], head: int, tail: int) -> None:
    capture = Capture(head, tail)
    for part in parts:
        capture.feed(part)
    whole = b"".join(parts)
    expected = whole if len(whole) <= head + tail else whole[:head] + whole[len(whole) - tail :]
    assert capture.kept() == expected
    assert capture.total == len(whole)


def test_frames_survive_any_cut() -> None:
    stream = pack({"a": 1}, b"\x00\xff" * 3) + pack({}, b"")
    for cut in range(len(stream)):
        buffer = bytearray(stream[:cut])
        frames = list(unpack(buffer))
        buffer += stream[cut:]
        assert [*frames, *unpack(buffer)] == [({"a": 1}, b"\x00\xff" * 3), ({}, b"")]
        assert buffer == b""


MEMBERSHIP_1 = "9:name=systemd:/\n8:pids:/job\n4:memory:/box/7\n1:cpu,cpuacct:/\n0::/\n"
MOUNTS_1 = """\
30 24 0:26 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
31 24 0:27 /job /sys/fs/cgroup/pids rw,relatime shared:9 - cgroup cgroup rw,pids
32 24 0:28 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
33 24 0:29 / /home rw - ext4 /dev/vda rw
"""


def test_version_1_groups_are_found_below_this_process() -> None:
    assert sorted(find_controllers(membership=MEMBERSHIP_1, mounts=MOUNTS_1), key=lambda c: c.name) == [
        Controller("memory", 1, Path("/sys/fs/cgroup/memory/box/7")),
        # The mount shows the hierarchy from /job on.
        Controller("pids", 1, Path("/sys/fs/cgroup/pids")),
    ]


def test_where_the_kernel_tells_of_no_groups_there_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroup, "read_or_empty", lambda path: "")
    assert find_controllers() == []


def test_without_user_namespaces_every_user_id_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "read_or_empty", lambda path: "")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    # 0x70000000 + 5, which is nobody's else.
    assert private_user(5) == (1879048197, True)


def test_version_2_controllers_count_only_where_they_are_handed_down(tmp_path: Path) -> None:
    own_dir = tmp_path / "user/me"
    own_dir.mkdir(parents=True)
    mounts = f"32 24 0:28 / {tmp_path} rw - cgroup2 cgroup2 rw\n"
    assert find_controllers(membership="0::/user/me\n", mounts=mounts) == []
    (own_dir / "cgroup.subtree_control").write_text("io memory\n")
    (own_dir / "cgroup.controllers").write_text("cpu memory pids\n")
    # In a group that others made for a container, what this group itself has counts.
    controllers = find_controllers(membership="0::/user/me\n", mounts=mounts, is_for_children=False)
    assert {controller.name for controller in controllers} == {"cpu", "memory", "pids"}
    # A group that has handed its controllers down has no processes: they are in the leaf.
    for inside in ("/user/me", "/user/me/strop-own"):
        controllers = find_controllers(membership=f"0::{inside}\n", mounts=mounts)
        assert [(controller.name, controller.version) for controller in controllers] == [("memory", 2)]
        assert controllers[0].own_dir.resolve() == own_dir.resolve()


def test_version_2_limits_are_written_and_kills_are_read(tmp_path: Path) -> None:
    own = [Controller(name, 2, tmp_path) for name in ("memory", "pids")]
    made = tmp_path / "box"
    made.mkdir()
    (made / "memory.swap.max").touch()
    limits = Limits(memory_bytes=1 << 20, scratch_bytes=1 << 21, max_scratch_files=1 << 10, max_processes=7)
    group = make_cgroup(own, "box", limits)
    # Its files are in memory too, and each takes a KiB itself.
    assert (made / "memory.max").read_text() == str((1 << 20) + (1 << 21) + (1 << 20))
    assert (made / "memory.swap.max").read_text() == "0"
    assert (made / "pids.max").read_text() == "7"
    assert set(group.dirs.values()) == {made}


def test_groups_that_may_not_be_made_are_left_out(tmp_path: Path) -> None:
    group = make_cgroup([Controller("memory", 1, tmp_path / "missing/deeper")], "box", Limits())
    assert group.dirs == {}
    group.remove()


def test_a_tree_of_files_is_measured_without_following_links(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/file").write_bytes(bytes(10_000))
    (tmp_path / "loop").symlink_to(tmp_path)
    num_bytes, num_files = measure_tree(str(tmp_path))
    # a, a/b, a/b/file, loop.
    assert num_files == 4
    assert num_bytes >= 10_000
    assert measure_tree(str(tmp_path / "gone")) == (0, 0)


def test_a_program_for_its_own_ends_is_run_and_bounded() -> None:
    env = {"PATH": "/usr/bin:/bin", "WORD": "a word"}
    assert run_program(["sh", "-c", "echo $WORD; cat"], env, stdin=b"in") == "a word\nin"
    for script, told in (
        ("echo wrong >&2; exit 3", "wrong"),
        ("exit 3", "exit code 3"),
        ("kill -9 $$", "-9"),
    ):
        with pytest.raises(OSError, match=told):
            run_program(["sh", "-c", script], env)
    with pytest.raises(OSError, match="No such file"):
        run_program(["no-such-program"], env)
    with pytest.raises(OSError, match="gave no answer"):
        run_program(["sleep", "7403"], env, limit_s=0.05)


def test_groups_that_nobody_looks_after_any_more_are_removed() -> None:
    made = []
    for controller in find_controllers():
        # No process has this number: ids end at 2**22.
        path = controller.own_dir / f"strop-box-{2**22 + os.getpid()}-0"
        with suppress(OSError):
            path.mkdir()
            made.append(path)
    if not made:
        pytest.skip("control groups (none may be made here)")
    leave_ground()
    in_sandbox("process", lambda sandbox: sandbox.exec(["/bin/true"], wall_limit_s=60))
    assert [path for path in made if path.exists()] == []


def test_a_header_that_is_too_large_is_neither_sent_nor_awaited() -> None:
    # {"text":"..."} has eleven bytes beside its text.
    longest = MAX_HEADER_BYTES - len('{"text":""}')
    assert len(pack({"text": "a" * longest})) == LENGTHS.size + MAX_HEADER_BYTES
    with pytest.raises(ValueError, match=str(MAX_HEADER_BYTES)):
        pack({"text": "a" * (longest + 1)})
    no_frames = (
        b"Traceback (most recent call last):",
        LENGTHS.pack(2, 0) + b"[]",
        LENGTHS.pack(3, 0) + b"abc",
    )
    for data in no_frames:
        with pytest.raises(ValueError, match=r"header|JSON|value"):
            list(unpack(bytearray(data)))


async def test_who_is_cancelled_leaves_no_connection_open() -> None:
    """A supervisor that ends slowly, and an answer that comes in the moment of the cancellation."""

    async def finish() -> bool:
        return True

    here, there = socket.socketpair()
    client, supervisor = Client(here, "process", finish), Channel(there)
    asked = asyncio.ensure_future(client.ask({"op": "connect", "address": 1}))
    await asyncio.sleep(0)
    handed, kept = socket.socketpair()
    kept.settimeout(60)
    supervisor.send({"id": 0, "has_descriptor": True}, descriptor=handed.detach())
    client._on_readable()
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert kept.recv(1) == b"", "the handed connection is closed"
    kept.close()
    ending = asyncio.ensure_future(client.end(60.0))
    await asyncio.sleep(0)
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending
    assert here.fileno() == -1
    supervisor.close()


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
