"""A network of the suite's own, so that nothing an attack sends can leave this machine.

It has a loopback, an address as an interface of the host has, and the one from which clouds serve metadata;
all three exist nowhere else.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from strop.sandbox.linux import CLONE_NEWNET, enter_namespaces, unshare

METADATA = "169.254.169.254"
INTERFACE = "198.51.100.1"
"""Of a range for documentation, which belongs to nobody."""


@contextmanager
def own_network() -> Iterator[bool]:
    """Give this thread, and what it starts, a network of its own for the block; False where that cannot be.

    Needs root and the program ip. Other threads keep the host's.
    """
    ip = shutil.which("ip")
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            if ip is None or os.geteuid() != 0:
                raise OSError
            unshare(CLONE_NEWNET)
        except OSError:
            yield False
            return
        try:
            yield _set_up(ip)
        finally:
            enter_namespaces(before, CLONE_NEWNET)
    finally:
        os.close(before)


def _set_up(ip: str) -> bool:
    def run(*words: str) -> bool:
        return subprocess.run([ip, *words], check=False, capture_output=True).returncode == 0

    is_up = run("link", "set", "lo", "up")
    # A kernel without such interfaces has the addresses on its loopback.
    name = "outside" if run("link", "add", "outside", "type", "dummy") else "lo"
    for address in (METADATA, INTERFACE):
        is_up = is_up and run("address", "add", f"{address}/32", "dev", name)
    return is_up and run("link", "set", name, "up")
