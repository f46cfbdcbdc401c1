"""Children that a process did not start itself, by real processes."""

from __future__ import annotations

import subprocess
import sys

# Starts one child of its own that has ended and is not waited for, one that runs, and two that are adopted:
# their parents end at once. Says which are zombies after the burial.
_UNDERTAKER = """
import os, subprocess, sys, time
from strop.hardware.orphans import adopt_orphans, bury_orphans

def start(code):
    return subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE)

def fork_and_leave(seconds):
    code = f"import os, time; pid = os.fork(); print(pid, flush=True) if pid else time.sleep({seconds})"
    parent = start(code)
    pid = int(parent.stdout.readline())
    parent.wait()
    return pid

def state_of(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"

adopt_orphans()
own, ended, running = start(""), fork_and_leave(0), fork_and_leave(600)
while {state_of(own.pid), state_of(ended)} != {"Z"}:
    time.sleep(0.01)
is_running = state_of(running) not in "Zgone"
print(bury_orphans([own.pid]), state_of(own.pid), state_of(ended), is_running, own.wait())
os.kill(running, 9)
"""


def test_only_adopted_children_that_have_ended_are_buried() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _UNDERTAKER], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.stdout == "1 Z gone True 0\n", done.stderr


# Ends children in sessions of their own, and what they started, but not itself.
_KEEPER = """
import os, subprocess, sys, time
from strop.hardware.orphans import adopt_orphans, end_descendants

code = "import os, time; pid = os.fork(); print(pid, flush=True) if pid else None; time.sleep(600)"
adopt_orphans()
child = subprocess.Popen(
    [sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, start_new_session=True
)
grandchild = int(child.stdout.readline())
print(end_descendants(30.0), [os.path.exists(f"/proc/{pid}") for pid in (child.pid, grandchild)])
"""


def test_prc_4_everything_that_a_keeper_started_is_ended() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _KEEPER], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.stdout == "[] [False, False]\n", done.stderr
