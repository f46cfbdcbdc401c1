"""Process 1 of a sandbox: runs commands, shells and file operations for the client at its socket.

This one file is started inside by the host's own Python, without any package, so images need none. It speaks
frames (both lengths, a JSON header, bytes) and passes descriptors. When the client is gone it ends, and with
it everything in the sandbox. Each command has a runner, a fork of this process that adopts the command's
orphans, gets the exit code from the kernel and reports it over a socket that no program holds.

Where this process is root, programs have another user, and no program can signal it or a runner. Otherwise a
program can kill its runner, which ends the sandbox; process 1 of a namespace cannot be killed from inside.
"""

from __future__ import annotations

import array
import ctypes
import errno
import fcntl
import json
import marshal
import math
import os
import resource
import select
import selectors
import signal
import socket
import stat
import struct
import sys
import termios
import time
from collections import deque
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    # `typing` takes milliseconds to import.
    from collections.abc import Callable, Collection, Iterator
    from typing import Any, NoReturn

LENGTHS = struct.Struct("!IQ")
MAX_HEADER_BYTES = 1 << 24
CHUNK_BYTES = 1 << 16
"""Bytes of one read; no less than the capacity of a pipe."""
INSIDE_ID = 1000
"""User and group id of programs in a user namespace."""
PROXY_PORT = 3128
EXIT_KINDS = {
    10: "missing",
    11: "directory",
    12: "not_regular",
    13: "denied",
    14: "too_large",
    15: "no_space",
    16: "io",
}
"""What the exit code of a file operation means."""
_CODES = {kind: code for code, kind in EXIT_KINDS.items()}
_FILE_ERRORS = {
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR), "missing"),
    errno.EISDIR: "directory",
    **dict.fromkeys((errno.ELOOP, errno.ENXIO), "not_regular"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "denied"),
    errno.EFBIG: "too_large",
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "no_space"),
}
_CONNECT_ERRORS = {
    **dict.fromkeys((errno.ECONNREFUSED, errno.ENOTSOCK, errno.EPROTOTYPE), "refused"),
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR), "missing"),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "denied"),
    errno.ETIMEDOUT: "timed_out",
    errno.EAGAIN: "busy",
}
_CONNECT_LIMIT_S = 10.0
MAX_CALLERS = 64
"""Connections that are opened at once, and callers that the proxy serves at once."""
_TERM_GRACE_S = 0.5
_DETACH_S = 0.2
"""How long output is awaited from a pipe that a process still holds after the command's end."""
_STUCK_S = 5.0
"""A command that does not end this long after SIGKILL has lost its runner."""
_KILL_EVERY_S = 0.01
_WATCH_EVERY_S = 0.05
_SHELL_GRACE_S = 1.0
_LOOK_EVERY_S = 0.001
_STATUS_FD = 9
_NAMESPACES = ("user", "pid", "mnt", "net", "ipc", "uts")
_CLONE_NEWUSER = 0x10000000
_MS_NOSUID, _MS_NODEV, _MS_REMOUNT = 2, 4, 32
_PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_CAPBSET_DROP = 4, 22, 24
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 36, 38, 47
_NUM_CAPABILITIES = 64
_IPC_RMID = 0
_PAGE_BYTES = resource.getpagesize()
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_MAX_WALKED_FILES = 100_000
_libc = ctypes.CDLL(None, use_errno=True)


# Frames.


def pack(header: dict[str, Any], body: bytes = b"") -> bytes:
    """Return the frame of a header and its bytes. Raises: ValueError for a header that is too large."""
    text = json.dumps(header, separators=(",", ":")).encode()
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {len(text)} bytes, and {MAX_HEADER_BYTES} are allowed")
    return LENGTHS.pack(len(text), len(body)) + text + body


def unpack(buffer: bytearray) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Remove the complete frames from a buffer and yield them. Raises: ValueError for a malformed frame."""
    while len(buffer) >= LENGTHS.size:
        header_bytes, body_bytes = LENGTHS.unpack_from(buffer)
        if header_bytes > MAX_HEADER_BYTES:
            raise ValueError(f"a header of {header_bytes} bytes")
        start = LENGTHS.size + header_bytes
        if len(buffer) < start + body_bytes:
            return
        header = json.loads(buffer[LENGTHS.size : start])
        if not isinstance(header, dict):
            raise ValueError(f"a header that is a {type(header).__name__}")
        body = bytes(buffer[start : start + body_bytes])
        del buffer[: start + body_bytes]
        yield header, body


class Channel:
    """One end of a connection that carries frames and descriptors, without blocking."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.socket = connection
        self._incoming = bytearray()
        self._descriptors: deque[int] = deque()
        self._outgoing: deque[tuple[memoryview, int | None]] = deque()

    @property
    def has_unsent(self) -> bool:
        """Whether bytes wait until the other end reads."""
        return bool(self._outgoing)

    def receive(self) -> Iterator[tuple[dict[str, Any], bytes]]:
        """Return the complete frames so far.

        Raises: EOFError if the other end has closed; ValueError for a malformed frame.
        """
        size = array.array("i").itemsize
        try:
            # Not socket.recv_fds, which ignores its flags.
            data, ancillary, _, _ = self.socket.recvmsg(
                CHUNK_BYTES, socket.CMSG_SPACE(16 * size), socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return iter(())
        except OSError as error:
            raise EOFError from error
        if not data:
            raise EOFError
        for level, kind, part in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self._descriptors.extend(array.array("i", part[: len(part) - len(part) % size]))
        self._incoming += data
        return unpack(self._incoming)

    def take_descriptor(self) -> int:
        """Return the descriptor of the current frame; they arrive in the order of their frames."""
        return self._descriptors.popleft()

    def send(self, header: dict[str, Any], body: bytes = b"", *, descriptor: int | None = None) -> None:
        """Send a frame as far as the socket accepts it now; `flush` sends the rest. Closes the descriptor.

        Raises: ConnectionError if the other end has closed.
        """
        self._outgoing.append((memoryview(pack(header, body)), descriptor))
        self.flush()

    def flush(self) -> None:
        """Send waiting bytes as far as the socket accepts them. Raises: as `send`."""
        while self._outgoing:
            data, descriptor = self._outgoing[0]
            try:
                if descriptor is None:
                    num_sent = self.socket.send(data)
                else:
                    num_sent = socket.send_fds(self.socket, [data], [descriptor])
                    os.close(descriptor)
            except BlockingIOError:
                return
            except OSError as error:
                raise ConnectionError(str(error)) from error
            self._outgoing.popleft()
            if num_sent < len(data):
                self._outgoing.appendleft((data[num_sent:], None))

    def close(self) -> None:
        """Close this end, and the descriptors that were not taken."""
        self.socket.close()
        for descriptor in (*self._descriptors, *(one for _, one in self._outgoing if one is not None)):
            with suppress(OSError):
                os.close(descriptor)
        self._descriptors.clear()
        self._outgoing.clear()


class Capture:
    """Keeps the first `head_bytes` and the last `tail_bytes` of a stream, and counts all.

    A slow reader costs no memory and does not block the command: it misses the middle.
    """

    def __init__(self, head_bytes: int, tail_bytes: int) -> None:
        self._head_bytes = head_bytes
        self._tail_bytes = tail_bytes
        self.head = bytearray()
        self._tail = bytearray()
        self.total = 0

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the stream."""
        self.total += len(data)
        room = self._head_bytes - len(self.head)
        if room > 0:
            self.head += data[:room]
            data = data[room:]
        self._tail += data
        # Cut rarely: each cut moves the whole tail.
        if len(self._tail) > 2 * self._tail_bytes + CHUNK_BYTES:
            self._cut()

    def kept(self) -> bytes:
        """Return head and tail: the whole stream if it fits."""
        self._cut()
        return bytes(self.head + self._tail)

    def since(self, position: int) -> tuple[int, bytes]:
        """Return the number of dropped bytes behind `position`, and the kept bytes behind those."""
        self._cut()
        return unread(bytes(self.head), bytes(self._tail), self.total, position)

    def _cut(self) -> None:
        if (surplus := len(self._tail) - self._tail_bytes) > 0:
            del self._tail[:surplus]


def unread(head: bytes, tail: bytes, total: int, position: int) -> tuple[int, bytes]:
    """Compute `Capture.since` from a stream's kept beginning and end.

    The bytes have no gap: if the end does not follow the beginning directly, the next call returns it.
    """
    tail_at = total - len(tail)
    if position < len(head):
        return 0, head[position:] + (tail if tail_at == len(head) else b"")
    gone = max(0, tail_at - position)
    return gone, tail[position + gone - tail_at :]


# Processes, as /proc shows them.


def read_or_empty(path: str | os.PathLike[str], dir_fd: int | None = None) -> str:
    """Return the text of a file in /proc or /sys; empty if it is missing or not readable."""
    parts = []
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=dir_fd)
        try:
            while part := os.read(descriptor, CHUNK_BYTES):
                parts.append(part)
        finally:
            os.close(descriptor)
    except OSError:
        return ""
    return b"".join(parts).decode(errors="replace")


def _list_entries(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []


def _read_stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat behind the name; none if the process is gone."""
    return read_or_empty(f"/proc/{pid}/stat").rpartition(")")[2].split()


def find_children(pid: int) -> list[int]:
    """Return the children of a process."""
    threads = _list_entries(f"/proc/{pid}/task")
    lists = [read_or_empty(f"/proc/{pid}/task/{thread}/children").split() for thread in threads]
    return [int(child) for listed in lists for child in listed]


def find_descendants(pid: int, spared: Collection[int] = ()) -> list[int]:
    """Return the descendants of a process, parents first, without `spared` and their descendants."""
    found, queue = [], [pid]
    while queue:
        children = [child for child in find_children(queue.pop()) if child not in spared]
        found += children
        queue += children
    return found


def describe_processes(pids: Collection[int]) -> dict[int, tuple[str, str]]:
    """Return state letter and start time of the processes that still exist.

    Process id and start time together identify a process for ever.
    """
    stats = {pid: _read_stat(pid) for pid in pids}
    return {pid: (fields[0], fields[19]) for pid, fields in stats.items() if fields}


def signal_all(pids: Collection[int], number: int) -> None:
    """Send a signal to processes, which may have ended."""
    for pid in pids:
        with suppress(OSError):
            os.kill(pid, number)


def _cpu_s(pids: Collection[int]) -> float:
    """Return the CPU time of processes and their children that have ended."""
    return sum(int(word) for pid in pids for word in _read_stat(pid)[11:15]) / _TICKS_PER_S


def memory_bytes(pids: Collection[int], limit_bytes: int) -> int:
    """Return the total memory of processes, with what they hold in shared memory and memfds.

    The sum that counts shared pages once takes milliseconds, so it is used only above the limit.
    """
    shared_bytes = _shared_bytes(pids)
    quick_bytes = sum(map(_resident_bytes, pids)) + shared_bytes
    if quick_bytes <= limit_bytes:
        return quick_bytes
    return sum(map(_proportional_bytes, pids)) + shared_bytes


def _resident_bytes(pid: int) -> int:
    fields = read_or_empty(f"/proc/{pid}/statm").split()
    return int(fields[1]) * _PAGE_BYTES if fields else 0


def _proportional_bytes(pid: int) -> int:
    lines = (line.split() for line in read_or_empty(f"/proc/{pid}/smaps_rollup").splitlines()[1:])
    sizes = {line[0]: int(line[1]) << 10 for line in lines}
    # Shared memory is counted by its objects; that of files in memory belongs to the limit of the disk.
    return sizes["Pss:"] - sizes.get("Pss_Shmem:", 0) if "Pss:" in sizes else _resident_bytes(pid)


def _shared_bytes(pids: Collection[int]) -> int:
    """Return the bytes in memfds and shared anonymous memory, each counted once."""
    opened: dict[int, int] = {}
    mapped: dict[int, int] = {}
    for pid in pids:
        for name in _list_entries(f"/proc/{pid}/fd"):
            with suppress(OSError):
                path = f"/proc/{pid}/fd/{name}"
                if os.readlink(path).startswith("/memfd:"):
                    info = os.stat(path)
                    opened[info.st_ino] = info.st_blocks * 512
        for line in read_or_empty(f"/proc/{pid}/maps").splitlines():
            if line.endswith(" (deleted)") and line.split(None, 5)[-1].startswith(("/memfd:", "/dev/zero")):
                span, _, offset, _, inode, _ = line.split(None, 5)
                begin, end = (int(word, 16) for word in span.split("-"))
                mapped[int(inode)] = max(mapped.get(int(inode), 0), int(offset, 16) + end - begin)
    return sum((mapped | opened).values())


def num_threads(pids: Collection[int]) -> int:
    """Return the total number of threads of processes."""
    return sum(len(_list_entries(f"/proc/{pid}/task")) for pid in pids)


def _list_ipc(kind: str, uid: int) -> list[dict[str, str]]:
    """Return the System V objects of a user in this namespace."""
    header, *lines = read_or_empty(f"/proc/sysvipc/{kind}").splitlines() or [""]
    rows = [dict(zip(header.split(), line.split(), strict=False)) for line in lines]
    return [row for row in rows if row["uid"] == str(uid)]


def remove_ipc(uid: int, *, is_idle: bool) -> None:
    """Remove a user's System V objects, which outlive its processes; `is_idle`: only unused memory."""
    for row in _list_ipc("shm", uid):
        if not is_idle or row["nattch"] == "0":
            _libc.shmctl(int(row["shmid"]), _IPC_RMID, None)
    for row in () if is_idle else _list_ipc("sem", uid):
        _libc.semctl(int(row["semid"]), 0, _IPC_RMID)
    for row in _list_ipc("msg", uid):
        _libc.msgctl(int(row["msqid"]), _IPC_RMID, None)


def measure_tree(top: str) -> tuple[int, int]:
    """Return disk usage in bytes and number of files below a directory; links are not followed."""
    num_bytes = num_files = 0
    queue = [top]
    while queue and num_files < _MAX_WALKED_FILES:
        # What was removed meanwhile, or made unreadable after its files had been counted, is left out.
        with suppress(OSError), os.scandir(queue.pop()) as entries:
            for entry in entries:
                num_files += 1
                if entry.is_dir(follow_symlinks=False):
                    queue.append(entry.path)
                num_bytes += entry.stat(follow_symlinks=False).st_blocks * 512
    return num_bytes, num_files


def remove_tree(path: str | os.PathLike[str]) -> None:
    """Remove a directory tree, whatever the modes in it."""
    quiet = [(os.POSIX_SPAWN_OPEN, 2, "/dev/null", os.O_WRONLY, 0)]
    # Not a walk of our own: a program may nest directories deeper than Python's stack.
    for words in (["/bin/rm", "-rf"], ["/bin/chmod", "-R", "u+rwX"], ["/bin/rm", "-rf"]):
        if os.path.isdir(path):
            os.waitpid(os.posix_spawn(words[0], [*words, path], {}, file_actions=quiet), 0)


# Privileges.


def _checked(result: int, call: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


def set_capabilities(kept: int) -> None:
    """Give up all capabilities except the bit mask `kept`. Raises: OSError."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    low, high = kept & 0xFFFFFFFF, kept >> 32
    # Effective, permitted and inheritable sets: first the lower 32 bits, then the upper.
    _checked(_libc.capset(header, (ctypes.c_uint32 * 6)(low, low, 0, high, high, 0)), "capset")


def _become_user(uid: int, gid: int) -> None:
    if os.geteuid() != uid:
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def close_all_but(kept: Collection[int]) -> None:
    """Close all descriptors of this process except `kept`."""
    # Not os.closerange: with an old C library it tries each of a billion numbers.
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with suppress(OSError):  # The listing's own descriptor is closed already.
                os.close(int(name))


class _Place:
    """What the client's first frame says of the sandbox, and what is prepared once by it."""

    def __init__(self, setup: dict[str, Any], code: bytes) -> None:
        self.limits: dict[str, Any] = setup["limits"]
        self.scratch: str = setup["scratch"]
        self.user: list[int] | None = setup["user"]
        """User and group ids that programs change to; None: they have those of this process."""
        self.capabilities: int = setup["capabilities"]
        """Bit mask of those that programs keep."""
        self.watch: dict[str, int] = setup["watch"]
        """Limits that the kernel does not enforce, and a runner checks."""
        self.max_user_processes: int | None = setup["max_user_processes"]
        self.is_own_disk: bool = setup["is_own_disk"]
        self.env: dict[str, str] = setup["env"]
        self.source: str = setup["main_source"]
        names: dict[str, Any] = {"__name__": "loaded", "main": lambda: None}
        if code:
            exec(marshal.loads(code), names)
        self.main: Callable[[], None] = names["main"]
        self.filter = bytes.fromhex(setup["filter"])
        self.groups: list[int] = setup["groups"]
        """Directories of the control groups that programs join."""
        opened = os.O_WRONLY | os.O_CLOEXEC
        self.members = [os.open("cgroup.procs", opened, dir_fd=group) for group in self.groups]
        if setup["has_engine_groups"]:
            self.groups = [
                os.open(path, os.O_PATH | os.O_CLOEXEC)
                for path in ("/sys/fs/cgroup/memory", "/sys/fs/cgroup")
                if os.path.isdir(path)
            ]
        # bwrap can only bound the size, and older ones not even that.
        flags = ctypes.c_ulong(_MS_NOSUID | _MS_NODEV | _MS_REMOUNT)
        for path, options in setup["remounts"].items():
            data = options.encode()
            _checked(_libc.mount(b"tmpfs", path.encode(), b"tmpfs", flags, data), f"size of {path}")
            os.chmod(path, 0o1777)
        if (workspace := setup["workspace"]) and not os.path.islink(workspace):
            with suppress(FileExistsError):
                os.mkdir(workspace)
            if self.user is not None:
                os.chown(workspace, *self.user)
        self._namespace: int | None = self._make_users() if setup["has_users"] else None

    def _make_users(self) -> int:
        """Return a user namespace in which the programs' user is `INSIDE_ID`, and nobody else is anybody."""
        assert self.user is not None
        uid, gid = self.user
        here, there = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            try:
                here.close()
                _become_user(uid, gid)
                _checked(_libc.unshare(_CLONE_NEWUSER), "unshare")
                own = os.open("/proc/self/ns/user", os.O_RDONLY | os.O_CLOEXEC)
                socket.send_fds(there, [b"."], [own])
                there.recv(1)
            finally:
                os._exit(0)
        there.close()
        _, descriptors, _, _ = socket.recv_fds(here, 1, 1)
        if not descriptors:
            raise OSError(errno.EPERM, "no user namespace may be made")
        for kind, outside in (("uid", uid), ("gid", gid)):
            with open(f"/proc/{pid}/{kind}_map", "w") as file:
                file.write(f"{INSIDE_ID} {outside} 1\n")
        here.close()
        os.waitpid(pid, 0)
        os.set_inheritable(descriptors[0], False)
        return descriptors[0]

    def lower(self, joins_groups: bool = True) -> None:
        """Turn this process, a fork, into one with the rights of a program. Raises: OSError."""
        if joins_groups:
            for member in self.members:
                os.write(member, b"0")
        os.umask(0o022)
        _checked(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges")
        if self._namespace is None:
            self._bound_capabilities()
        if self.user is not None:
            _become_user(*self.user)
        if self._namespace is not None:
            # This gives all capabilities over that namespace.
            _checked(_libc.setns(self._namespace, _CLONE_NEWUSER), "setns")
            self._bound_capabilities()
        set_capabilities(self.capabilities)
        if self.filter:
            # On a kernel without seccomp it does nothing; the measurement then shows no filter.
            program = _Filter(len(self.filter) // 8, self.filter)
            _libc.prctl(_PR_SET_SECCOMP, 2, ctypes.byref(program), 0, 0)

    def _bound_capabilities(self) -> None:
        for capability in range(_NUM_CAPABILITIES):
            # This fails for who has no capability, and beyond the kernel's last one.
            if not self.capabilities >> capability & 1:
                _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
        _libc.prctl(_PR_CAP_AMBIENT, 4, 0, 0, 0)

    def count_oom_kills(self) -> int:
        """Return how many processes the kernel has killed for memory."""
        for group in self.groups:
            for name in ("memory.events", "memory.oom_control"):
                for line in read_or_empty(name, group).splitlines():
                    word, _, number = line.partition(" ")
                    if word == "oom_kill":
                        return int(number)
        return 0

    def read_memory(self) -> tuple[int, int | None] | None:
        """Return current and peak bytes of the group; None where there is none."""
        for names in (
            ("memory.current", "memory.peak"),
            ("memory.usage_in_bytes", "memory.max_usage_in_bytes"),
        ):
            for group in self.groups:
                if now := read_or_empty(names[0], group):
                    peak = read_or_empty(names[1], group)
                    return int(now), int(peak) if peak else None
        return None


# What a fork with the rights of a program does by itself: files, the measurement.


def _write_all(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _read(details: dict[str, Any]) -> str:
    # NONBLOCK: a FIFO without a writer would block for ever. NOFOLLOW: a link is not a regular file.
    descriptor = os.open(details["path"], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        return "directory" if stat.S_ISDIR(mode) else "not_regular"
    os.lseek(descriptor, details["offset"], os.SEEK_SET)
    num_bytes = 0
    # Bytes read are counted; the file's reported size is not trusted.
    while data := os.read(descriptor, CHUNK_BYTES):
        num_bytes += len(data)
        if num_bytes > details["max_bytes"]:
            return "too_large"
        _write_all(1, data)
    return ""


def _write(details: dict[str, Any]) -> str:
    path = details["path"]
    folder = os.path.dirname(path)
    if folder:
        os.makedirs(folder, exist_ok=True)
    if os.path.isdir(path):
        return "directory"
    partial = os.path.join(folder, f".{os.getpid()}.partial")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(partial, flags, 0o600)
    try:
        while data := os.read(0, CHUNK_BYTES):
            _write_all(descriptor, data)
        os.fchmod(descriptor, details["mode"])
        os.replace(partial, path)
    except OSError:
        os.unlink(partial)
        raise
    return ""


def _make_dir(details: dict[str, Any]) -> str:
    os.makedirs(details["path"], exist_ok=True)
    return ""


def _list(details: dict[str, Any]) -> str:
    """Write a listing of a tree: relative name, kind, permission bits. Links are not followed."""
    top = details["path"]
    listing, queue = [], [""]
    while queue:
        name = queue.pop()
        mode = os.lstat(os.path.join(top, name) if name else top).st_mode
        kind = "file" if stat.S_ISREG(mode) else "directory" if stat.S_ISDIR(mode) else "other"
        listing.append((name, kind, stat.S_IMODE(mode)))
        if len(listing) > details["max_files"]:
            return "too_large"
        if kind == "directory":
            queue += sorted(os.path.join(name, entry) for entry in os.listdir(os.path.join(top, name)))
    _write_all(1, json.dumps(listing).encode())
    return ""


_BUILTINS = {"read": _read, "write": _write, "make_dir": _make_dir, "list": _list}


def _run_builtin(name: str, details: dict[str, Any]) -> int:
    """Do a file operation and return the exit code."""
    try:
        kind = _BUILTINS[name](details)
    except OSError as error:
        os.write(2, str(error).encode(errors="replace"))
        kind = _FILE_ERRORS.get(error.errno or 0, "io")
    return _CODES[kind] if kind else 0


def read_namespaces() -> dict[str, str]:
    """Return the identities of this thread's namespaces, by kind; "" if the kernel has no such kind."""
    names = dict.fromkeys(_NAMESPACES, "")
    for name in _NAMESPACES:
        with suppress(OSError):
            names[name] = os.readlink(f"/proc/thread-self/ns/{name}")
    return names


def _measure() -> dict[str, Any]:
    """Return this process's rights and namespaces, as the kernel reports them."""
    lines = read_or_empty("/proc/self/status").splitlines()
    status = {word: rest.strip() for word, _, rest in (line.partition(":") for line in lines)}
    facts = {
        "caps": f"{int(status['CapEff'], 16):x}/{int(status['CapBnd'], 16):x}",
        "permitted": int(status["CapPrm"], 16),
        "no_new_privs": status.get("NoNewPrivs") == "1",
        "seccomp": status.get("Seccomp", "0") != "0",
        "namespaces": read_namespaces(),
        "uid_map": read_or_empty("/proc/self/uid_map"),
        "uid": os.getuid(),
    }
    # Last, because success changes this process.
    facts["nested_userns"] = _libc.unshare(_CLONE_NEWUSER) == 0
    return facts


# The runner of a command, and the program.


class _Started:
    """The agent's ends of a command."""

    def __init__(self, place: _Place, request: dict[str, Any] | None) -> None:
        """Fork a command's runner. Without a request the program's process measures itself and waits for one.

        Raises: OSError if the host gives no process.
        """
        self.control, runner_end = socket.socketpair()
        self.orders, order_end = socket.socketpair()
        pipes = [os.pipe(), os.pipe(), os.pipe()]
        (stdin_r, self.stdin), (self.stdout, stdout_w), (self.stderr, stderr_w) = pipes
        # A shell reports the status of its commands here.
        self.status, status_w = os.pipe() if request is not None and request.get("is_shell") else (-1, -1)
        streams = [stdin_r, stdout_w, stderr_w, *([status_w] if status_w >= 0 else [])]
        try:
            self.pid = os.fork()
            if self.pid == 0:
                _become_runner(place, request, streams, order_end, runner_end)
        finally:
            for end in (runner_end, order_end):
                end.close()
            for descriptor in streams:
                os.close(descriptor)
        if request is not None:
            self.orders.close()

    def order(self, request: dict[str, Any]) -> None:
        """Send a waiting process its request. If the process is gone, its runner reports why."""
        with suppress(OSError):
            self.orders.sendall(json.dumps(request).encode())
        self.orders.close()

    def find_program(self) -> int:
        """Return the program's process, which leads its group; 0 if it is gone."""
        return next(iter(find_children(self.pid)), 0)

    def close(self) -> None:
        """Drop a waiting command, which ends when `orders` closes."""
        self.orders.close()
        self.control.close()
        for descriptor in (self.stdin, self.stdout, self.stderr):
            os.close(descriptor)


def _become_runner(
    place: _Place,
    request: dict[str, Any] | None,
    streams: list[int],
    orders: socket.socket,
    control: socket.socket,
) -> NoReturn:
    """Run one command to its end; report once all of its processes are gone."""
    try:
        signal.set_wakeup_fd(-1)
        os.setsid()
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        # The input of another command ends only when all copies of its writing end are closed.
        own = {0, 1, 2, *place.groups, *place.members, place._namespace or 0}
        close_all_but({*own, *streams, orders.fileno(), control.fileno()})
        wake_r, wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
        error_r, error_w = os.pipe2(os.O_CLOEXEC)
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            control.close()
            _become_program(place, request, streams, orders.fileno(), error_w)
        orders.close()
        for descriptor in (*streams, error_w):
            os.close(descriptor)
        # The program's exec closes the other end.
        with open(error_r, "rb") as errors:
            error = errors.read().decode(errors="replace")
        report = _wait_for_all(place, pid, control, wake_r)
        control.sendall(json.dumps({**report, "error": error}).encode())
    finally:
        os._exit(0)


def _wait_for_all(place: _Place, program: int, control: socket.socket, wake_r: int) -> dict[str, Any]:
    """Wait for a program, then kill all that it left; kill at once when the agent is gone."""
    report: dict[str, Any] = {"status": None, "ended_at": 0.0, "cpu_s": 0.0, "oom_kills": 0, "breach": ""}
    poll = select.poll()
    for source in (control.fileno(), wake_r):
        poll.register(source, select.POLLIN)
    is_killing, next_watch_at = False, time.monotonic() + _WATCH_EVERY_S
    while True:
        try:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return report
        if pid:
            # The program's usage includes all children that it waited for; others here are orphans.
            report["cpu_s"] += usage.ru_utime + usage.ru_stime
            if pid == program:
                report["status"], report["ended_at"], is_killing = status, time.monotonic(), True
            continue
        wait_s = math.inf
        if is_killing:
            signal_all(find_descendants(os.getpid()), signal.SIGKILL)
            wait_s = _KILL_EVERY_S
        elif place.watch:
            if time.monotonic() >= next_watch_at:
                is_killing = _watch(place, report)
                next_watch_at = time.monotonic() + _WATCH_EVERY_S
                continue
            wait_s = next_watch_at - time.monotonic()
        for descriptor, _ in poll.poll(None if math.isinf(wait_s) else max(0.0, 1000 * wait_s)):
            if descriptor == wake_r:
                with suppress(BlockingIOError):
                    os.read(wake_r, 4096)
            else:
                is_killing = True
                poll.unregister(control)


def _watch(place: _Place, report: dict[str, Any]) -> bool:
    """Check the limits that the kernel does not enforce; return whether the command must end."""
    watch, pids = place.watch, find_descendants(os.getpid())
    if "memory" in watch:
        uid = os.getuid() if place.user is None else place.user[0]
        kept_bytes = sum(int(row["rss"]) + int(row["swap"]) for row in _list_ipc("shm", uid))
        if pids and kept_bytes + memory_bytes(pids, watch["memory"] - kept_bytes) > watch["memory"]:
            signal_all([max(pids, key=_resident_bytes)], signal.SIGKILL)
            report["oom_kills"] += 1
    if "processes" in watch and num_threads(pids) > watch["processes"]:
        report["breach"] = f"more than {watch['processes']} processes"
    if "disk" in watch:
        num_bytes, num_files = measure_tree(place.scratch)
        if num_bytes > watch["disk"] or num_files > watch["files"]:
            report["breach"] = f"{num_bytes} bytes in {num_files} files"
    return bool(report["breach"])


def _become_program(
    place: _Place, request: dict[str, Any] | None, streams: list[int], orders: int, error_w: int
) -> NoReturn:
    """Drop privileges, set limits, then exec the program. Exits with 127 if that fails."""
    try:
        os.setsid()
        for target, descriptor in zip((0, 1, 2), streams, strict=False):
            os.dup2(descriptor, target)
        if os.geteuid() == 0:
            # Where the agent is in the same control group, a program is to be killed for memory instead.
            with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
                file.write("500")
        place.lower()
        # Moved behind the number that a shell's status descriptor gets.
        error_w = fcntl.fcntl(error_w, fcntl.F_DUPFD_CLOEXEC, _STATUS_FD + 1)
        orders = fcntl.fcntl(orders, fcntl.F_DUPFD_CLOEXEC, _STATUS_FD + 1)
        kept = {0, 1, 2}
        if len(streams) > len(kept):
            os.dup2(streams[-1], _STATUS_FD)
            os.set_inheritable(_STATUS_FD, True)
            kept.add(_STATUS_FD)
        close_all_but({*kept, error_w, orders})
        if request is None:
            request = _await_request(orders)
        os.close(orders)
        _run_request(place, request, error_w)
    except Exception as error:
        os.write(error_w, str(error).encode(errors="replace"))
    finally:
        os._exit(127)


def _await_request(orders: int) -> dict[str, Any]:
    facts = _measure()
    os.write(orders, json.dumps(facts).encode())
    parts = []
    while part := os.read(orders, CHUNK_BYTES):
        parts.append(part)
    if not parts or facts["nested_userns"]:
        # The measurement may have put this process into a user namespace.
        os._exit(0)
    return dict(json.loads(b"".join(parts)))


def _set_limit(kind: int, value: int) -> None:
    """Lower a limit of this process, never raise it."""
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def _run_request(place: _Place, request: dict[str, Any], error_w: int) -> NoReturn:
    os.chdir(request["cwd"])
    limits = place.limits
    _set_limit(resource.RLIMIT_CORE, 0)
    _set_limit(resource.RLIMIT_FSIZE, limits["file_bytes"])
    _set_limit(resource.RLIMIT_NOFILE, limits["max_open_files"])
    if math.isfinite(request["wall_limit_s"]):
        # Per process, and a second above the wall limit, so that the wall limit comes first.
        _set_limit(resource.RLIMIT_CPU, math.ceil(request["wall_limit_s"]) + 1)
    if place.max_user_processes is not None:
        own = 1 + request["num_jobs"] if place.user is None else 0
        _set_limit(resource.RLIMIT_NPROC, place.max_user_processes + own)
    if request["builtin"]:
        os._exit(_run_builtin(request["builtin"], request["details"]))
    if limits["has_address_limit"]:
        _set_limit(resource.RLIMIT_AS, limits["memory_bytes"])
    # Python ignores two signals, and a shell others for background commands.
    for number in signal.valid_signals():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if request["is_main"]:
        os.close(error_w)
        _run_main(place.main, request["env"])
    # Not os.execvpe, which imports a module that this user may not be able to read.
    argv, env = request["argv"], request["env"]
    folders = [""] if "/" in argv[0] else [f"{folder}/" for folder in env.get("PATH", os.defpath).split(":")]
    found: OSError = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), argv[0])
    for folder in folders:
        try:
            os.execve(f"{folder}{argv[0]}", argv, env)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            found = error
    raise found


def _run_main(main: Callable[[], None], env: dict[str, str]) -> NoReturn:
    """Restore the state of a newly started interpreter, and run `main`."""
    exit_code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
        os.environ.clear()
        os.environ.update(env)
        sys.argv = ["-c"]
        # The frames below this one must not count against the program's recursion limit.
        num_frames, frame = 0, sys._getframe()
        while frame.f_back is not None:
            num_frames, frame = num_frames + 1, frame.f_back
        sys.setrecursionlimit(sys.getrecursionlimit() + num_frames)
        main()
        exit_code = 0
    finally:
        if exit_code:
            import traceback

            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)


# The agent's side of a command.


class _Job:
    """A running command: its pipes, its time limit, its result."""

    is_counted = True
    """Whether the statistics count it."""

    def __init__(
        self, agent: _Agent, number: int, started: _Started, wall_limit_s: float, head_bytes: int
    ) -> None:
        self.number = number
        self.started = started
        self._agent = agent
        self._kept_bytes = (head_bytes, agent.place.limits["output_tail_bytes"])
        self.stdout, self.stderr = Capture(*self._kept_bytes), Capture(*self._kept_bytes)
        self._oom_kills_before = agent.place.count_oom_kills()
        self.started_at = time.monotonic()
        self.next_at = self.started_at + wall_limit_s
        """Next deadline: the wall limit at first, later that of the next step of its end."""
        self._kill_at = math.inf
        """When SIGKILL begins."""
        self._stuck_at = math.inf
        self.report: dict[str, Any] | None = None
        self.is_lost = self._is_timed_out = self._is_flooding = False
        self._input: deque[tuple[memoryview, int | None]] = deque()
        """Data not yet written, each part with the request that waits for it."""
        self._is_input_open, self._is_input_complete = True, False
        self._awaited: tuple[int, int, int] | None = None
        """A waiting request for output, and its positions in both streams."""
        self._streams: dict[int, Callable[[], None]] = {
            # Looked up at each call, since a shell replaces its captures for each command.
            started.stdout: lambda: self._take_output(started.stdout, self.stdout),
            started.stderr: lambda: self._take_output(started.stderr, self.stderr),
        }
        for descriptor in (started.stdin, started.stdout, started.stderr):
            os.set_blocking(descriptor, False)
        for descriptor, react in self._streams.items():
            agent.watch(descriptor, react)
        agent.watch(started.control, self._on_report)

    # Its input.

    def feed(self, data: bytes, request_id: int | None = None) -> None:
        """Write to standard input; the request is answered once all is written, or cannot be."""
        if not self._is_input_open or self._is_input_complete:
            self._acknowledge(request_id, is_open=False)
            return
        if not self._input:
            self._agent.watch(self.started.stdin, self._on_stdin, selectors.EVENT_WRITE)
        self._input.append((memoryview(data), request_id))

    def close_stdin(self) -> None:
        """Close standard input behind the data that was fed."""
        self._is_input_complete = True
        if not self._input:
            self._end_input()

    def _on_stdin(self) -> None:
        data, request_id = self._input[0]
        try:
            data = data[os.write(self.started.stdin, data) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._end_input()
            return
        self._input[0] = (data, request_id)
        if data:
            return
        self._input.popleft()
        self._acknowledge(request_id, is_open=True)
        if not self._input:
            self._agent.unwatch(self.started.stdin)
            if self._is_input_complete:
                self._end_input()

    def _end_input(self) -> None:
        if self._is_input_open:
            self._is_input_open = False
            self._close(self.started.stdin)
            for _, request_id in self._input:
                self._acknowledge(request_id, is_open=False)
            self._input.clear()

    def _acknowledge(self, request_id: int | None, *, is_open: bool) -> None:
        if request_id is not None:
            self._agent.send({"id": request_id, "is_open": is_open})

    # Its output.

    def await_output(self, request_id: int, positions: list[int]) -> None:
        """Answer with the output behind the positions, once there is some."""
        self._awaited = (request_id, positions[0], positions[1])
        self._answer_awaited()

    def _take_output(self, descriptor: int, into: Capture) -> None:
        try:
            data = os.read(descriptor, CHUNK_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._close(descriptor)
            del self._streams[descriptor]
            self._end_if_done()
            return
        into.feed(data)
        if (
            self.stdout.total + self.stderr.total > self._agent.place.limits["flood_bytes"]
            and not self._is_flooding
        ):
            self._is_flooding = True
            self._stop_flood()
        self._answer_awaited()

    def _stop_flood(self) -> None:
        self.end(0.0)

    def _answer_awaited(self) -> None:
        if self._awaited is None:
            return
        request_id, stdout_at, stderr_at = self._awaited
        if self.stdout.total > stdout_at or self.stderr.total > stderr_at:
            self._awaited = None
            (out_gone, out), (error_gone, error) = self.stdout.since(stdout_at), self.stderr.since(stderr_at)
            header = {"id": request_id, "stdout_bytes": len(out), "omitted": [out_gone, error_gone]}
            self._agent.send(header, out + error)

    # Its end.

    def end(self, grace_s: float) -> None:
        """Kill all of its processes, after a time in which they may end by SIGTERM."""
        if grace_s:
            signal_all(find_descendants(self.started.pid), signal.SIGTERM)
        self._kill_at = min(self._kill_at, time.monotonic() + grace_s)
        self.next_at = min(self.next_at, self._kill_at)

    def drop(self) -> None:
        """End the current command of a shell; a hook for `_Shell`."""

    def signal(self, number: int) -> None:
        """Send a signal to the program's process group."""
        if (program := self.started.find_program()) and self.report is None:
            with suppress(OSError):
                os.killpg(program, number)

    def look_at_clock(self, now: float) -> None:
        """Act on the deadline `next_at`, which has passed."""
        if self.report is not None or self.is_lost:
            # Other processes hold the pipes.
            for descriptor in list(self._streams):
                self._close(descriptor)
            self._streams.clear()
            self._end_if_done()
        elif now >= self._stuck_at:
            self._lose()
        elif now >= self._kill_at:
            self._stuck_at = min(self._stuck_at, now + _STUCK_S)
            signal_all(find_descendants(self.started.pid), signal.SIGKILL)
            self.next_at = now + _KILL_EVERY_S
        else:
            self._is_timed_out = True
            self.next_at = math.inf
            self.end(_TERM_GRACE_S)

    def _lose(self) -> None:
        """Give up: the runner is gone or stopped, so the command's processes can no longer be told apart."""
        self.is_lost, self.next_at = True, time.monotonic()
        self._agent.lose()

    def _on_report(self) -> None:
        try:
            text = self.started.control.recv(CHUNK_BYTES)
        except ConnectionResetError:
            text = b""
        self._agent.unwatch(self.started.control)
        self.started.control.close()
        if text:
            self.report = json.loads(text)
            self.next_at = time.monotonic() + _DETACH_S
        else:
            self._lose()
        self._end_if_done()

    def _end_if_done(self) -> None:
        if self._streams or (self.report is None and not self.is_lost):
            return
        self._end_input()
        self._close_rest()
        if self.started.control.fileno() >= 0:
            self._agent.unwatch(self.started.control)
            self.started.control.close()
        self._agent.on_end(self)

    def _close_rest(self) -> None:
        """Close further descriptors; a hook for `_Shell`."""

    def describe_end(self) -> tuple[dict[str, Any], bytes]:
        """Return the fields of the result, and the output."""
        report = self.report or {}
        status = report.get("status")
        end_signal = os.WTERMSIG(status) if status is not None and os.WIFSIGNALED(status) else None
        return self._describe(
            (self.is_lost or status is None, "from_inside"),
            (report.get("breach"), "over_limit"),
            (report.get("error"), "not_started"),
            (end_signal is not None, "signaled"),
            exit_code=os.WEXITSTATUS(status) if status is not None and end_signal is None else None,
            signal=end_signal,
            oom_kills=report.get("oom_kills", 0),
            duration_s=report.get("ended_at", time.monotonic()) - self.started_at,
            cpu_s=report.get("cpu_s", 0.0),
            why=report.get("error") or report.get("breach") or "",
        )

    def _describe(
        self, lost: tuple[object, str], *ends: tuple[object, str], **fields: Any
    ) -> tuple[dict[str, Any], bytes]:
        """Return the fields of a result, whose kind is the first reason that applies, and the output."""
        fields["oom_kills"] += self._agent.place.count_oom_kills() - self._oom_kills_before
        reasons = (
            lost,
            (self._is_timed_out, "timed_out"),
            (fields["oom_kills"] > 0, "oom"),
            (self._is_flooding, "output_flood"),
            *ends,
            (True, "exited"),
        )
        stdout, stderr = self.stdout.kept(), self.stderr.kept()
        return {
            **fields,
            "kind": next(kind for applies, kind in reasons if applies),
            "stdout_bytes": len(stdout),
            "stdout_total": self.stdout.total,
            "stderr_total": self.stderr.total,
            "heads": [len(self.stdout.head), len(self.stderr.head)],
        }, stdout + stderr

    def _close(self, descriptor: int) -> None:
        self._agent.unwatch(descriptor)
        os.close(descriptor)


# The leading empty line: after an unfinished quotation bash takes the next line's first word for an argument.
_ASK_STATUS = b"\n{ \\command printf '%%s %d\\n' \"$?\"; \\command times; } >&%d\n"
_REPORT_LINES = 3
_MAX_REPORT_LINES = 12
"""Lines other than a report; interrupts leave fewer."""


class _Shell(_Job):
    """A shell that stays open, interactive without a terminal: only such a one survives an interrupt.

    It reads a line that evaluates a command, and then one that writes exit status and CPU times to a
    descriptor which programs do not inherit. The second line is written once the shell has read the first:
    some shells drop their read-ahead when a command fails. Code that the shell itself evaluates can write a
    false status.
    """

    is_counted = False
    _request_id: int | None = None
    """The command that it evaluates."""
    _reports = b""
    """Unparsed bytes from the status descriptor."""
    _shell_cpu_s = 0.0

    def run(self, request_id: int, command: bytes, wall_limit_s: float) -> None:
        """Evaluate a command; the caller runs one at a time."""
        now = time.monotonic()
        self._request_id, self._command_at, self._deadline = request_id, now, now + wall_limit_s
        self._cpu_s_before, self._oom_kills_before = self._shell_cpu_s, self._agent.place.count_oom_kills()
        self._is_timed_out = self._is_flooding = self._has_asked = False
        self._exit_code: int | None = None
        self._give_up_at, self._insist_at = math.inf, math.inf
        """When the command is ended by force, and when the shell is; set when the command is interrupted."""
        self._look_s = _LOOK_EVERY_S
        # Later children of the shell belong to the command.
        self._earlier = describe_processes(find_descendants(self.started.pid))
        quoted = command.replace(b"'", b"'\\''")
        self.feed(b"\\eval '%b' </dev/null %d>&-\n" % (quoted, _STATUS_FD))
        self.next_at = now

    def drop(self) -> None:
        """End the current command, as at its wall limit."""
        if self._request_id is not None:
            self._deadline = self.next_at = time.monotonic()

    def look_at_clock(self, now: float) -> None:
        """Act on the deadline `next_at`, which has passed."""
        if self._request_id is None or self.report is not None or self.is_lost or now >= self._kill_at:
            super().look_at_clock(now)
            return
        if not self._has_asked and self._has_read_all():
            self._has_asked = True
            self.feed(_ASK_STATUS % (self._request_id, _STATUS_FD))
        if math.isinf(self._give_up_at) and now >= self._deadline:
            self._is_timed_out = True
            self._interrupt(now)
        elif now >= self._give_up_at:
            self.end(0.0)
            return
        elif now >= self._insist_at and self._insist(now):
            return
        self._look_s = min(2 * self._look_s, 0.1)
        self.next_at = min(
            self._insist_at if self._has_asked else now + self._look_s,
            self._deadline if math.isinf(self._give_up_at) else self._give_up_at,
        )

    def _has_read_all(self) -> bool:
        if self._input or not self._is_input_open:
            return False
        left = fcntl.ioctl(self.started.stdin, termios.FIONREAD, bytes(4))
        return bool(struct.unpack("i", left)[0] == 0)

    def _interrupt(self, now: float) -> None:
        """Interrupt the shell and terminate the command's processes; `_insist` repeats it by force."""
        # A shell whose command ends in another way goes on with the next one.
        self.signal(signal.SIGINT)
        self._insist_at = now + (_TERM_GRACE_S if self._signal_new(signal.SIGTERM) else _KILL_EVERY_S)
        self._give_up_at = now + _TERM_GRACE_S + _SHELL_GRACE_S
        self._look_s = _LOOK_EVERY_S

    def _insist(self, now: float) -> bool:
        """Kill what is left of the command; return whether it has ended."""
        self._insist_at = now + _KILL_EVERY_S
        is_any_left = self._signal_new(signal.SIGKILL)
        if self._exit_code is None:
            # If the interrupt cut the report off, ask again; a second one has the same number and is ignored.
            self._insist_at = now + 0.1
            self._has_asked = self._has_asked and not self._has_read_all()
            self.signal(signal.SIGINT)
        elif not is_any_left:
            self._end_run()
            return True
        return False

    def _signal_new(self, number: int) -> bool:
        """Send a signal to the processes that the command started; return whether there was any."""
        shell = self.started.find_program()
        present = describe_processes(self._earlier)
        spared = {pid for pid, found in self._earlier.items() if present.get(pid, ("", ""))[1] == found[1]}
        found = describe_processes(find_descendants(self.started.pid, spared - {shell}))
        # The dead are left for their parent to reap.
        new = [pid for pid, (state, _) in found.items() if pid != shell and state not in "ZX"]
        signal_all(new, number)
        return bool(new)

    def _stop_flood(self) -> None:
        now = time.monotonic()
        if self._request_id is None or not math.isinf(self._give_up_at):
            self.end(0.0)
            return
        self._interrupt(now)
        self.next_at = now

    def on_status(self) -> None:
        """Take a report of the shell."""
        with suppress(BlockingIOError):
            data = os.read(self.started.status, CHUNK_BYTES)
            self._reports += data
            lines = self._reports.split(b"\n")
            # A report that an interrupt cut off may precede the complete one.
            for at in range(len(lines) - _REPORT_LINES):
                if self._take_report(lines[at : at + _REPORT_LINES]):
                    self._reports = b"\n".join(lines[at + _REPORT_LINES :])
                    break
            if not data:
                # The shell has become another program, whose end is reported as that of the shell.
                self._close_status()
            elif self._reports.count(b"\n") >= _MAX_REPORT_LINES or len(self._reports) > CHUNK_BYTES:
                # A program wrote something else, so reports can no longer be parsed.
                self._close_status()
                self.end(0.0)

    def _take_report(self, lines: list[bytes]) -> bool:
        """Take the lines of a report, such as `0 7`, `0m0.010s 0m0.020s` and the same of its children."""
        try:
            exit_code, request_id = map(int, lines[0].split())
            times = [word.rstrip(b"s").split(b"m") for word in b" ".join(lines[1:]).split()]
            seconds = [60 * int(minutes) + float(rest) for minutes, rest in times]
        except ValueError:
            return False
        if len(seconds) != 4:
            return False
        self._shell_cpu_s = sum(seconds)
        if self._request_id == request_id and self._exit_code is None:
            self._exit_code = exit_code
            if math.isinf(self._give_up_at):
                self._end_run()
            else:
                self.next_at = self._insist_at = time.monotonic()
        return True

    def _end_run(self) -> None:
        # The command's remaining output is in the pipes, which one read empties.
        for react in list(self._streams.values()):
            react()
        header, output = self._describe(
            (False, ""),
            exit_code=self._exit_code,
            signal=None,
            oom_kills=0,
            duration_s=time.monotonic() - self._command_at,
            cpu_s=max(0.0, self._shell_cpu_s - self._cpu_s_before),
            why="",
        )
        self._answer_run(header, output, has_shell=True)

    def _answer_run(self, header: dict[str, Any], output: bytes, *, has_shell: bool) -> None:
        request_id, self._request_id, self.next_at = self._request_id, None, math.inf
        self.stdout, self.stderr = Capture(*self._kept_bytes), Capture(*self._kept_bytes)
        self._agent.count_run(header)
        self._agent.send({"id": request_id, **header, "has_shell": has_shell}, output)

    def _close_status(self) -> None:
        if self.started.status >= 0:
            self._close(self.started.status)
            self.started.status = -1

    def _close_rest(self) -> None:
        self._close_status()
        if self._request_id is not None:
            # The shell ended in the middle of a command, so its end is the command's.
            header, output = self.describe_end()
            header["duration_s"] = time.monotonic() - self._command_at
            header["cpu_s"] = max(0.0, header["cpu_s"] - self._cpu_s_before)
            self._answer_run(header, output, has_shell=False)


_STEPS: dict[str, Callable[[_Job, dict[str, Any], bytes], None]] = {
    "cancel": lambda job, header, body: job.end(0.0),
    "end": lambda job, header, body: job.end(_TERM_GRACE_S),
    "signal": lambda job, header, body: job.signal(header["number"]),
    "drop": lambda job, header, body: job.drop(),
    "input": lambda job, header, body: job.feed(body, header["id"]),
    "input_end": lambda job, header, body: job.close_stdin(),
    "output": lambda job, header, body: job.await_output(header["id"], header["positions"]),
}
"""Requests to a running command."""


class _Agent:
    """Serves the client."""

    def __init__(self, connection: socket.socket) -> None:
        self._channel = Channel(connection)
        self._selector = selectors.DefaultSelector()
        self._jobs: dict[int, _Job] = {}
        self._first: _Started | None = None
        """The command that was started ahead and waits for the first request: it knows of no other one."""
        self._is_ending = self._is_lost = False
        self._num_connecting = self._num_callers = 0
        self._listener: socket.socket | None = None
        self._stopped: dict[int, tuple[str, str]] = {}
        """The processes that a pause has stopped."""
        self._num_commands = self._oom_kills = 0
        self._cpu_s = 0.0
        self._durations: deque[float] = deque(maxlen=256)

    def watch(
        self, source: socket.socket | int, react: Callable[[], None], events: int = selectors.EVENT_READ
    ) -> None:
        """Call `react` whenever a descriptor is ready."""
        self._selector.register(source, events, react)

    def unwatch(self, source: socket.socket | int) -> None:
        """Undo `watch`, if it was called."""
        with suppress(KeyError):
            self._selector.unregister(source)

    def serve(self) -> None:
        """Prepare the sandbox as the first frame says, then serve requests until the client is gone."""
        self._channel.socket.setblocking(True)
        setup, code = next(frame for _ in iter(int, 1) for frame in self._channel.receive())
        self._channel.socket.setblocking(False)
        try:
            self.place = _Place(setup, code)
            if setup["has_proxy"]:
                self._listener = socket.create_server(("127.0.0.1", PROXY_PORT))
                self._listener.setblocking(False)
                self.watch(self._listener, self._on_caller)
            if setup["kept_capabilities"] is not None:
                set_capabilities(setup["kept_capabilities"])
            self._first = first = _Started(self.place, None)
            first.orders.settimeout(10.0)
            # Written in one call, and short enough to arrive in one.
            facts = json.loads(first.orders.recv(CHUNK_BYTES) or b"{}")
            if not facts:
                raise OSError(json.loads(first.control.recv(CHUNK_BYTES) or b"{}").get("error", "it ended"))
        except OSError as error:
            self.send({"refused": "probe", "why": f"a first process inside failed: {error}"})
            return
        if facts["nested_userns"]:
            first.close()
            self._first = None
        self.send({"ready": facts})
        self.watch(self._channel.socket, self._on_connection)
        while not self._is_ending:
            self._turn()
        self._end(setup["is_host"])

    def _turn(self) -> None:
        soonest_at = min((job.next_at for job in self._jobs.values()), default=math.inf)
        wait_s = None if math.isinf(soonest_at) else max(0.0, soonest_at - time.monotonic())
        for key, _ in self._selector.select(wait_s):
            if key.fd in self._selector.get_map():
                key.data()
        now = time.monotonic()
        for job in list(self._jobs.values()):
            if now >= job.next_at:
                job.look_at_clock(now)

    # Requests.

    def _on_connection(self) -> None:
        try:
            self._flush()
            for header, body in self._channel.receive():
                self._obey(header, body)
        except EOFError:
            self._is_ending = True

    def _obey(self, header: dict[str, Any], body: bytes) -> None:
        operation, number = header["op"], header.get("id")
        job = self._jobs.get(header.get("job", header.get("shell", -1)))
        try:
            match operation:
                case "stop":
                    self._is_ending = True
                case "start" | "open_shell":
                    self._start(header, body)
                case "run" if isinstance(job, _Shell):
                    job.run(header["id"], body, header["wall_limit_s"])
                case "run":
                    self.send({"id": number, "failed": "ended", "why": "the shell has ended"})
                case "connect":
                    self._connect(header["id"], header["address"])
                case "caller_end":
                    self._num_callers -= 1
                    if self._num_callers == MAX_CALLERS - 1 and self._listener is not None:
                        self.watch(self._listener, self._on_caller)
                case "pause" | "resume" | "stats":
                    self.send({"id": number, **getattr(self, f"_{operation}")()})
                case _ if operation in _STEPS and job is not None:
                    _STEPS[operation](job, header, body)
                case _ if operation in _STEPS:
                    # The job has ended; its result was sent.
                    if number is not None:
                        self.send({"id": number, "is_open": False, "has_ended": True})
                case _:
                    why = f"it knows no request {operation!r}"
                    self.send({"id": number, "failed": "unknown", "why": why})
        except OSError as error:
            self.send({"id": number, "lost": "infra", "why": str(error)})

    def _start(self, header: dict[str, Any], body: bytes) -> None:
        is_shell, is_main = header["op"] == "open_shell", header.get("is_main", False)
        request = {
            "argv": header.get("argv", []),
            "env": {**self.place.env, **header.get("env", {})},
            "cwd": header.get("cwd") or self.place.scratch,
            "wall_limit_s": math.inf if is_shell else header["wall_limit_s"],
            "builtin": header.get("builtin", ""),
            "details": header.get("details", {}),
            "is_shell": is_shell,
            "is_main": is_main,
            "num_jobs": len(self._jobs) + 1,
        }
        if is_main and (self._first is None or request["argv"][:1] != [sys.executable]):
            # A later process would know of earlier requests; and a program may not be able to run this
            # Python.
            code = f"{self.place.source}\nmain()\n"
            request |= {"argv": [*request["argv"], "-c", code], "is_main": False}
        # The output of a builtin is kept completely.
        limits, builtin = self.place.limits, request["builtin"]
        head_bytes = request["details"].get("max_bytes", 1024) if builtin else limits["output_head_bytes"]
        if self._first is not None and not is_shell:
            started, self._first = self._first, None
            started.order(request)
        else:
            started = _Started(self.place, request)
        kind = _Shell if is_shell else _Job
        job = self._jobs[header["id"]] = kind(
            self, header["id"], started, request["wall_limit_s"], head_bytes
        )
        if isinstance(job, _Shell):
            os.set_blocking(started.status, False)
            self.watch(started.status, job.on_status)
            return
        job.is_counted = not builtin
        if body:
            job.feed(body)
        if not header.get("has_stdin", False):
            job.close_stdin()

    def on_end(self, job: _Job) -> None:
        """Send the result of a command that has ended."""
        del self._jobs[job.number]
        self._collect()
        header, output = job.describe_end()
        self._cpu_s += header["cpu_s"]
        if job.is_counted:
            self.count_run(header)
        self.send({"id": job.number, **header}, output)

    def count_run(self, header: dict[str, Any]) -> None:
        """Count a command that has ended."""
        self._num_commands += 1
        self._oom_kills += header["oom_kills"]
        self._durations.append(header["duration_s"])
        if header["oom_kills"]:
            # What no kill frees, in this process, since the group may have no memory for another one.
            uid = os.geteuid() if self.place.user is None else self.place.user[0]
            os.setresuid(-1, uid, -1)
            remove_ipc(uid, is_idle=True)
            os.setresuid(-1, 0 if self.place.user is not None else uid, -1)

    def _collect(self) -> bool:
        """Reap children that have ended; return whether any still runs."""
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True

    def _find_programs(self) -> list[int]:
        """Return all descendants except the runners."""
        return [pid for runner in find_children(os.getpid()) for pid in find_descendants(runner)]

    def _pause(self) -> dict[str, Any]:
        deadline = time.monotonic() + 2.0
        while True:
            found = describe_processes(self._find_programs())
            # One that waits in the kernel, as for its child of a vfork, stops before it runs again.
            running = {
                pid: one
                for pid, one in found.items()
                if one[0] not in "TtZX" and not (one[0] == "D" and pid in self._stopped)
            }
            if not running:
                return {}
            if time.monotonic() > deadline:
                self._resume()
                return {"failed": "busy", "why": f"{len(running)} processes go on"}
            self._stopped.update(running)
            signal_all(running, signal.SIGSTOP)
            time.sleep(0.001)

    def _resume(self) -> dict[str, Any]:
        present = describe_processes(self._stopped)
        signal_all([pid for pid, one in present.items() if one[1] == self._stopped[pid][1]], signal.SIGCONT)
        self._stopped.clear()
        return {}

    def _stats(self) -> dict[str, Any]:
        place, pids = self.place, self._find_programs()
        now, peak = place.read_memory() or (memory_bytes(pids, 0), None)
        if place.is_own_disk:
            disk = os.statvfs(place.scratch)
            num_bytes, num_files = (disk.f_blocks - disk.f_bfree) * disk.f_frsize, disk.f_files - disk.f_ffree
        else:
            num_bytes, num_files = measure_tree(place.scratch)
        ordered = sorted(self._durations)
        p50, p99 = (ordered[int(share * (len(ordered) - 1))] if ordered else None for share in (0.5, 0.99))
        return {
            "cpu_s": self._cpu_s + _cpu_s(pids),
            "memory_bytes": now,
            "memory_peak_bytes": peak,
            "processes": len(pids),
            "disk_bytes": num_bytes,
            "disk_files": num_files,
            "oom_kills": max(self._oom_kills, place.count_oom_kills()),
            "commands": self._num_commands,
            "exec_p50_s": p50,
            "exec_p99_s": p99,
        }

    # Connections.

    def _connect(self, request_id: int, address: int | str) -> None:
        """Open a connection inside, in a fork with the rights of a program, and answer with it."""
        if self._num_connecting >= MAX_CALLERS:
            self.send({"id": request_id, "failed": "busy", "why": f"{MAX_CALLERS} connections wait"})
            return
        answer, theirs = socket.socketpair()
        with theirs:
            if os.fork() == 0:
                _connect_and_exit(self.place, address, theirs)
        self._num_connecting += 1

        def on_answer() -> None:
            self.unwatch(answer)
            self._num_connecting -= 1
            with answer:
                message, descriptors, _, _ = socket.recv_fds(answer, CHUNK_BYTES, 1)
            self._collect()
            if descriptors:
                self.send({"id": request_id, "has_descriptor": True}, descriptor=descriptors[0])
                return
            number, _, why = message.decode(errors="replace").partition(" ")
            kind = _CONNECT_ERRORS.get(int(number or errno.EIO), "io")
            self.send(
                {"id": request_id, "failed": kind, "why": f"no connection to {address!r}: {why or kind}"}
            )

        self.watch(answer, on_answer)

    def _on_caller(self) -> None:
        """Pass a connection to the proxy on to the client, which serves it."""
        assert self._listener is not None
        with suppress(OSError):
            caller, _ = self._listener.accept()
            self._num_callers += 1
            if self._num_callers == MAX_CALLERS:
                self.unwatch(self._listener)
            self.send({"caller": True, "has_descriptor": True}, descriptor=caller.detach())

    # The end.

    def lose(self) -> None:
        """End the sandbox, and report that a program has broken it."""
        self._is_lost = self._is_lost or not self._is_ending
        self._is_ending = True

    def _end(self, is_host: bool) -> None:
        """Report why, and end. The kernel ends everything in the namespace of process 1."""
        if is_host:
            while self._collect():
                signal_all(find_descendants(os.getpid()), signal.SIGKILL)
                time.sleep(0.001)
            if self.place.user is not None:
                remove_ipc(self.place.user[0], is_idle=False)
            remove_tree(self.place.scratch)
        for job in self._jobs.values():
            if job.is_lost:
                header, output = job.describe_end()
                self.send({"id": job.number, **header}, output)
        if self._is_lost:
            self.send({"lost": "from_inside"})
        self._channel.socket.setblocking(True)
        with suppress(OSError):
            self._channel.flush()

    def send(self, header: dict[str, Any], body: bytes = b"", *, descriptor: int | None = None) -> None:
        """Send a frame, with a descriptor if there is one; if the client is gone, end."""
        try:
            self._channel.send(header, body, descriptor=descriptor)
        except ConnectionError:
            self._is_ending = True
        self._watch_unsent()

    def _flush(self) -> None:
        try:
            self._channel.flush()
        except ConnectionError:
            self._is_ending = True
        self._watch_unsent()

    def _watch_unsent(self) -> None:
        if (key := self._selector.get_map().get(self._channel.socket)) is not None:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._channel.has_unsent else 0)
            if key.events != events:
                self._selector.modify(self._channel.socket, events, key.data)


def _connect_and_exit(place: _Place, address: int | str, answer: socket.socket) -> NoReturn:
    try:
        signal.set_wakeup_fd(-1)
        signal.alarm(round(2 * _CONNECT_LIMIT_S))
        place.lower(joins_groups=False)
        close_all_but({0, 1, 2, answer.fileno()})
        family = socket.AF_INET if isinstance(address, int) else socket.AF_UNIX
        with socket.socket(family, socket.SOCK_STREAM) as connection:
            connection.settimeout(_CONNECT_LIMIT_S)
            connection.connect(("127.0.0.1", address) if isinstance(address, int) else address)
            connection.setblocking(True)
            socket.send_fds(answer, [b"0"], [connection.fileno()])
    except (OSError, OverflowError, ValueError) as error:
        is_late = isinstance(error, TimeoutError)
        number = errno.ETIMEDOUT if is_late else getattr(error, "errno", None) or errno.EIO
        answer.sendall(f"{number} {error}".encode(errors="replace"))
    finally:
        os._exit(0)


def main() -> None:
    """Serve the socket that the last argument names: a descriptor, or a path to connect to."""
    _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    where = sys.argv[-1]
    if where.isdigit():
        connection = socket.socket(fileno=int(where))
        connection.set_inheritable(False)
    else:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(where)
    _Agent(connection).serve()
    # An orderly shutdown of the interpreter would take milliseconds.
    os._exit(0)


if __name__ == "__main__":
    main()
