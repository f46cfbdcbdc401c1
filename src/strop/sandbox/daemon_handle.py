"""The client's handle of the daemon: starts it on first use, sends it orders, ends it with this process."""

from __future__ import annotations

import atexit
import errno
import json
import os
import platform
import socket
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Any

import strop
from strop.errors import SandboxRefused

# The path of the source comes over standard input, since a command line is readable inside a sandbox.
_DAEMON_CODE = """
import sys
sys.path.insert(0, sys.stdin.readline().rstrip())
from strop.sandbox.daemon import main
# Its forks must import modules from Python's own paths only.
del sys.path[0]
main(int(sys.argv[1]), int(sys.argv[2]))
"""


class DaemonHandle:
    """A daemon of this process, started on first use.

    `source`: Python code that the daemon loads once; each of its sandboxes may run a fork of it.
    """

    def __init__(self, source: str = "") -> None:
        self._source = source
        self._lock = threading.Lock()
        self._popen: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._has_source = False

    def start(self, order: dict[str, Any]) -> socket.socket:
        """Order a sandbox and return this end of its connection. Usable from any thread.

        Raises: SandboxRefused if the host gives no process or no socket.
        """
        with self._lock:
            try:
                return self._send(order)
            except OSError:
                # The daemon was killed since the last order: start another one, once.
                self.close()
            try:
                return self._send(order)
            except OSError as error:
                self.close()
                raise SandboxRefused(
                    f"the process that makes sandboxes does not start on {platform.node()}: {error}",
                    allowed="a host with free processes and descriptors",
                    next_step="look at its limits, then try again",
                    kind="host",
                ) from error

    def _send(self, order: dict[str, Any]) -> socket.socket:
        source = None if self._has_source else self._source
        text = json.dumps({**order, "python_source": source}).encode()
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._running_control(), [text], [theirs.fileno()])
            except OSError:
                ours.close()
                raise
        self._has_source = True
        return ours

    def _running_control(self) -> socket.socket:
        if self._control is None:
            require_kernel()
            control, daemon_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with daemon_end:
                self._popen = subprocess.Popen(
                    [
                        python_candidates()[0],
                        "-I",
                        "-S",
                        "-B",
                        "-c",
                        _DAEMON_CODE,
                        str(daemon_end.fileno()),
                        str(os.getpid()),
                    ],
                    stdin=subprocess.PIPE,
                    pass_fds=[daemon_end.fileno()],
                    env={"LANG": "C.UTF-8"},
                    cwd="/",
                    start_new_session=True,
                )
            assert self._popen.stdin is not None
            self._popen.stdin.write(f"{Path(strop.__file__).parent.parent}\n".encode())
            self._popen.stdin.close()
            self._control = control
        return self._control

    def close(self) -> None:
        """End the daemon with all its sandboxes, and wait for it."""
        if self._control is not None and self._popen is not None:
            self._control.close()
            self._popen.wait()
            self._control = self._popen = None
        self._has_source = False

    def forget(self) -> None:
        """Close this copy after a fork: the daemon is the parent's."""
        if self._control is not None:
            self._control.close()


def require_kernel() -> None:
    """Refuse a kernel that does not let strop find and end all processes of a sandbox.

    Raises: OSError naming the missing feature.
    """
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:
        raise OSError(errno.ENOSYS, "no pidfd_open, which Linux has from 5.3 on") from error
    if not Path(f"/proc/self/task/{threading.get_native_id()}/children").exists():
        raise OSError(errno.ENOSYS, "/proc does not list the children of a process")


@cache
def python_candidates() -> tuple[str, ...]:
    """Return interpreters to try inside, this process's own first."""
    base = getattr(sys, "_base_executable", None) or sys.executable
    paths = [os.path.realpath(base), "/usr/bin/python3", "/usr/local/bin/python3"]
    return tuple(dict.fromkeys(paths))


_daemons: dict[tuple[int, str], DaemonHandle] = {}
"""Keyed by source and the process that started the daemon, since a fork inherits this table."""


def daemon_of(own_pid: int, source: str = "") -> DaemonHandle:
    """Return the handle of this process's daemon for a Python source.

    Each source has a separate daemon, so programs never see modules that another source has loaded.
    """
    if (own_pid, source) not in _daemons:
        daemon = _daemons[own_pid, source] = DaemonHandle(source)
        os.register_at_fork(after_in_child=daemon.forget)
    return _daemons[own_pid, source]


@atexit.register
def close_daemons() -> None:
    """End this process's daemons with all of their sandboxes; the next order starts another."""
    for (pid, _), daemon in [*_daemons.items()]:
        if pid == os.getpid():
            daemon.close()
