"""The identity of a process, safe against reuse of its id; its user and its command line.

A process id alone is not enough: it is reused, and means another process in a container. Two identities are
the same process if boot, pid namespace, id and start (in clock ticks after the boot) are equal. psutil's
start time is not used, because it is Unix time and changes when the clock is set. Linux only.
"""

from __future__ import annotations

import getpass
import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from strop.errors import StoreError


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessIdentity:
    """A process of one boot of one machine."""

    pid: int
    start_ticks: int
    """Clock ticks after the boot; field 22 of proc_pid_stat(5)."""
    boot_id: str
    pid_namespace: str
    """The namespace of `pid`; containers have their own."""

    @property
    def is_of_this_boot(self) -> bool:
        """Whether this machine has not booted since."""
        return self.boot_id == read_boot_id()

    @property
    def is_seen_here(self) -> bool:
        """Whether `pid`, if it exists, is that process here."""
        return self.is_of_this_boot and self.pid_namespace == read_pid_namespace()

    def is_alive(self) -> bool:
        """Whether this process is visible and has not ended."""
        return self.is_seen_here and read_start_ticks(self.pid) == self.start_ticks

    def send(self, number: signal.Signals) -> bool:
        """Send this process a signal; return whether it still existed."""
        return self.is_seen_here and send_signal(self.pid, self.start_ticks, number)


def identify(pid: int | None = None) -> ProcessIdentity | None:
    """Return the identity of a process, by default this one; None if it has ended or cannot be seen."""
    number = os.getpid() if pid is None else pid
    start_ticks = read_start_ticks(number)
    if start_ticks is None:
        return None
    return ProcessIdentity(
        pid=number, start_ticks=start_ticks, boot_id=read_boot_id(), pid_namespace=read_pid_namespace()
    )


def identify_self() -> ProcessIdentity:
    """Return the identity of this process. Raises: StoreError if /proc is missing."""
    identity = identify()
    if identity is None:
        raise StoreError(
            "/proc/self/stat does not say when this process began",
            allowed="Linux with /proc",
            next_step="mount /proc in this container",
        )
    return identity


def send_signal(pid: int, start_ticks: int, number: signal.Signals) -> bool:
    """Signal a process if its start matches; a pidfd rules out that the id is reused in between."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if read_start_ticks(pid) != start_ticks:
            return False
        signal.pidfd_send_signal(descriptor, number)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def find_user_name() -> str:
    """Return this user's name, or the user id if the machine has no name for it, as in many containers."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return str(os.getuid())


def describe_process(pid: int) -> tuple[str | None, str | None]:
    """Return a process's user and command line; each None if the system does not show it."""
    import psutil

    user: str | None = None
    command: str | None = None
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        user = process.username()
        command = " ".join(process.cmdline()).strip() or None
    return user, command


@cache
def read_boot_id() -> str:
    """Return the id of this boot of the machine; empty where it cannot be read."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def read_pid_namespace() -> str:
    """Return the name of this process's pid namespace; empty where it cannot be read."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def read_start_ticks(pid: int) -> int | None:
    """Return a process's start in clock ticks after the boot; None if it has ended or is not visible."""
    stat = read_parent_and_start(pid)
    return None if stat is None else stat[1]


def read_parent_and_start(pid: int) -> tuple[int, int] | None:
    """Return a process's parent and start; None if it has ended or is not visible."""
    try:
        # The program's name in field 2 may contain spaces and brackets, so count from its end.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        # A zombie has ended: its id is only kept for its parent.
        return None if fields[0] in "ZX" else (int(fields[1]), int(fields[19]))
    except (OSError, LookupError, ValueError):
        return None
