"""Find, measure and kill the descendants of this process.

Orphans are reparented to a subreaper, so all its descendants stay below it, whatever sessions, process groups
and double forks they make. A signal is sent only to a process that is still a descendant, since the kernel
may have reused a process id.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress

from strop.sandbox.linux import read_file, read_or_empty

_STATE_FIELD, _PARENT_FIELD, _GROUP_FIELD, _START_FIELD = 0, 1, 2, 19
"""Fields of /proc/PID/stat, counted from behind the name."""
_END_LIMIT_S = 5.0
_STOP_LIMIT_S = 2.0
_CPU_FIELDS = slice(11, 15)
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_SHARED_NAMES = ("/memfd:", "/dev/zero")
"""Names of mappings without a file system that a limit on files bounds."""


def find_descendants(root_pid: int, spared: Collection[int] = ()) -> list[int]:
    """Return the descendants of a process, parents first, without `spared` and their descendants."""
    descendants, queue = [], [root_pid]
    while queue:
        children = [pid for pid in _read_children(queue.pop()) if pid not in spared]
        descendants += children
        queue += children
    return descendants


def signal_descendants(root_pid: int, number: int) -> None:
    """Send a signal to all descendants of a process."""
    descendants = find_descendants(root_pid)
    family = {root_pid, *descendants}
    for pid in descendants:
        _signal_one(pid, number, family)


def signal_processes(pids: Collection[int], number: int) -> None:
    """Send a signal to those of the processes that are still descendants of this one."""
    family = {os.getpid(), *find_descendants(os.getpid())}
    for pid in pids:
        _signal_one(pid, number, family)


def find_grandchildren(root_pid: int) -> list[int]:
    """Return all descendants of a process except its children."""
    return [pid for child in _read_children(root_pid) for pid in find_descendants(child)]


def process_states(pids: Collection[int]) -> dict[int, str]:
    """Return the kernel's state letters of the processes that still exist."""
    stats = {pid: _read_stat(pid) for pid in pids}
    return {pid: stat[_STATE_FIELD] for pid, stat in stats.items() if stat}


def cpu_s(pids: Collection[int]) -> float:
    """Return the CPU time of processes and their children that have ended."""
    stats = (_read_stat(pid) for pid in pids)
    return sum(int(word) for stat in stats for word in stat[_CPU_FIELDS]) / _TICKS_PER_S


def start_times(pids: Collection[int]) -> dict[int, str]:
    """Return the start times, in the kernel's ticks, of the processes that still exist.

    Process id and start time together identify a process for ever.
    """
    stats = {pid: _read_stat(pid) for pid in pids}
    return {pid: stat[_START_FIELD] for pid, stat in stats.items() if stat}


def stop_programs(find_programs: Callable[[], list[int]]) -> dict[int, str]:
    """Stop processes by a signal until none runs; return those that ran, with their start times.

    Raises: OSError if one cannot be stopped; then all go on.
    """
    stopped: dict[int, str] = {}
    deadline = time.monotonic() + _STOP_LIMIT_S
    while True:
        states = process_states(find_programs())
        # One that waits in the kernel, as for its child of a vfork, stops before it runs again.
        running = [
            pid
            for pid, state in states.items()
            if state not in "TtZX" and not (state == "D" and pid in stopped)
        ]
        if not running:
            return stopped
        if time.monotonic() > deadline:
            continue_programs(stopped)
            raise OSError(errno.EBUSY, f"{len(running)} processes go on after {_STOP_LIMIT_S:.0f} s")
        stopped |= {pid: start for pid, start in start_times(running).items() if pid not in stopped}
        signal_processes(running, signal.SIGSTOP)
        time.sleep(0.001)


def continue_programs(stopped: Mapping[int, str]) -> None:
    """Let the processes that `stop_programs` returned run again."""
    present = start_times(list(stopped))
    signal_processes([pid for pid, start in stopped.items() if present.get(pid) == start], signal.SIGCONT)


def find_copies(group: int) -> dict[int, str]:
    """Return the command lines of forks in a program's process group that have not called exec yet."""
    copies = {}
    for pid in find_descendants(group):
        stat, line = _read_stat(pid), read_or_empty(f"/proc/{pid}/cmdline")
        if not stat or not line or int(stat[_GROUP_FIELD]) != group:
            continue
        if line == read_or_empty(f"/proc/{stat[_PARENT_FIELD]}/cmdline"):
            copies[pid] = line
    return copies


def became_killable(pid: int, line: str, number: int) -> bool:
    """Return whether a process of `find_copies` has called exec and does not handle a signal now.

    `line`: its command line as a copy.
    """
    try:
        status = read_file(f"/proc/{pid}/status")
    except OSError:
        return False
    fields = dict(row.split(":", 1) for row in status.splitlines() if row.startswith(("SigIgn:", "SigCgt:")))
    is_handled = any(int(mask, 16) >> (number - 1) & 1 for mask in fields.values())
    return not is_handled and read_or_empty(f"/proc/{pid}/cmdline") not in ("", line)


def kill_strays(root_pid: int, own: set[int]) -> list[int]:
    """Kill the orphans that were reparented to a process (children not in `own`), with their descendants.

    Returns these children; the parent has to reap them.
    """
    strays = [child for child in _read_children(root_pid) if child not in own]
    for child in strays:
        signal_descendants(child, signal.SIGKILL)
        _signal_one(child, signal.SIGKILL, {root_pid})
    return strays


def end_inside(path: str) -> list[int]:
    """Kill the processes whose working directory is in a tree, until none is left; return them."""
    ended = set()
    deadline = time.monotonic() + _END_LIMIT_S
    while time.monotonic() < deadline:
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit() and _works_in(int(name), path)]
        if not pids:
            break
        for pid in pids:
            with suppress(OSError):
                descriptor = os.pidfd_open(pid)
                # Checked again, because the id may have been reused before the descriptor was opened.
                if _works_in(pid, path):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                    ended.add(pid)
                os.close(descriptor)
        time.sleep(0.01)
    return sorted(ended)


def _works_in(pid: int, path: str) -> bool:
    try:
        return f"{os.readlink(f'/proc/{pid}/cwd')}/".startswith(f"{path}/")
    except OSError:
        return False


def kill_biggest(pids: list[int], root_pid: int) -> None:
    """Kill the process with the most memory."""
    if pids:
        biggest = max(pids, key=_resident_bytes)
        _signal_one(biggest, signal.SIGKILL, {root_pid, *pids})


def memory_bytes(pids: list[int], limit_bytes: int) -> int:
    """Return the total memory of processes, with what they hold in shared memory and memfds.

    The sum that counts shared pages once takes milliseconds, so it is used only where the quick sum exceeds
    the limit. Not counted: pages of an object that no process maps or holds open, such as a memfd on its way
    through a socket.
    """
    shared_bytes = _shared_bytes(pids)
    quick_bytes = sum(_resident_bytes(pid) for pid in pids) + shared_bytes
    if quick_bytes <= limit_bytes:
        return quick_bytes
    return sum(_proportional_bytes(pid) for pid in pids) + shared_bytes


def _shared_bytes(pids: list[int]) -> int:
    """Return the bytes in memfds, shared anonymous memory and System V segments, each counted once.

    A written page need not be resident in any process. Of memory that is only mapped, its length counts.
    """
    opened: dict[int, int] = {}
    mapped: dict[int, int] = {}
    for pid in pids:
        for path in (f"/proc/{pid}/fd/{name}" for name in _list_entries(f"/proc/{pid}/fd")):
            with suppress(OSError):
                if os.readlink(path).startswith("/memfd:"):
                    info = os.stat(path)
                    opened[info.st_ino] = info.st_blocks * 512
        for line in read_or_empty(f"/proc/{pid}/maps").splitlines():
            if line.endswith(" (deleted)") and line.split(None, 5)[-1].startswith(_SHARED_NAMES):
                span, _, offset, _, inode, _ = line.split(None, 5)
                begin, end = (int(word, 16) for word in span.split("-"))
                mapped[int(inode)] = max(mapped.get(int(inode), 0), int(offset, 16) + end - begin)
    return sum((mapped | opened).values())


def segment_bytes(uid: int | None) -> int:
    """Return the bytes in a user's System V segments, attached or not, in this IPC namespace."""
    header, *lines = read_or_empty("/proc/sysvipc/shm").splitlines() or [""]
    rows = [dict(zip(header.split(), line.split(), strict=False)) for line in lines]
    return sum(int(row["rss"]) + int(row["swap"]) for row in rows if row["uid"] == str(uid))


def num_threads(pids: list[int]) -> int:
    """Return the total number of threads of processes."""
    return sum(len(_list_entries(f"/proc/{pid}/task")) for pid in pids)


def _signal_one(pid: int, number: int, family: set[int]) -> None:
    with suppress(OSError):
        descriptor = os.pidfd_open(pid)
        try:
            # The descriptor pins one process; if its parent is in the family, it is a descendant.
            if parent_of(pid) in family:
                signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)


def _read_children(pid: int) -> list[int]:
    children: list[int] = []
    for thread in _list_entries(f"/proc/{pid}/task"):
        children += map(int, read_or_empty(f"/proc/{pid}/task/{thread}/children").split())
    return children


def _list_entries(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []


def parent_of(pid: int) -> int | None:
    """Return a process's parent; None if it is gone."""
    stat = _read_stat(pid)
    return int(stat[_PARENT_FIELD]) if stat else None


def _read_stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat behind the name; none if the process is gone."""
    # The name in parentheses may itself contain spaces and parentheses.
    return read_or_empty(f"/proc/{pid}/stat").rpartition(")")[2].split()


def _resident_bytes(pid: int) -> int:
    try:
        return int(read_file(f"/proc/{pid}/statm").split()[1]) * _PAGE_BYTES
    except (OSError, IndexError):
        return 0


def _proportional_bytes(pid: int) -> int:
    try:
        text = read_file(f"/proc/{pid}/smaps_rollup")
    except OSError:
        # The process made itself unreadable.
        return _resident_bytes(pid)
    sizes_kib = {line.split()[0]: int(line.split()[1]) for line in text.splitlines()[1:]}
    # Shared memory is counted by its objects; that of files in memory belongs to the limit of the disk.
    return (sizes_kib["Pss:"] - sizes_kib.get("Pss_Shmem:", 0)) << 10
