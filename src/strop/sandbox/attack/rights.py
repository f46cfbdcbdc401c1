"""Privilege escalation attacks: rows 12, 13, 18 and 19.

Success is observed on the host while the attacker is held, in the /proc entries of its process.
"""

from __future__ import annotations

import asyncio
import os
import platform
from collections.abc import Callable, Sequence
from contextlib import suppress

from strop.errors import SandboxError
from strop.sandbox.attack.contract import (
    SMALL,
    Attack,
    Code,
    Expect,
    Observation,
    always,
    attack,
    by_namespace,
    by_user,
)
from strop.sandbox.attack.stage import WALL_LIMIT_S, Stage
from strop.sandbox.contract import ExecKind, ExecResult, IsolationLevel, Mount, SandboxSpec
from strop.sandbox.family import find_descendants
from strop.sandbox.frames import pack
from strop.sandbox.linux import read_or_empty
from strop.sandbox.seccomp import CALLS

ATTACKS: list[Attack] = []
_ON_HOST = "its process, seen on the host"
_SETTINGS = (
    *("/proc/sysrq-trigger", "/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe"),
    *(
        "/proc/sys/vm/overcommit_memory",
        "/sys/kernel/mm/ksm/run",
        "/sys/power/state",
        "/sys/kernel/uevent_helper",
    ),
)
_OWN_DEVICES = ("null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts", "console")
_KINDS = ("user", "pid", "mnt", "net", "ipc", "uts", "cgroup")

# 434 is pidfd_open and 438 pidfd_getfd, on every machine.
_STEAL = """
forged = bytes.fromhex(sys.argv[2])
def say(descriptor):
    attempt(os.write, descriptor, forged)
    attempt(os.close, descriptor)
for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
    if pid == os.getpid():
        continue
    for name in attempt(os.listdir, f"/proc/{pid}/fd") or ():
        descriptor = attempt(os.open, f"/proc/{pid}/fd/{name}", os.O_WRONLY | os.O_NONBLOCK)
        if descriptor is not None:
            say(descriptor)
    holder = libc.syscall(434, pid, 0)
    for number in range(40 if holder >= 0 else 0):
        if (descriptor := libc.syscall(438, holder, number, 0)) >= 0:
            say(descriptor)
    attempt(os.close, holder)
for line in list(attempt(open, "/proc/net/unix") or ())[1:]:
    path = line.split()[7:]
    if path and "strop-sandbox" in path[0]:
        caller = socket.socket(socket.AF_UNIX)
        attempt(caller.connect, path[0].replace("@", "\\0"))
        attempt(caller.send, forged)
"""
_KILL_ALL = "os.kill(-1, signal.SIGSTOP); os.kill(-1, signal.SIGKILL)"
_KILL_PARENT = """
for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGKILL):
    attempt(os.kill, os.getppid(), number)
"""
# Attach, set the instruction pointer (register 16) to address 0, continue.
_TRACE = """
libc.ptrace.argtypes = [ctypes.c_long] * 4
for pid in (os.getppid(), 1):
    if libc.ptrace(16, pid, 0, 0) != 0:
        continue
    attempt(os.waitpid, pid, 0x40000000)
    if os.uname().machine == "x86_64":
        libc.ptrace(6, pid, 16 * 8, 0)
    libc.ptrace(17, pid, 0, signal.SIGSEGV)
    time.sleep(0.5)
"""
_TRACE_OTHER = """
libc.ptrace.argtypes = [ctypes.c_long] * 4
for pid in map(int, sys.argv[2:]):
    libc.ptrace(0x4206, pid, 0, 0)
hold()
"""
_MOUNT = """
flags = ctypes.c_ulong(0)
libc.mount(b"none", b"/tmp", b"tmpfs", flags, None)
libc.mount(b"none", b"/tmp", b"ramfs", flags, None)
libc.mount(b"proc", b"/tmp", b"proc", flags, None)
libc.mount(b"/proc", b"/tmp", None, ctypes.c_ulong(4096), None)
libc.mount(None, b"/", None, ctypes.c_ulong(32 | 4096), None)
libc.umount2(b"/proc", 2)
libc.umount2(b"/tmp", 2)
context = libc.syscall(430, b"tmpfs", 0)
libc.syscall(431, context, 6, None, None, 0)
libc.syscall(429, libc.syscall(432, context, 0, 0), b"", -100, b"/tmp", 4)
hold()
"""
_NAMESPACES = """
kinds = (0x10000000, 0x20000, 0x8000000, 0x4000000, 0x2000000, 0x20000000, 0x40000000)
for kind in kinds:
    libc.unshare(kind | 0x10000000)
    libc.unshare(kind)
for name in attempt(os.listdir, "/proc/1/ns") or ():
    if (descriptor := attempt(os.open, f"/proc/1/ns/{name}", os.O_RDONLY)) is not None:
        libc.setns(descriptor, 0)
attempt(os.chroot, "/tmp")
hold()
"""
_MKNOD = """
for kind, number in ((0o60000, os.makedev(254, 0)), (0o60000, os.makedev(8, 0)), (0o20000, os.makedev(1, 1))):
    attempt(os.mknod, f"{TOKEN}-{number}", kind | 0o666, number)
"""
_OPEN = """
kept = [attempt(os.open, path, os.O_WRONLY) for path in sys.argv[2:]]
hold()
"""
_DEVICES = """
import stat
kept = []
for top, _, names in os.walk("/dev"):
    for name in names:
        path = f"{top}/{name}"
        found = attempt(os.lstat, path)
        # Memory and the kernel's log, loops and disks.
        if found and not stat.S_ISDIR(found.st_mode) and os.major(found.st_rdev) in (1, 7, 8, 254, 259):
            kept.append(attempt(os.open, path, os.O_RDONLY | os.O_NONBLOCK))
hold()
"""
_CALLS = """
bpf, perf, uring, fault, watch, secret = map(int, sys.argv[2:8])
attributes = (ctypes.c_uint32 * 32)(2, 4, 4, 1)
libc.syscall(bpf, 0, attributes, 72)
event = (ctypes.c_uint32 * 32)(1, 128)
event[10] = 0x60
libc.syscall(perf, event, 0, -1, -1, 0)
libc.syscall(uring, 1, (ctypes.c_uint8 * 120)())
libc.syscall(fault, 1)
libc.syscall(watch, 0x200, 0)
libc.syscall(secret, 0)
hold()
"""
_KEYS = """
add, control = map(int, sys.argv[2:4])
for ring in (-2, -3, -4, -5):
    libc.syscall(add, b"user", TOKEN.encode(), b"kept", 4, ring)
libc.syscall(control, 1, TOKEN.encode())
hold()
"""
_BECOME = """
for work in (
    lambda: os.setgroups([0]),
    lambda: os.setresgid(0, 0, 0),
    lambda: os.setresuid(0, 0, 0),
    lambda: os.seteuid(0),
):
    attempt(work)
header = (ctypes.c_uint32 * 2)(0x20080522, 0)
libc.capset(header, (ctypes.c_uint32 * 6)(*[0xFFFFFFFF] * 6))
libc.prctl(38, 0, 0, 0, 0)
libc.prctl(22, 0, 0)
hold()
"""


@attack(
    ATTACKS,
    12,
    tries="find the descriptors and sockets that sandboxes are ordered by, and give orders",
    judged="whether this sandbox and the other still do as they are told, and nothing else",
    expects=by_user("pidns"),
    spares_user=False,
)
async def _steal_orders(stage: Stage) -> Observation:
    place = f"{stage.sandbox.scratch}/forged"
    order = {"op": "exec", "id": 999, "argv": ["/bin/touch", place], "wall_limit_s": 9.0}
    forged = pack(order) + pack({"op": "stop"}) + b'{"status": 0}'
    await stage.python(_STEAL, forged.hex())
    state = await stage.is_alive()
    if state != "alive":
        return Observation(
            Code.DETECTED if state == "from_inside" else Code.EXPOSED, f"the sandbox is lost: {state}"
        )
    forged_file = await stage.measure(f"ls {place} 2>/dev/null")
    if forged_file:
        return Observation(Code.EXPOSED, "an order was obeyed")
    return Observation(Code.BLOCKED, "no order was obeyed")


_OR_SEEN = Expect(code=Code.DETECTED)
"""An ordinary user's programs may kill their runner, which is noticed."""


@attack(
    ATTACKS,
    13,
    tries="stop and kill all that it can",
    judged="whether the sandbox answers, or says that it was ended from inside",
    expects=_OR_SEEN,
    spares_user=False,
)
async def _kill_all(stage: Stage) -> Observation:
    return await _break(stage, _KILL_ALL)


@attack(
    ATTACKS,
    13,
    tries="stop and kill what runs it",
    judged="whether the sandbox answers, or says that it was ended from inside",
    expects=_OR_SEEN,
)
async def _kill_parent(stage: Stage) -> Observation:
    return await _break(stage, _KILL_PARENT)


@attack(
    ATTACKS,
    13,
    tries="trace process 1 and what runs it, and break them",
    judged="whether the sandbox answers, or says that it was ended from inside",
    expects=_OR_SEEN,
)
async def _trace_first(stage: Stage) -> Observation:
    return await _break(stage, _TRACE)


async def _break(stage: Stage, code: str) -> Observation:
    with suppress(SandboxError):
        await stage.python(code, wall_limit_s=3.0)
    state = await stage.is_alive()
    codes = {"alive": Code.BLOCKED, "from_inside": Code.DETECTED}
    return Observation(codes.get(state, Code.EXPOSED), f"the sandbox afterwards: {state}")


@attack(
    ATTACKS,
    18,
    tries="mount and unmount, by old calls and new ones",
    judged=_ON_HOST,
    expects=always(Code.BLOCKED),
)
async def _mount(stage: Stage) -> Observation:
    def look(pid: int) -> list[str]:
        # Where mounts are shared, mounts of other sandboxes come and go.
        lines = read_or_empty(f"/proc/{pid}/mountinfo").splitlines()
        return ["\n".join(line for line in lines if "/strop-sandbox-" not in line)]

    return await _compare(stage, _MOUNT, look, "mounts")


@attack(
    ATTACKS,
    18,
    tries="make or join namespaces of all kinds, and change its root",
    judged=_ON_HOST,
    expects=always(Code.BLOCKED),
)
async def _namespaces(stage: Stage) -> Observation:
    def look(pid: int) -> list[str]:
        names = [f"ns/{name}" for name in _KINDS]
        return [_link(f"/proc/{pid}/{name}") for name in (*names, "root")]

    return await _compare(stage, _NAMESPACES, look, "namespaces")


@attack(
    ATTACKS,
    18,
    tries="make device files",
    judged="files inside, listed by the suite",
    expects=always(Code.BLOCKED),
)
async def _make_devices(stage: Stage) -> Observation:
    await stage.python(_MKNOD)
    nodes = await stage.measure("find . -type b -o -type c")
    return Observation(Code.EXPOSED if nodes else Code.BLOCKED, nodes.replace("\n", " ") or "none was made")


@attack(
    ATTACKS,
    18,
    tries="open the kernel's settings for writing: sysrq, core_pattern, /sys",
    judged="descriptors of its process, seen on the host",
    expects=by_user("userns"),
)
async def _kernel_settings(stage: Stage) -> Observation:
    return await holds(stage, _OPEN, _SETTINGS, lambda link: link.startswith(("/proc/", "/sys/")))


@attack(
    ATTACKS,
    18,
    tries="open disks, memory and the kernel's log in /dev",
    judged="descriptors of its process, seen on the host",
    expects=by_user("mountns"),
)
async def _open_devices(stage: Stage) -> Observation:
    usual = {f"/dev/{name}" for name in _OWN_DEVICES}
    return await holds(stage, _DEVICES, (), lambda link: link.startswith("/dev/") and link not in usual)


@attack(
    ATTACKS,
    18,
    tries="bpf, perf_event_open, io_uring, userfaultfd, fanotify and memfd_secret",
    judged="descriptors of its process, seen on the host",
    expects=by_namespace("seccomp"),
)
async def _kernel_calls(stage: Stage) -> Observation:
    names = ("bpf", "perf_event_open", "io_uring_setup", "userfaultfd", "fanotify_init", "memfd_secret")
    bad = ("anon_inode:", "/secretmem")
    return await holds(stage, _CALLS, _numbers(*names), lambda link: link.startswith(bad))


@attack(
    ATTACKS,
    18,
    tries="keep keys in the kernel's keyrings",
    judged="the kernel's count",
    expects=by_namespace("seccomp"),
)
async def _keyrings(stage: Stage) -> Observation:
    before = _count_keys(stage.isolation.host_uid)
    async with stage.held(_KEYS, *_numbers("add_key", "keyctl")) as (_, result):
        if result is not None:
            return _ended(result)
        more = _count_keys(stage.isolation.host_uid) - before
    return Observation(Code.EXPOSED if more > 0 else Code.BLOCKED, f"{max(0, more)} keys more")


@attack(
    ATTACKS,
    18,
    tries="trace processes of this user",
    judged="who traces them, by the host's /proc",
    expects=by_user("pidns"),
)
async def _trace_host(stage: Stage) -> Observation:
    pids = [stage.bait.process.pid, stage.sandbox.supervisor_pid, os.getpid()]
    async with stage.held(_TRACE_OTHER, *map(str, pids)) as (_, result):
        if result is not None:
            return _ended(result)
        traced = [pid for pid in pids if _status(pid).get("TracerPid", "0") != "0"]
    return Observation(Code.EXPOSED if traced else Code.BLOCKED, f"{len(traced)} processes were traced")


@attack(
    ATTACKS,
    19,
    tries="become root, take capabilities, undo the filter of calls",
    judged=_ON_HOST,
    expects=always(Code.BLOCKED),
)
async def _become_root(stage: Stage) -> Observation:
    def look(pid: int) -> list[str]:
        names = (
            "Uid",
            "Gid",
            "Groups",
            "CapEff",
            "CapPrm",
            "CapAmb",
            "NoNewPrivs",
            "Seccomp",
            "Seccomp_filters",
        )
        return [_status(pid).get(name, "") for name in names]

    return await _compare(stage, _BECOME, look, "rights")


@attack(ATTACKS, 19, tries="start a set-uid program of root", judged=_ON_HOST, expects=always(Code.BLOCKED))
async def _set_uid_program(stage: Stage) -> Observation:
    return await _start_rights_program(stage, 0)


@attack(
    ATTACKS, 19, tries="start a program with file capabilities", judged=_ON_HOST, expects=always(Code.BLOCKED)
)
async def _capable_program(stage: Stage) -> Observation:
    return await _start_rights_program(stage, 1)


async def _start_rights_program(stage: Stage, index: int) -> Observation:
    """Start a privileged program of the bait in a sandbox, and check its privileges."""
    if not stage.bait.rights_programs or "mounts" in stage.isolation.lacks:
        async with stage.held("hold()") as (pids, _):
            is_kept = all(_status(pid).get("NoNewPrivs") == "1" for pid in pids) and bool(pids)
        return Observation(
            Code.BLOCKED if is_kept else Code.EXPOSED, f"no such file inside; NoNewPrivs: {is_kept}"
        )
    program = stage.bait.rights_programs[index]
    is_moved = stage.backend.name != "process"
    mounts = (Mount(host_path=str(program.parent), inside_path="/given"),) if is_moved else ()
    spec = SandboxSpec(limits=SMALL, mounts=mounts, min_level=IsolationLevel.NONE)
    path = f"/given/{program.name}" if mounts else str(program)
    async with await stage.backend.create(spec) as sandbox:
        running = asyncio.create_task(sandbox.exec([path, "600.125"], wall_limit_s=WALL_LIMIT_S))
        while True:
            pids = [
                pid
                for pid in find_descendants(sandbox.supervisor_pid)
                if read_or_empty(f"/proc/{pid}/cmdline").split("\0")[:2] == [path, "600.125"]
            ]
            if pids or running.done():
                break
            await asyncio.sleep(0.005)
        if running.done():
            result = running.result()
            is_refused = result.kind is ExecKind.NOT_STARTED
            return Observation(Code.BLOCKED, "the kernel does not start it") if is_refused else _ended(result)
        status = _status(pids[0])
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
    own = str(sandbox.isolation.host_uid)
    is_kept = (
        set(status["Uid"].split()) == {own} and int(status["CapPrm"], 16) == int(status["CapEff"], 16) == 0
    )
    what = f"user {status['Uid'].split()[1]}, capabilities {status['CapEff'].lstrip('0') or 'none'}"
    return Observation(Code.BLOCKED if is_kept else Code.EXPOSED, what.replace(own, "its own"))


async def _compare(stage: Stage, code: str, look: Callable[[int], list[str]], what: str) -> Observation:
    """Hold an attack, then a harmless process: both must look alike."""
    async with stage.held(code) as (pids, result):
        if result is not None:
            return _ended(result)
        now = look(pids[0])
    async with stage.held("hold()") as (pids, result):
        if result is not None:
            return _ended(result)
        usual = look(pids[0])
    changed = sum(value != expected for value, expected in zip(now, usual, strict=True))
    return Observation(Code.EXPOSED if changed else Code.BLOCKED, f"{changed} of its {what} differ")


async def holds(stage: Stage, code: str, words: Sequence[str], is_bad: Callable[[str], bool]) -> Observation:
    """Hold an attack, and check the targets of its descriptors."""
    async with stage.held(code, *words) as (pids, result):
        if result is not None:
            return _ended(result)
        links = [_link(f"/proc/{pid}/fd/{name}") for pid in pids for name in os.listdir(f"/proc/{pid}/fd")]
    held = sorted(filter(is_bad, links))
    return Observation(Code.EXPOSED if held else Code.BLOCKED, ", ".join(held) or "it holds none")


def _ended(result: ExecResult) -> Observation:
    error = result.stderr[-200:].decode(errors="replace")
    return Observation(Code.EXPOSED, f"it ended before it could be looked at: {result.kind.value} {error}")


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _status(pid: int) -> dict[str, str]:
    lines = read_or_empty(f"/proc/{pid}/status").splitlines()
    return {name: rest.strip() for name, _, rest in (line.partition(":") for line in lines)}


def _numbers(*names: str) -> list[str]:
    """Return the numbers of system calls on this machine; -1 where they are unknown."""
    column = {"x86_64": 0, "aarch64": 1}.get(platform.machine())
    return [str(-1 if column is None else CALLS[name][column]) for name in names]


def _count_keys(uid: int) -> int:
    for line in read_or_empty("/proc/key-users").splitlines():
        words = line.replace(":", " ").split()
        if words[0] == str(uid):
            return int(words[2].split("/")[0])
    return 0
