"""The program above a job's agents where no scheduler is: it starts attempts, one after the other.

    python -m strop.launch.local.supervisor --job DIR --job-id ID

SIGUSR2 is a preemption: the attempt saves its state, and lives again while the budget lasts. SIGTERM and
SIGINT are a cancellation. An agent that was killed counts as a lost node, which a scheduler would replace
too. The members of a sweep live one after the other. It may be process 1 of a container.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from strop.errors import EXIT_DONE, EXIT_INTERRUPTED
from strop.hardware import ChildProcess, clear_leftovers, spawn
from strop.hardware.orphans import adopt_orphans, bury_orphans
from strop.launch.jobs.attempts import combine_exit_files, write_verdict
from strop.launch.jobs.contract import JobPlan, MemberPlan
from strop.launch.jobs.environment import remove_secrets
from strop.launch.jobs.exit_codes import from_wait
from strop.launch.jobs.home import ATTEMPTS_FOLDER, read_plan
from strop.launch.local.identity import write_identity

_POLL_S = 0.1


class _Orders:
    """What signals ask for: set by handlers, passed on by the loop."""

    def __init__(self) -> None:
        self.pending: list[signal.Signals] = []
        self.cancelled_by = ""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            signal.signal(number, self._take)

    def _take(self, number: int, _frame: object) -> None:
        order = signal.Signals(number)
        if order is not signal.SIGUSR2:
            self.cancelled_by = order.name
        self.pending.append(order)

    def forget_preemptions(self) -> None:
        """Leave out what was meant for a life that is over; a cancellation is meant for all."""
        self.pending[:] = [order for order in self.pending if order is not signal.SIGUSR2]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Life:
    """How one attempt ended."""

    exit_code: int
    signal_name: str
    is_lost: bool
    """Whether the agent itself was killed."""


def supervise(job_path: Path, job_id: str) -> int:
    """Let every member of a job live to its end; return the first code that is not 0, else 0.

    Raises: StoreError if the job's folder cannot be read.
    """
    plan = read_plan(job_path)
    # Before anybody can know that it is there: as process 1 it would not hear a signal otherwise.
    orders = _Orders()
    adopt_orphans()
    write_identity(job_path, job_id)
    result = EXIT_DONE
    try:
        for member in plan.members:
            code = _supervise_member(plan, member, job_path, job_id, orders)
            result = result or code
            if orders.cancelled_by:
                break
        if result and orders.cancelled_by:
            write_identity(job_path, job_id, cancelled_by=orders.cancelled_by)
    finally:
        # Of a job that was saved and may go on, the next submission brings them again.
        remove_secrets(job_path)
    return result


def _supervise_member(plan: JobPlan, member: MemberPlan, job_path: Path, job_id: str, orders: _Orders) -> int:
    member_path, last = Path(member.path), plan.num_past + plan.max_requeue
    exit_code = EXIT_INTERRUPTED
    for number in range(plan.num_past, last + 1):
        if orders.cancelled_by:
            break
        attempt = f"{job_id}-{number}"
        life = _live(plan, member_path, job_path, attempt, number, orders)
        exit_code = life.exit_code
        if exit_code != EXIT_INTERRUPTED and not life.is_lost:
            break
    return exit_code


def _live(
    plan: JobPlan, member_path: Path, job_path: Path, attempt: str, number: int, orders: _Orders
) -> _Life:
    """Run one attempt, pass signals on, and write its verdict.

    One whose agent was killed could not say how it ended: it has no code unless it was the last one.
    """
    attempt_path = member_path / ATTEMPTS_FOLDER / attempt
    started_at = time.time()
    orders.forget_preemptions()
    argv = [sys.executable, "-m", "strop.launch.node", "--member", str(member_path), "--job", str(job_path)]
    argv += ["--attempt", attempt, "--number", str(number), "--grace", str(plan.grace_s)]
    argv += ["--term-grace", str(plan.grace_s)]
    agent = spawn(argv, attempt_path / "supervisor.log", cwd=member_path)
    told = _wait(agent, orders)
    ended = agent.poll() or 0
    # By its own death: an agent whose role was killed returns the role's code, and is not lost.
    exit_code, is_lost = from_wait(ended), ended < 0
    if is_lost:
        for cleared in clear_leftovers():
            sys.stderr.write(f"after a kill: {cleared}\n")
            sys.stderr.flush()
    else:
        exit_code = combine_exit_files(attempt_path, 1)
    write_verdict(
        attempt_path,
        number=number,
        exit_code=None if is_lost and number < plan.num_past + plan.max_requeue else exit_code,
        signal=told,
        started_at=started_at,
        ended_at=time.time(),
        nodes=(socket.gethostname(),),
    )
    return _Life(exit_code=exit_code, signal_name=told, is_lost=is_lost)


def _wait(agent: ChildProcess, orders: _Orders) -> str:
    """Wait for an agent's end; return the first signal that was passed on to it."""
    told = ""
    while agent.poll() is None:
        while orders.pending:
            order = orders.pending.pop(0)
            told = told or order.name
            os.kill(agent.pid, order)
        bury_orphans([agent.pid])
        time.sleep(_POLL_S)
    return told


def main(arguments: list[str] | None = None, *, run: Callable[[Path, str], int] = supervise) -> int:
    """Be the supervisor of one job; return its exit code."""
    parser = argparse.ArgumentParser(prog="strop.launch.local.supervisor")
    parser.add_argument("--job", type=Path, required=True, help="the folder of what was submitted")
    parser.add_argument("--job-id", required=True, help="what attempts are called after")
    given = parser.parse_args(arguments)
    return run(given.job, given.job_id)


if __name__ == "__main__":
    sys.exit(main())
