"""What exit codes of a job mean, and many nodes' codes as one."""

from __future__ import annotations

from collections.abc import Iterable
from signal import Signals

from strop.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_REFUSED, EXIT_USAGE

_MILD = (EXIT_REFUSED, EXIT_INTERRUPTED, EXIT_DONE)
"""From the one that matters most; any other code matters more."""
SIGNAL_BASE = 128
_MEANINGS = {
    EXIT_DONE: "done",
    EXIT_FAILED: "failed",
    EXIT_USAGE: "wrong usage or settings",
    EXIT_INTERRUPTED: "interrupted, its state saved",
    EXIT_REFUSED: "refused by a check before it began",
}


def combine(codes: Iterable[int | None]) -> int:
    """Return one code for all nodes: a failure before 76, before 75, before 0. A missing code is a failure.

    A maximum, as `srun` returns it, would let a 75 hide a 1.
    """
    known = [EXIT_FAILED if code is None else code for code in codes]
    failures = [code for code in known if code not in _MILD]
    if failures:
        # A cause before its consequence: the other nodes are killed once one has failed.
        return next((code for code in failures if code < SIGNAL_BASE), failures[0])
    return next((code for code in _MILD if code in known), EXIT_FAILED)


def from_wait(exit_code: int) -> int:
    """Return a child's code as a shell has it: a death by signal n is 128 + n."""
    return SIGNAL_BASE - exit_code if exit_code < 0 else exit_code


def describe_exit(exit_code: int) -> str:
    """Say what a code means."""
    if exit_code > SIGNAL_BASE:
        try:
            return f"killed by {Signals(exit_code - SIGNAL_BASE).name}"
        except ValueError:
            return f"exit code {exit_code}"
    meaning = _MEANINGS.get(exit_code)
    return f"exit code {exit_code}" + (f": {meaning}" if meaning else "")
