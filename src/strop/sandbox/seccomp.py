"""The seccomp filter of system calls that no program in a sandbox may make.

These calls reach beyond a program's own resources: mounts, namespaces, keys, kernel modules, clocks, tracing
of the whole machine. Without capabilities the kernel refuses most of them anyway; the filter keeps their
code, which has had vulnerabilities, out of reach. A refused call gives EPERM; `clone3`, whose flags a filter
cannot see, gives ENOSYS, and C libraries then use `clone`. `ptrace`, which container engines block on old
kernels, stays allowed, so debuggers work.

Source of the list: the calls that the engines' default profile allows only with a capability. Covered:
x86-64 and AArch64; elsewhere there is no filter, and the record of a sandbox says so.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

CALLS: dict[str, tuple[int | None, int | None]] = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "bpf": (321, 280),
    "clock_adjtime": (305, 266),
    "clock_settime": (227, 112),
    "delete_module": (176, 106),
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
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
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
_NEW_NAMESPACES = 0x7E020000
"""All flags of clone that make a namespace."""
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column of the table, and the kernel's word (linux/audit.h)."""
_X32_BIT = 0x40000000
_LOAD, _IS, _AT_LEAST, _HAS_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000
_NR, _ARCH, _FIRST_ARGUMENT = 0, 4, 16
"""Offsets in `struct seccomp_data`; the first argument's lower half, both machines being little-endian."""
_PR_SET_SECCOMP, _MODE_FILTER = 22, 2


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def make_filter(machine: str) -> bytes:
    """Return the filter's instructions for a machine (`platform.machine`); empty for an unknown one."""
    if machine not in _ARCHITECTURES:
        return b""
    column, word = _ARCHITECTURES[machine]
    numbers = [pair[column] for pair in CALLS.values()]
    refused = [number for number in numbers if number is not None]
    steps: list[tuple[int, int, str, str]] = [(_LOAD, _ARCH, "", ""), (_IS, word, "", "unknown")]
    steps += [
        (_LOAD, _NR, "", ""),
        (_AT_LEAST, _X32_BIT, "unknown", ""),
        (_IS, CLONE3[column], "unknown", ""),
    ]
    steps += [(_IS, number, "refuse", "") for number in refused]
    steps += [(_IS, CLONE[column], "", "allow"), (_LOAD, _FIRST_ARGUMENT, "", "")]
    steps += [(_HAS_BITS, _NEW_NAMESPACES, "refuse", "allow")]
    ends = {"allow": _ALLOW, "refuse": _REFUSE | errno.EPERM, "unknown": _REFUSE | errno.ENOSYS}
    place = {name: len(steps) + index for index, name in enumerate(ends)}
    place[""] = 0
    lines = [
        struct.pack("=HBBI", code, *(place[to] - at - 1 if to else 0 for to in (yes, no)), value)
        for at, (code, value, yes, no) in enumerate(steps)
    ]
    return b"".join(lines) + b"".join(struct.pack("=HBBI", _RETURN, 0, 0, end) for end in ends.values())


_filter = make_filter(platform.machine())
_program = _Program(len(_filter) // 8, _filter)
_libc = ctypes.CDLL(None, use_errno=True)


def filter_calls() -> None:
    """Filter the system calls of this process and its future children and programs, for good.

    Requires no_new_privs. On a kernel without seccomp it does nothing; /proc/self/status then shows no
    filter.
    """
    if _filter:
        _libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(_program), 0, 0)
