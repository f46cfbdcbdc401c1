"""Run a program that a model wrote like lm-eval's metric for code: in a process, for three seconds.

It is copied into the work folder of lm-eval, so it imports nothing of strop. It replaces the metric
`code_eval` of the package evaluate, which would be fetched from a hub: same limit, same empty namespace, and
a program passes if its last line is reached. Any exception, SystemExit included, fails it.

Not covered: a program that means to harm or to deceive. There is no sandbox; so strop asks the user first,
and its own tasks have one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

LIMIT_S = 3.0
_POLL_S = 0.005
# The namespace is empty, so that `__name__` is not '__main__'. A byte on the pipe marks the program's end.
_RUN = (
    "import os, sys; exec(compile(open(sys.argv[1]).read(), '<program>', 'exec'), {});"
    " os.write(int(sys.argv[2]), b'1')"
)


def count_passes(programs: Sequence[str], test: str) -> int:
    """Count the programs that pass a test, which is appended to each of them."""
    return sum(is_passing(f"{program}\n{test}") for program in programs)


def is_passing(program: str, limit_s: float = LIMIT_S) -> bool:
    """Whether a program ends in time without an exception. Its process group is killed afterwards."""
    read_end, write_end = os.pipe()
    # A grandchild in a new session may keep the other end open.
    os.set_blocking(read_end, False)
    with tempfile.TemporaryDirectory() as folder, os.fdopen(read_end, "rb", buffering=0) as mark:
        path = Path(folder) / "program.py"
        path.write_text(program, encoding="utf-8", errors="replace")
        child = subprocess.Popen(
            [sys.executable, "-I", "-X", "utf8", "-c", _RUN, str(path), str(write_end)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            pass_fds=(write_end,),
            start_new_session=True,
        )
        os.close(write_end)
        is_ended = _wait(child.pid, limit_s)
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        return is_ended and mark.read(1) == b"1"


def _wait(pid: int, limit_s: float) -> bool:
    """Wait for a process to end, and leave it a zombie, so that its group still exists."""
    deadline = time.monotonic() + limit_s
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True
