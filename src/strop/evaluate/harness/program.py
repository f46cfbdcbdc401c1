"""Running a program that a model wrote, as lm-eval's metric for code does: in a process, for three seconds.

Copied beside lm-eval into its own environment, so it imports nothing of strop. It stands in for the metric
`code_eval` of the package evaluate, which is fetched from a hub: same limit, same empty namespace, and a
program passes if its last line was reached. Whatever it raises, SystemExit included, fails it.

Not covered: a program that means to harm or to deceive. There is no sandbox; that is why strop asks the
user first, and why its own tasks have one.
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
# The namespace is empty, so that `__name__` is not '__main__'. A byte says that the end was reached.
_RUN = (
    "import os, sys; exec(compile(open(sys.argv[1]).read(), '<program>', 'exec'), {});"
    " os.write(int(sys.argv[2]), b'1')"
)


def count_passes(programs: Sequence[str], test: str) -> int:
    """Count the programs that pass a test, which is run behind each of them."""
    return sum(is_passing(f"{program}\n{test}") for program in programs)


def is_passing(program: str, limit_s: float = LIMIT_S) -> bool:
    """Whether a program ends in time and raises nothing. What it started is killed with it."""
    read_end, write_end = os.pipe()
    # A grandchild in a session of its own may keep the other end open.
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
    """Wait for a process to end, and leave it a zombie: its group can then still be named."""
    deadline = time.monotonic() + limit_s
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True
