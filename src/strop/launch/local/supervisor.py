"""The parent program of a job's agents without a scheduler: it runs attempts one after the other.

    python -m strop.launch.local.supervisor --job DIR --job-id ID

SIGUSR2 is a preemption: the attempt saves its state, and the job is requeued at most `max_requeue` times.
SIGTERM and SIGINT are a cancellation. A killed agent counts as a lost node, which a scheduler would also
replace. The trials of a sweep run one after the other; one of them can be ended alone
(`supervisor_files`).

The words of the site's `wrap` stand before the agent's command. What they run is told of the supervisor's
death by the end of its standard input: a container's engine does not pass a kill on.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import time
from pathlib import Path

from strop.errors import EXIT_DONE, EXIT_INTERRUPTED
from strop.hardware import clear_leftovers, spawn, tail
from strop.hardware.process import become_subreaper, reap_orphans
from strop.launch.attempts import (
    SIGNAL_BASE,
    combine_exit_files,
    describe_exit,
    from_wait,
    read_exit_code,
    write_verdict,
)
from strop.launch.contract import JobPlan, TrialPlan
from strop.launch.job_dir import ATTEMPTS_FOLDER, read_plan
from strop.launch.local.supervisor_files import confirm_end, read_orders, write_identity
from strop.launch.secrets import remove_secrets

_POLL_S = 0.1


class _Orders:
    """Pending signals, which handlers store and the loop passes on, and orders for single trials."""

    def __init__(self, job_path: Path) -> None:
        self.pending: list[signal.Signals] = []
        self.cancelled_by = ""
        self._job_path = job_path
        self._for_trials: set[tuple[int, signal.Signals]] = set()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            signal.signal(number, self._take)

    def _take(self, number: int, _frame: object) -> None:
        order = signal.Signals(number)
        if order is not signal.SIGUSR2:
            self.cancelled_by = order.name
        self.pending.append(order)

    def take(self, running: int) -> list[signal.Signals]:
        """Return the signals for the running trial, each order once.

        An order for a trial that has not begun is confirmed at once; the trial will be skipped.
        """
        signals = []
        while self.pending:
            signals.append(self.pending.pop(0))
        for order in read_orders(self._job_path):
            trial, signal_name = order
            if trial < running or order in self._for_trials:
                continue
            self._for_trials.add(order)
            if trial == running:
                signals.append(signal_name)
            else:
                confirm_end(self._job_path, trial)
        return signals

    def end_alone(self, trial: int) -> bool:
        """Whether only this trial must end, and the others go on."""
        return any(trial == ordered for ordered, _ in self._for_trials)

    def forget_preemptions(self) -> None:
        """Drop preemptions of an attempt that has ended; a cancellation applies to the whole job."""
        self.pending[:] = [order for order in self.pending if order is not signal.SIGUSR2]


def supervise(job_path: Path, job_id: str) -> int:
    """Run every trial of a job to its end; return the first code that is not 0, else 0.

    Raises: StoreError if the job's folder cannot be read.
    """
    plan = read_plan(job_path)
    # Before the identity is written: process 1 ignores signals without a handler.
    orders = _Orders(job_path)
    become_subreaper()
    write_identity(job_path, job_id)
    result = EXIT_DONE
    try:
        for trial in plan.trials:
            code = EXIT_INTERRUPTED
            for number in range(plan.num_past, plan.num_past + plan.max_requeue + 1):
                if orders.cancelled_by or orders.end_alone(trial.index):
                    break
                code, is_lost = _run_attempt(plan, trial, job_path, f"{job_id}-{number}", number, orders)
                if code != EXIT_INTERRUPTED and not is_lost:
                    break
            if orders.end_alone(trial.index):
                confirm_end(job_path, trial.index)
            else:
                result = result or code
            if orders.cancelled_by:
                break
        if result and orders.cancelled_by:
            write_identity(job_path, job_id, cancelled_by=orders.cancelled_by)
    finally:
        # If the job resumes from a checkpoint, the next submission writes them again.
        remove_secrets(job_path)
    return result


def _run_attempt(
    plan: JobPlan, trial: TrialPlan, job_path: Path, attempt: str, number: int, orders: _Orders
) -> tuple[int, bool]:
    """Run one attempt, pass signals on, write its verdict; return its code and whether the agent was killed.

    The verdict of an attempt whose agent was killed has an exit code only if it was the last one.
    """
    trial_path = Path(trial.path)
    attempt_path = trial_path / ATTEMPTS_FOLDER / attempt
    started_at = time.time()
    orders.forget_preemptions()
    wrap = plan.profile.get("wrap") or ()
    python = plan.python if wrap else sys.executable
    argv = [*wrap, python, "-m", "strop.launch.node", "--trial", str(trial_path), "--job", str(job_path)]
    argv += ["--attempt", attempt, "--number", str(number), "--grace", str(plan.grace_s)]
    argv += ["--term-grace", str(plan.grace_s), *(["--tied"] if wrap else [])]
    log_path, (stdin, tie) = attempt_path / "supervisor.log", os.pipe()
    os.write(tie, b"\n")
    agent = spawn(argv, log_path, cwd=trial_path, stdin=stdin)
    os.close(stdin)
    # The first signal that is passed on to the agent.
    signal_name = ""
    while agent.poll() is None:
        for order in orders.take(trial.index):
            signal_name = signal_name or order.name
            os.kill(agent.pid, order)
        reap_orphans([agent.pid])
        time.sleep(_POLL_S)
    os.close(tie)
    ended = agent.poll() or 0
    has_code = read_exit_code(attempt_path / "exit" / "0") is not None
    # Negative only if the agent itself was killed: for a killed role the agent returns that role's code.
    exit_code = from_wait(ended)
    is_lost = ended < 0 or (not has_code and exit_code == SIGNAL_BASE + signal.SIGKILL)
    if is_lost:
        if cleared := clear_leftovers():
            sys.stderr.write(f"after a kill: ended {', '.join(map(str, cleared))}\n")
            sys.stderr.flush()
    else:
        exit_code = combine_exit_files(attempt_path, 1)
    is_last = number == plan.num_past + plan.max_requeue or orders.end_alone(trial.index)
    write_verdict(
        attempt_path,
        number=number,
        exit_code=None if is_lost and not is_last else exit_code,
        signal=signal_name,
        started_at=started_at,
        ended_at=time.time(),
        nodes=(socket.gethostname(),),
        cause="" if has_code else f"the agent ended: {describe_exit(from_wait(ended))}\n{tail(log_path)}",
    )
    return exit_code, is_lost


def main(arguments: list[str] | None = None) -> int:
    """Supervise one job; return its exit code."""
    parser = argparse.ArgumentParser(prog="strop.launch.local.supervisor")
    parser.add_argument("--job", type=Path, required=True, help="the folder of what was submitted")
    parser.add_argument("--job-id", required=True, help="prefix of attempt names")
    args = parser.parse_args(arguments)
    return supervise(args.job, args.job_id)


if __name__ == "__main__":
    sys.exit(main())
