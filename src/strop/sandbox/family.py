"""All descendants of this process: found, measured, and killed until none is left.

A process that adopts orphans (a sub-reaper) keeps every descendant below it, whatever sessions,
process groups and double forks they make. A signal goes only to a process that is still below it:
a process id may have been given away between looking and killing.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection
from contextlib import suppress

from strop.sandbox.linux import read_file, read_or_empty

_STATE_FIELD, _PARENT_FIELD, _GROUP_FIELD, _START_FIELD = 0, 1, 2, 19
"""Of /proc/PID/stat, counted from behind the name."""
_END_LIMIT_S = 5.0
_CPU_FIELDS = slice(11, 15)
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def find_descendants(root_pid: int, spared: Collection[int] = ()) -> list[int]:
    """Return the process ids below a process, parents before children, without `spared` and what is below."""
    found, queue = [], [root_pid]
    while queue:
        children = [pid for pid in _read_children(queue.pop()) if pid not in spared]
        found += children
        queue += children
    return found


def signal_descendants(root_pid: int, number: int) -> None:
    """Send a signal to all that are below a process."""
    descendants = find_descendants(root_pid)
    family = {root_pid, *descendants}
    for pid in descendants:
        _signal_one(pid, number, family)


def signal_processes(pids: Collection[int], number: int) -> None:
    """Send a signal to processes that are below this one; one that is not any more is spared."""
    family = {os.getpid(), *find_descendants(os.getpid())}
    for pid in pids:
        _signal_one(pid, number, family)


def find_grandchildren(root_pid: int) -> list[int]:
    """Return all descendants of a process but its children."""
    return [pid for child in _read_children(root_pid) for pid in find_descendants(child)]


def process_states(pids: Collection[int]) -> dict[int, str]:
    """Return the kernel's letter for what each process does; those that are gone are left out."""
    found = {pid: _read_stat(pid) for pid in pids}
    return {pid: stat[_STATE_FIELD] for pid, stat in found.items() if stat}


def cpu_s(pids: Collection[int]) -> float:
    """Return the processor time of processes and of their children that have ended."""
    stats = (_read_stat(pid) for pid in pids)
    return sum(int(word) for stat in stats for word in stat[_CPU_FIELDS]) / _TICKS_PER_S


def start_times(pids: Collection[int]) -> dict[int, str]:
    """Return when each process was started, in the kernel's ticks; those that are gone are left out.

    An id and this together name one process for ever.
    """
    found = {pid: _read_stat(pid) for pid in pids}
    return {pid: stat[_START_FIELD] for pid, stat in found.items() if stat}


def find_copies(group: int) -> dict[int, str]:
    """Return the command lines of forks in a program's process group that have not become programs yet."""
    found = {}
    for pid in find_descendants(group):
        stat, line = _read_stat(pid), read_or_empty(f"/proc/{pid}/cmdline")
        if not stat or not line or int(stat[_GROUP_FIELD]) != group:
            continue
        if line == read_or_empty(f"/proc/{stat[_PARENT_FIELD]}/cmdline"):
            found[pid] = line
    return found


def became_killable(pid: int, line: str, number: int) -> bool:
    """Return whether a process of `find_copies` has become a program that a signal ends.

    `line`: its command line as a copy.
    """
    try:
        status = read_file(f"/proc/{pid}/status")
    except OSError:
        return False
    fields = dict(one.split(":", 1) for one in status.splitlines() if one.startswith(("SigIgn:", "SigCgt:")))
    is_minded = any(int(mask, 16) >> (number - 1) & 1 for mask in fields.values())
    return not is_minded and read_or_empty(f"/proc/{pid}/cmdline") not in ("", line)


def kill_strays(root_pid: int, own: set[int]) -> list[int]:
    """Kill the children of a process that are not its own but came to it as orphans, and all below them.

    Returns these children; the parent has to wait for them.
    """
    strays = [child for child in _read_children(root_pid) if child not in own]
    for child in strays:
        signal_descendants(child, signal.SIGKILL)
        _signal_one(child, signal.SIGKILL, {root_pid})
    return strays


def end_inside(path: str) -> list[int]:
    """Kill the processes that work in a directory or below it, until none is left; return them."""
    ended = set()
    deadline = time.monotonic() + _END_LIMIT_S
    while time.monotonic() < deadline:
        found = [int(name) for name in os.listdir("/proc") if name.isdigit() and _works_in(int(name), path)]
        if not found:
            break
        for pid in found:
            with suppress(OSError):
                descriptor = os.pidfd_open(pid)
                # Looked at again: this process is the one that is killed.
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
    """Kill the process that holds most memory."""
    if pids:
        biggest = max(pids, key=_resident_bytes)
        _signal_one(biggest, signal.SIGKILL, {root_pid, *pids})


def memory_bytes(pids: list[int], limit_bytes: int) -> int:
    """Return the memory of processes together; pages that they share are counted once if it matters.

    The kernel's exact sum takes milliseconds, so it is made only where the quick one exceeds the limit.
    """
    quick_bytes = sum(_resident_bytes(pid) for pid in pids)
    return quick_bytes if quick_bytes <= limit_bytes else sum(_proportional_bytes(pid) for pid in pids)


def num_threads(pids: list[int]) -> int:
    """Return the number of threads of processes together."""
    return sum(len(_list_threads(pid)) for pid in pids)


def _signal_one(pid: int, number: int, family: set[int]) -> None:
    with suppress(OSError):
        descriptor = os.pidfd_open(pid)
        try:
            # The descriptor holds on to one process; if that has a parent of ours, it is ours.
            if parent_of(pid) in family:
                signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)


def _read_children(pid: int) -> list[int]:
    children: list[int] = []
    for thread in _list_threads(pid):
        children += map(int, read_or_empty(f"/proc/{pid}/task/{thread}/children").split())
    return children


def _list_threads(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []


def parent_of(pid: int) -> int | None:
    """Return a process's parent; None if it is gone."""
    stat = _read_stat(pid)
    return int(stat[_PARENT_FIELD]) if stat else None


def _read_stat(pid: int) -> list[str]:
    """Return the fields of a process behind its name; none if it is gone."""
    # The name, in parentheses, may hold anything, spaces and parentheses too.
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
        # It made itself unreadable.
        return _resident_bytes(pid)
    sizes_kib = [int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")]
    return sum(sizes_kib) << 10
