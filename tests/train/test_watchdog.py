"""The watchdog: a stage that hangs ends the process, says which and since when, and shows stacks."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from strop.record import RunDir
from strop.train.watchdog import Watchdog

# The main thread hangs in a wait that no signal handler, exception or event loop would end.
HANG = """
import sys, threading
from pathlib import Path
import strop.train.watchdog as module
module.TELL_LIMIT_S = 0.5
from strop.record import Event, EventKind, RunDir
from strop.train.watchdog import Watchdog
run = RunDir.create(Path(sys.argv[1]), "hung", "", "d1", {})
def tell(stage, stalled_s):
    run.events.append(Event(kind=EventKind.TRIPWIRE, step=3, cause="stall", detail=f"stage {stage}"))
    if sys.argv[2] == "raise":
        raise OSError("the disk is gone too")
    if sys.argv[2] == "hang":
        threading.Event().wait()
def wait_for_the_engine():
    # From here on it hangs; how long it took to come here is nobody's stall.
    watchdog._max_stall_s = 0.3
    threading.Event().wait()
with Watchdog(3600.0, tell) as watchdog:
    watchdog.progress("generate")
    wait_for_the_engine()
"""


@pytest.mark.parametrize("listener", ["return", "raise", "hang"])
def test_prc_1_a_hung_stage_ends_the_process(tmp_path: Path, listener: str) -> None:
    """Incident: a wait without deadline kept a machine busy for twelve hours."""
    ended = subprocess.run(
        [sys.executable, "-c", HANG, str(tmp_path), listener],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 1, ended.stderr
    # Where everything hung.
    assert "wait_for_the_engine" in ended.stderr
    (path,) = tmp_path.iterdir()
    (event,) = RunDir.open(path).events.read()
    assert (event.kind, event.cause, event.detail) == ("tripwire", "stall", "stage generate")
    # The lock went with the process.
    with RunDir.open(path) as taken:
        assert taken.is_locked_here


CHILD = (
    "import time\\ndef serves_no_more():\\n    print('up', flush=True); time.sleep(600)\\nserves_no_more()"
)
HANG_WITH_CHILD = f"""
import os, signal, subprocess, sys, threading, time
from strop.train.watchdog import Watchdog
os.environ["PYTHONFAULTHANDLER"] = "1"
child = subprocess.Popen([sys.executable, "-c", "{CHILD}"], stdout=subprocess.PIPE)
child.stdout.readline()
time.sleep(0.1)  # From its word to its sleep.
os.kill(child.pid, signal.SIGSTOP)
with Watchdog(0.3, lambda stage, stalled_s: None):
    threading.Event().wait()
"""


def test_the_stacks_of_children_are_shown_too() -> None:
    """Incident PRC-1: the engine was stopped, and only the trainer said where it waited."""
    ended = subprocess.run(
        [sys.executable, "-c", HANG_WITH_CHILD], capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 1
    assert "serves_no_more" in ended.stderr


def test_a_stage_that_moves_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only this test moves: a pause of the machine would end the tests themselves."""
    now_s = 0.0
    monkeypatch.setattr("strop.train.watchdog.time", SimpleNamespace(monotonic=lambda: now_s))
    stalls: list[str] = []
    with Watchdog(0.4, lambda stage, stalled_s: stalls.append(stage)) as watchdog:
        for _ in range(6):
            now_s += 0.3
            time.sleep(0.2)  # It looks every 0.1 s.
            watchdog.progress("learn")
    assert stalls == []


def test_without_a_bound_nothing_is_watched() -> None:
    with Watchdog(None, lambda stage, stalled_s: None) as watchdog:
        watchdog.progress("learn")
