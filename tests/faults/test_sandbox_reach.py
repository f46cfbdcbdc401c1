"""Programs in a sandbox open sockets, and make calls, that no namespace confines, and so reach the host."""

from __future__ import annotations

import errno
import json
import platform

import pytest

from tests.fixtures.sandboxes import on_every_backend, python

OPEN = """
import ctypes, json, os, socket
libc = ctypes.CDLL(None, use_errno=True)
opened, pairs = set(), set()
for family in range(64):
    for kind in (1, 2, 3, 4, 5):
        for protocol in (0, 6, 17, 132, 136, 262) if family in (2, 10) else range(32):
            try:
                socket.socket(family, kind, protocol).close()
                opened.add((family, protocol))
            except OSError:
                pass
        try:
            [end.close() for end in socket.socketpair(family, kind)]
            pairs.add(family)
        except OSError:
            pass
calls = {}
for name, number, *arguments in CALLS:
    if libc.syscall(number, *arguments) == -1:
        calls[name] = ctypes.get_errno()
    else:
        calls[name] = 0
print(json.dumps([sorted({f for f, _ in opened}), sorted(p for f, p in opened if f == 16),
    sorted({p for f, p in opened if f in (2, 10)}), sorted(pairs), calls]))
"""

# Each succeeds for an ordinary user on some kernel, or needs more than its arguments to fail.
CALLS = [
    ("add_key", 248, "user", "name", "kept", 4, -3),
    ("keyctl", 250, 0, -3, 1),
    ("request_key", 249, "user", "name", 0, -3),
    ("io_uring_setup", 425, 1, 0),
    ("bpf", 321, 0, 0, 0),
    ("perf_event_open", 298, 0, 0, -1, -1, 0),
    ("userfaultfd", 323, 1),
    ("fanotify_init", 300, 0x200, 0),
    ("memfd_secret", 447, 0),
    ("open_tree_attr", 467, -100, "/", 1, 0, 0),
    ("clock_settime", 227, 0, 0),
    ("settimeofday", 164, 0, 0),
    ("kcmp", 312, 1, 1, 0, 0, 0),
    ("syslog", 103, 3, 0, 0),
    ("unshare", 272, 0x10000000),
]


def as_bytes(words: tuple[object, ...]) -> tuple[object, ...]:
    return tuple(word.encode() if isinstance(word, str) and at else word for at, word in enumerate(words))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of x86-64")
@on_every_backend
def test_only_what_namespaces_confine_can_be_opened(backend: str) -> None:
    code = f"CALLS = {[as_bytes(words) for words in CALLS]!r}\n{OPEN}"
    result = python(backend, code)
    assert result.exit_code == 0, result.stderr
    families, netlink, protocols, pairs, calls = json.loads(result.stdout)
    # Files' sockets, IP, IPv6 where the kernel has it, and netlink's interfaces and routes.
    assert {1, 2, 16} <= set(families) <= {1, 2, 10, 16}
    assert netlink == [0]
    assert {0, 6, 17} <= set(protocols) <= {0, 1, 6, 17, 58}
    assert pairs == [1]
    assert calls == dict.fromkeys(calls, errno.EPERM)
