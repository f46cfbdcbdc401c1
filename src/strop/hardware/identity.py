"""Which process this is, for whoever finds its number later.

A process number alone names nobody: it is used again, and after a reboot by anybody. A process is the same
if the machine has not booted since and the process began in the same tick. Linux; elsewhere nothing is
known of any process but that its number is in use.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from strop.errors import StoreError, explain_refusal


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessIdentity:
    """A process of one boot of one machine."""

    pid: int
    start_ticks: int
    """Clock ticks after the boot; field 22 of proc_pid_stat(5)."""
    boot_id: str

    def is_alive(self) -> bool:
        """Whether this very process exists and has not ended."""
        return self.boot_id == read_boot_id() and _read_start_ticks(self.pid) == self.start_ticks


def identify(pid: int | None = None) -> ProcessIdentity | None:
    """Return who a process is, this one if none is named; None if it has ended or cannot be seen."""
    number = os.getpid() if pid is None else pid
    start_ticks = _read_start_ticks(number)
    if start_ticks is None:
        return None
    return ProcessIdentity(pid=number, start_ticks=start_ticks, boot_id=read_boot_id())


def identify_self() -> ProcessIdentity:
    """Return who this process is. Raises: StoreError where the system does not tell."""
    found = identify()
    if found is None:
        raise StoreError(
            explain_refusal(
                "/proc/self/stat does not say when this process began",
                allowed="Linux with /proc",
                next_step="mount /proc in this container",
            )
        )
    return found


@cache
def read_boot_id() -> str:
    """Return what this boot of the machine is called; empty where nothing tells."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _read_start_ticks(pid: int) -> int | None:
    try:
        # The program's name in field 2 may hold spaces and brackets, so count from its end.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        # A zombie has ended: its number is only kept for whoever waits for it.
        return None if fields[0] in "ZX" else int(fields[19])
    except (OSError, LookupError, ValueError):
        return None
