"""The seccomp filter of system calls that no program in a sandbox may make.

These calls reach beyond a program's own resources: mounts, namespaces, keys, kernel modules, clocks, tracing
of the whole machine. Without capabilities the kernel refuses most of them anyway; the filter keeps their
code, which has had vulnerabilities, out of reach. A refused call gives EPERM; `clone3`, whose flags a filter
cannot see, gives ENOSYS, and C libraries then use `clone`. `ptrace`, which container engines block on old
kernels, stays allowed, so debuggers work.

Sockets are those that a network namespace confines: of files and IP, with the protocols that programs use,
and netlink's, which lists interfaces and addresses. AF_VSOCK, for one, reaches the machine's hypervisor and
its other listeners from every namespace.

Source of the list: the calls that the engines' default profile allows only with a capability, fanotify, which
sees the accesses of all processes to shared files, and memory that no limit counts. Covered: x86-64 and
AArch64; elsewhere there is no filter, and the record of a sandbox says so.
"""

from __future__ import annotations

import errno
import itertools
import platform
import struct

CALLS: dict[str, tuple[int | None, int | None]] = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "bpf": (321, 280),
    "clock_adjtime": (305, 266),
    "clock_settime": (227, 112),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioperm": (173, None),
    "iopl": (172, None),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "lookup_dcookie": (212, 18),
    "memfd_secret": (447, 447),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "open_tree_attr": (467, 467),
    "perf_event_open": (298, 241),
    "pivot_root": (155, 41),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "setns": (308, 268),
    "settimeofday": (164, 170),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "uselib": (134, None),
    "userfaultfd": (323, 282),
    "vhangup": (153, 58),
}
"""Numbers on x86-64 and AArch64; None where the call does not exist. A test compares them with the kernel's
headers."""
CLONE, CLONE3 = (56, 220), (435, 435)
SOCKET, SOCKETPAIR = (41, 198), (53, 199)
_UNIX, _INET, _INET6, _NETLINK = 1, 2, 10, 16
"""Families of sockets."""
_INET_PROTOCOLS = (0, 1, 6, 17, 58)
"""The type's own, ICMP, TCP, UDP, and ICMP of IPv6."""
_NETLINK_ROUTE = 0
_NEW_NAMESPACES = 0x7E020000
"""All flags of clone that make a namespace."""
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column of the table, and the kernel's word (linux/audit.h)."""
_X32_BIT = 0x40000000
_LOAD, _IS, _AT_LEAST, _HAS_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000
_NR, _ARCH, _FIRST_ARGUMENT, _THIRD_ARGUMENT = 0, 4, 16, 32
"""Offsets in `struct seccomp_data`; the arguments' lower halves, both machines being little-endian."""


def make_filter(machine: str) -> bytes:
    """Return the filter's instructions for a machine (`platform.machine`); empty for an unknown one."""
    if machine not in _ARCHITECTURES:
        return b""
    column, word = _ARCHITECTURES[machine]
    numbers = [pair[column] for pair in CALLS.values()]
    refused = [number for number in numbers if number is not None]
    blocks: dict[str, list[tuple[int, int, str, str]]] = {
        "begin": [
            (_LOAD, _ARCH, "", ""),
            (_IS, word, "", "unknown"),
            (_LOAD, _NR, "", ""),
            (_AT_LEAST, _X32_BIT, "unknown", ""),
            (_IS, CLONE3[column], "unknown", ""),
            *((_IS, number, "refuse", "") for number in refused),
            (_IS, CLONE[column], "clone", ""),
            (_IS, SOCKET[column], "socket", ""),
            (_IS, SOCKETPAIR[column], "pair", "allow"),
        ],
        "clone": [(_LOAD, _FIRST_ARGUMENT, "", ""), (_HAS_BITS, _NEW_NAMESPACES, "refuse", "allow")],
        "pair": [(_LOAD, _FIRST_ARGUMENT, "", ""), (_IS, _UNIX, "allow", "family")],
        "socket": [
            (_LOAD, _FIRST_ARGUMENT, "", ""),
            (_IS, _UNIX, "allow", ""),
            (_IS, _INET, "inet", ""),
            (_IS, _INET6, "inet", ""),
            (_IS, _NETLINK, "", "family"),
            (_LOAD, _THIRD_ARGUMENT, "", ""),
            (_IS, _NETLINK_ROUTE, "allow", "protocol"),
        ],
        "inet": [
            (_LOAD, _THIRD_ARGUMENT, "", ""),
            *((_IS, number, "allow", "") for number in _INET_PROTOCOLS),
        ],
        # Directly behind, for every other protocol.
        "protocol": [(_RETURN, _REFUSE | errno.EPROTONOSUPPORT, "", "")],
        "allow": [(_RETURN, _ALLOW, "", "")],
        "refuse": [(_RETURN, _REFUSE | errno.EPERM, "", "")],
        "unknown": [(_RETURN, _REFUSE | errno.ENOSYS, "", "")],
        "family": [(_RETURN, _REFUSE | errno.EAFNOSUPPORT, "", "")],
    }
    ends = itertools.accumulate(map(len, blocks.values()))
    place = {name: end - len(steps) for (name, steps), end in zip(blocks.items(), ends, strict=True)}
    steps = itertools.chain.from_iterable(blocks.values())
    return b"".join(
        struct.pack("=HBBI", code, *(place[to] - at - 1 if to else 0 for to in (yes, no)), value)
        for at, (code, value, yes, no) in enumerate(steps)
    )


FILTER = make_filter(platform.machine())
"""For this machine."""
