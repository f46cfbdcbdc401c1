"""Children end with their parent, with their group, and with their log complete. Real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from strop.errors import CheckRefused, StoreError
from strop.hardware import spawn, tail, terminate
from tests.fixtures import waiting

PYTHON = sys.executable
LIMIT_S = 120.0
# Starts a child in its own group that ignores SIGTERM, then tells both process ids.
STUBBORN_TREE = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
code = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
inner = subprocess.Popen([sys.executable, "-c", code])
print(os.getpid(), inner.pid, flush=True)
time.sleep(600)
"""
PARENT = """
import sys, time
from pathlib import Path
from strop.hardware import spawn
code = "import time; print('up', flush=True); time.sleep(600)"
child = spawn([sys.executable, "-c", code], Path(sys.argv[1]))
print(child.pid, flush=True)
time.sleep(600)
"""


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status not in {"Z", "X"}


def wait_until(condition: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    waiting.wait_until(condition, limit_s=limit_s)


def test_output_and_exit_code_are_kept(tmp_path: Path) -> None:
    log_path = tmp_path / "a dir" / "role.log"
    code = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(7)"
    child = spawn([PYTHON, "-u", "-c", code], log_path)
    assert child.wait(LIMIT_S) == 7
    assert child.poll() == 7
    assert terminate(child, 0.1) == 7
    assert log_path.read_text() == "out\nerr\n"
    assert child.tail(1) == "err"
    # A second attempt appends; its environment and directory are the given ones.
    code = "import os; print(sorted(n for n in os.environ if n.startswith('STROP')), os.getcwd())"
    assert spawn([PYTHON, "-c", code], log_path, {"STROP_ONLY": "1"}, cwd=tmp_path).wait(LIMIT_S) == 0
    assert tail(log_path) == f"out\nerr\n['STROP_ONLY'] {tmp_path}"


def test_prc_5_a_death_at_import_is_in_the_log(tmp_path: Path) -> None:
    """Incident: a worker ended with 1 before logging began, and nobody knew why."""
    child = spawn([PYTHON, "-c", "import strop_has_no_such_module"], tmp_path / "role.log")
    assert child.wait(LIMIT_S) == 1
    assert "No module named 'strop_has_no_such_module'" in child.tail(1)


def test_prc_4_a_stubborn_tree_is_killed_after_its_grace(tmp_path: Path) -> None:
    child = spawn([PYTHON, "-c", STUBBORN_TREE], tmp_path / "log")
    wait_until(lambda: bool(child.tail()))
    own_pid, inner_pid = (int(word) for word in child.tail().split())
    assert own_pid == child.pid
    assert terminate(child, 0.2) == -signal.SIGKILL
    wait_until(lambda: not is_running(inner_pid))
    assert not is_running(own_pid)


def test_what_an_ended_child_left_in_its_group_is_killed(tmp_path: Path) -> None:
    code = "import subprocess, sys; p = subprocess.Popen(['sleep', '600']); print(p.pid)"
    child = spawn([PYTHON, "-c", code], tmp_path / "log")
    assert child.wait(LIMIT_S) == 0
    orphan_pid = int(child.tail())
    wait_until(lambda: not is_running(orphan_pid))


def test_prc_4_only_own_children_are_ended(tmp_path: Path) -> None:
    """Incident: clean-up by name killed the processes of others."""
    args = [PYTHON, "-c", "print('up', flush=True); import time; time.sleep(600)"]
    stranger = subprocess.Popen(args, stdout=subprocess.DEVNULL)
    sibling, child = spawn(args, tmp_path / "sibling"), spawn(args, tmp_path / "child")
    try:
        wait_until(lambda: child.tail() == "up")
        assert child.poll() is None
        assert child.wait(0.05) is None
        # A polite child ends within its grace.
        assert terminate(child, LIMIT_S) == -signal.SIGTERM
        assert stranger.poll() is None
        assert sibling.poll() is None
    finally:
        terminate(sibling, 5)
        stranger.kill()
        stranger.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's death")
def test_prc_4_a_child_dies_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    """Incident: orphans held GPUs and memory after their run was killed."""
    log_path = tmp_path / "log"
    parent = subprocess.Popen([PYTHON, "-c", PARENT, str(log_path)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child_pid = int(parent.stdout.readline())
    wait_until(lambda: tail(log_path) == "up")
    assert is_running(child_pid)
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    wait_until(lambda: not is_running(child_pid))


def test_a_child_outlives_the_thread_that_asked_for_it(tmp_path: Path) -> None:
    """The kernel ties a child to the thread that forked it, not to the process."""
    children = []
    args = [PYTHON, "-c", "print('up', flush=True); import time; time.sleep(600)"]
    thread = threading.Thread(target=lambda: children.append(spawn(args, tmp_path / "log")))
    thread.start()
    thread.join()
    (child,) = children
    wait_until(lambda: child.tail() == "up")
    assert child.wait(0.3) is None
    terminate(child, 5)


def test_a_missing_program_and_a_log_that_cannot_be_opened_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckRefused, match="strop-has-no-such-tool"):
        spawn(["strop-has-no-such-tool"], tmp_path / "log")
    with pytest.raises(StoreError, match="could not be written"):
        spawn([PYTHON, "-c", ""], tmp_path)


def test_tail_reads_only_the_end(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x" * 1_000_000 + "\nlast but öne\nlast".encode())
    assert tail(path, 2) == "last but öne\nlast"
    assert len(tail(path, 3)) < 70_000
    assert tail(path, 0) == ""
    assert tail(tmp_path / "absent") == ""


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_lau_2_an_announcement_of_the_end_does_not_end_a_child(tmp_path: Path, number: int) -> None:
    """Incident: Slurm sends `--signal` to every process of a step, and the default is to die of it."""
    code = "import time; print('up', flush=True); time.sleep(1); print('alive', flush=True)"
    child = spawn([PYTHON, "-c", code], tmp_path / "role.log")
    wait_until(lambda: child.tail(1) == "up")
    os.kill(child.pid, number)
    assert child.wait(LIMIT_S) == 0
    assert child.tail(1) == "alive"


# Starts one child of its own that has ended and is not waited for, one that runs, and two that are adopted:
# their parents end at once. Says which are zombies after the reaping.
_REAPER = """
import os, subprocess, sys, time
from strop.hardware.process import become_subreaper, reap_orphans

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

become_subreaper()
own, ended, running = start(""), fork_and_leave(0), fork_and_leave(600)
while {state_of(own.pid), state_of(ended)} != {"Z"}:
    time.sleep(0.01)
is_running = state_of(running) not in "Zgone"
print(reap_orphans([own.pid]), state_of(own.pid), state_of(ended), is_running, own.wait())
os.kill(running, 9)
"""


def output_of(program: str) -> str:
    done = subprocess.run([PYTHON, "-c", program], capture_output=True, text=True, timeout=240, check=True)
    return done.stdout


def test_only_adopted_children_that_have_ended_are_reaped() -> None:
    assert output_of(_REAPER) == "1 Z gone True 0\n"


# Ends children in sessions of their own, and what they started, but not itself.
_KEEPER = """
import os, subprocess, sys, time
from strop.hardware.process import become_subreaper, end_descendants

code = "import os, time; pid = os.fork(); print(pid, flush=True) if pid else None; time.sleep(600)"
become_subreaper()
child = subprocess.Popen(
    [sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, start_new_session=True
)
grandchild = int(child.stdout.readline())
print(end_descendants(30.0), [os.path.exists(f"/proc/{pid}") for pid in (child.pid, grandchild)])
"""


def test_prc_4_everything_that_a_keeper_started_is_ended() -> None:
    assert output_of(_KEEPER) == "[] [False, False]\n"
