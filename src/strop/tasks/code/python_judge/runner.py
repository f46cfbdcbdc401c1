"""The judge inside the sandbox: reads one job on standard input, writes one verdict on standard output.

It is the parent of all that the candidate is, runs the tests itself, and shows the candidate nothing: not
its memory, not its descriptors, not the tests. What ends this process is seen from outside as a missing
verdict, which is never a pass. Linux only.
Runs in the sandbox, where only the standard library is.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from typing import Any

from strop.tasks.code.python_judge.candidate import start_nursery
from strop.tasks.code.python_judge.remote import Session, Source
from strop.tasks.code.python_judge.trials import ERRORED, PASSED, run_calls, run_programs, run_statements

STARTED = "started"
_PR_SET_DUMPABLE = 4
_libc = ctypes.CDLL(None)
_MODES = {"statements": run_statements, "calls": run_calls, "programs": run_programs}


def main() -> None:
    """Judge one job."""
    # From here on, /proc/<this>/fd and /proc/<this>/mem are closed to other processes of this user.
    set_process_option(_PR_SET_DUMPABLE, 0)
    # An interrupt from the candidate must end this process as a signal does, not as an error of its own.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.set_int_max_str_digits(0)
    nursery = start_nursery(set_process_option)
    job = json.loads(_read_all(0))
    _write(f"{STARTED} {job['nonce']}\n")
    _write(json.dumps({"nonce": job["nonce"], **judge(nursery, job)}) + "\n")
    # All is said, and to take an interpreter down in order takes milliseconds.
    os._exit(0)


def set_process_option(option: int, value: int) -> None:
    """Ask the kernel for something about this process."""
    _libc.prctl(option, value, 0, 0, 0)


def judge(nursery: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Run all tests of a job and count what became of them."""
    source = Source(
        text=job["source"], imports=job["imports"], names=job["names"], in_class=job["mode"] == "calls"
    )
    session = Session(nursery, source, job["limits"], is_program=job["mode"] == "programs")
    results = _MODES[job["mode"]](session, job)
    session.drop()
    if session.is_orphaned:
        results = [(ERRORED, "the program ended what its processes come from") for _ in results]
    counts: dict[str, int] = {}
    for status, _ in results:
        counts[status] = counts.get(status, 0) + 1
    cause = next((why for status, why in results if status != PASSED), "")
    return {"counts": counts, "total": len(results), "cause": cause}


def _read_all(descriptor: int) -> bytes:
    parts = []
    while part := os.read(descriptor, 1 << 20):
        parts.append(part)
    return b"".join(parts)


def _write(text: str) -> None:
    data = text.encode()
    while data:
        data = data[os.write(1, data) :]
