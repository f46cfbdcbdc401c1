"""Run programs of this host for a daemon or a supervisor: podman, cp, rm.

Not `subprocess`: its imports take ten milliseconds and a megabyte in each supervisor.
"""

from __future__ import annotations

import errno
import math
import os
import select
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_CHUNK_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """The result of a program."""

    exit_code: int
    """Negative for a signal; 127 if the program was not started."""
    stdout: bytes
    stderr: bytes


def run_program(
    words: Sequence[str],
    env: Mapping[str, str],
    *,
    stdin: int | None = None,
    limit_s: float = math.inf,
) -> Done:
    """Run a program to its end. `stdin` None: no input.

    Raises: OSError if the host gives no process, or after `limit_s`, when the program is killed.
    """
    streams = {}
    ends = []
    for name in ("stdout", "stderr"):
        read_end, write_end = os.pipe()
        streams[read_end] = name
        ends.append(write_end)
    source = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC) if stdin is None else stdin
    child_ends = (source, *ends)
    try:
        actions = [(os.POSIX_SPAWN_DUP2, end, target) for target, end in enumerate(child_ends)]
        pid = os.posix_spawnp(words[0], list(words), dict(env), file_actions=actions, setsigmask=())
    finally:
        for descriptor in (*ends, *((source,) if stdin is None else ())):
            os.close(descriptor)
    parts: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
    is_late = _read_all(streams, parts, limit_s)
    if is_late:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if is_late:
        raise OSError(errno.ETIMEDOUT, f"{words[0]} gave no answer in {limit_s:.0f} s")
    return Done(
        exit_code=os.waitstatus_to_exitcode(status),
        stdout=bytes(parts["stdout"]),
        stderr=bytes(parts["stderr"]),
    )


def remove_tree(path: str) -> None:
    """Remove a directory tree of this user, whatever the modes in it."""
    # Not shutil.rmtree, which recurses: a program may nest directories deeper than Python's stack.
    for step in (["rm", "-rf"], ["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
        if os.path.isdir(path):
            run_program([*step, path], {"PATH": "/usr/bin:/bin"})


def _read_all(streams: dict[int, str], parts: dict[str, bytearray], limit_s: float) -> bool:
    """Read all streams to their ends and close them; return whether `limit_s` passed before."""
    deadline = time.monotonic() + limit_s
    poll = select.poll()
    for descriptor in streams:
        poll.register(descriptor, select.POLLIN)
    while streams and (left_s := deadline - time.monotonic()) > 0:
        for descriptor, _ in poll.poll(None if math.isinf(left_s) else left_s * 1000):
            data = os.read(descriptor, _CHUNK_BYTES)
            parts[streams[descriptor]] += data
            if not data:
                poll.unregister(descriptor)
                os.close(descriptor)
                del streams[descriptor]
    for descriptor in streams:
        os.close(descriptor)
    return bool(streams)
