"""The program above a job's agents where no scheduler is: it starts attempts, one after the other.

    python -m strop.launch.local.supervisor --job DIR --job-id ID

SIGUSR2 is a preemption: the attempt saves its state, and lives again while the budget lasts. SIGTERM and
SIGINT are a cancellation. An agent that was killed counts as a lost node, which a scheduler would replace
too. The members of a sweep live one after the other; one that is ordered to end (`members`) ends alone. It
may be process 1 of a container.
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
from strop.launch.attempts import combine_exit_files, write_verdict
from strop.launch.contract import JobPlan, MemberPlan
from strop.launch.exit_codes import from_wait
from strop.launch.home import ATTEMPTS_FOLDER, read_plan
from strop.launch.local.identity import write_identity
from strop.launch.local.members import confirm_end, read_orders
from strop.launch.secrets import remove_secrets

_POLL_S = 0.1


class _Orders:
    """What signals and orders for single members ask for: noted here, passed on by the loop."""

    def __init__(self, job_path: Path) -> None:
        self.pending: list[signal.Signals] = []
        self.cancelled_by = ""
        self._job_path = job_path
        self._for_members: set[tuple[int, signal.Signals]] = set()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            signal.signal(number, self._take)

    def _take(self, number: int, _frame: object) -> None:
        order = signal.Signals(number)
        if order is not signal.SIGUSR2:
            self.cancelled_by = order.name
        self.pending.append(order)

    def take(self, living: int) -> list[signal.Signals]:
        """Return what the living member is to be told now, each word once.

        An order for a member that has not begun is confirmed: it is passed over when its turn comes.
        """
        taken = []
        while self.pending:
            taken.append(self.pending.pop(0))
        for order in read_orders(self._job_path):
            member, signal_name = order
            if member < living or order in self._for_members:
                continue
            self._for_members.add(order)
            if member == living:
                taken.append(signal_name)
            else:
                confirm_end(self._job_path, member)
        return taken

    def end_alone(self, member: int) -> bool:
        """Whether a member is to end, and the others are not."""
        return any(member == one for one, _ in self._for_members)

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
    orders = _Orders(job_path)
    adopt_orphans()
    write_identity(job_path, job_id)
    result = EXIT_DONE
    try:
        for member in plan.members:
            code = _supervise_member(plan, member, job_path, job_id, orders)
            if orders.end_alone(member.index):
                confirm_end(job_path, member.index)
            else:
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
    last = plan.num_past + plan.max_requeue
    exit_code = EXIT_INTERRUPTED
    for number in range(plan.num_past, last + 1):
        if orders.cancelled_by or orders.end_alone(member.index):
            break
        attempt = f"{job_id}-{number}"
        life = _live(plan, member, job_path, attempt, number, orders)
        exit_code = life.exit_code
        if exit_code != EXIT_INTERRUPTED and not life.is_lost:
            break
    return exit_code


def _live(
    plan: JobPlan, member: MemberPlan, job_path: Path, attempt: str, number: int, orders: _Orders
) -> _Life:
    """Run one attempt, pass signals on, and write its verdict.

    One whose agent was killed could not say how it ended: it has no code unless it was the last one.
    """
    member_path = Path(member.path)
    attempt_path = member_path / ATTEMPTS_FOLDER / attempt
    started_at = time.time()
    orders.forget_preemptions()
    argv = [sys.executable, "-m", "strop.launch.node", "--member", str(member_path), "--job", str(job_path)]
    argv += ["--attempt", attempt, "--number", str(number), "--grace", str(plan.grace_s)]
    argv += ["--term-grace", str(plan.grace_s)]
    agent = spawn(argv, attempt_path / "supervisor.log", cwd=member_path)
    told = _wait(agent, orders, member.index)
    ended = agent.poll() or 0
    # By its own death: an agent whose role was killed returns the role's code, and is not lost.
    exit_code, is_lost = from_wait(ended), ended < 0
    if is_lost:
        for cleared in clear_leftovers():
            sys.stderr.write(f"after a kill: {cleared}\n")
            sys.stderr.flush()
    else:
        exit_code = combine_exit_files(attempt_path, 1)
    is_last = number == plan.num_past + plan.max_requeue or orders.end_alone(member.index)
    write_verdict(
        attempt_path,
        number=number,
        exit_code=None if is_lost and not is_last else exit_code,
        signal=told,
        started_at=started_at,
        ended_at=time.time(),
        nodes=(socket.gethostname(),),
    )
    return _Life(exit_code=exit_code, signal_name=told, is_lost=is_lost)


def _wait(agent: ChildProcess, orders: _Orders, member: int) -> str:
    """Wait for an agent's end; return the first signal that was passed on to it."""
    told = ""
    while agent.poll() is None:
        for order in orders.take(member):
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
