"""The processes of a job on one node, which start together and end together.

They end with success once every role that must succeed has exited with 0, else with the code, the name and
the last lines of the first role that failed. A sidecar must not end while the run goes on.

`PeerWatch` and `StallWatch` end them from outside: for another node's end, a later attempt, a stall.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from strop.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_REFUSED, EXIT_USAGE
from strop.hardware import ChildProcess, spawn, tail
from strop.launch.attempts import SIGNAL_BASE, describe_exit, from_wait, read_exit_code
from strop.launch.contract import JobPlan, Need, RolePlan
from strop.launch.node.environment import NodeTask
from strop.record.fence import read_fence

HEARTBEAT_EVERY_S = 5.0
MAX_SILENCE_S = 120.0
"""Shared file systems may take a minute to show a change to other nodes."""
FIRST_HEARTBEAT_LIMIT_S = 900.0
"""Time for code and preflight of node 0 before its first heartbeat; they may wait for all nodes."""
_LOOK_EVERY_S = 1.0
NUM_TAIL_LINES = 20
ORDERED_END_S = 10.0
"""Seconds for roles to end after another one has."""
_POLL_S = 0.05
_STACKS_S = 5.0
"""Seconds for roles to write their stacks."""
_KILLED_BY_TERM = SIGNAL_BASE + signal.SIGTERM
_REFUSALS = frozenset({EXIT_USAGE, EXIT_REFUSED})


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeEnd:
    """The end of a node's roles."""

    exit_code: int
    cause: str
    """A text for the user: which role, how, and its last lines; empty for a success."""
    role: str = ""
    """The decisive role."""
    is_stall: bool = False
    """Whether the roles made no progress: then the stacks of all roles are written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Role:
    """One started process."""

    plan: RolePlan
    child: ChildProcess

    @property
    def name(self) -> str:
        """The name in the plan."""
        return self.plan.name


class StopRequest:
    """A stop requested by signals: set by handlers, read by the loop."""

    def __init__(self, *, grace_s: float, term_grace_s: float) -> None:
        self.signal_name = ""
        """The first signal that requested a stop; empty without one."""
        self.deadline = float("inf")
        """On time.monotonic()."""
        self._grace_s = {signal.SIGUSR2: grace_s, signal.SIGUSR1: grace_s, signal.SIGTERM: term_grace_s}
        self._grace_s[signal.SIGINT] = term_grace_s

    def install(self) -> None:
        """Install the signal handlers; only the main thread may."""
        for number in self._grace_s:
            signal.signal(number, lambda received, _frame: self.request(signal.Signals(received)))

    def request(self, number: signal.Signals) -> None:
        """Request a stop. A later signal can only shorten the deadline."""
        self.signal_name = self.signal_name or number.name
        self.deadline = min(self.deadline, time.monotonic() + self._grace_s[number])


def start_roles(
    plans: Sequence[RolePlan],
    log_path: Path,
    environments: Mapping[str, Mapping[str, str]],
    *,
    cwd: Path,
) -> list[Role]:
    """Start every role in its own process group, with its output in `<log_path>/<role>.log`.

    `environments`: the whole environment of each role, by name.
    Raises: CheckRefused if a program is missing; roles started before it are ended.
    """
    started: list[Role] = []
    with ExitStack() as undo:
        undo.callback(lambda: end_roles(started, time.monotonic()))
        for plan in plans:
            child = spawn(plan.argv, log_path / f"{plan.name}.log", environments[plan.name], cwd=cwd)
            started.append(Role(plan=plan, child=child))
        undo.pop_all()
    return started


def watch_roles(
    roles: Sequence[Role],
    stop: StopRequest,
    *,
    check: Callable[[], NodeEnd | None],
    say: Callable[[str], None],
) -> NodeEnd:
    """Wait until the roles are done, one of them fails, or a stop is requested. All have ended on return.

    `check` is called repeatedly, and returns an end caused from outside. `say` reports failures that do not
    end the run.
    """
    is_stopping = False
    failed: set[str] = set()
    while True:
        for role in roles:
            code = role.child.poll()
            if is_stopping or role.name in failed or code is None or from_wait(code) in _REFUSALS:
                continue
            if role.plan.need is Need.NOTHING and code != EXIT_DONE:
                failed.add(role.name)
                say(f"{_describe_end(role)}\nthe run goes on without it")
        end = _find_end(roles, is_stopping=is_stopping)
        if end is not None:
            end_roles(roles, min(stop.deadline, time.monotonic() + ORDERED_END_S))
            return end
        if stop.signal_name and not is_stopping:
            # Once: a second SIGTERM would end a role without a checkpoint.
            saving = [role for role in roles if role.plan.need is Need.SUCCESS]
            _signal_all(saving, signal.SIGTERM)
            is_stopping = True
        if time.monotonic() > stop.deadline:
            needed = [role for role in roles if role.plan.need is not Need.NOTHING]
            is_done = all(role.child.poll() is not None for role in needed)
            end_roles(roles, time.monotonic())
            if is_done:
                return NodeEnd(exit_code=EXIT_DONE, cause="")
            return NodeEnd(
                exit_code=SIGNAL_BASE + signal.SIGKILL,
                cause=f"{_names(roles)} did not end within the grace after {stop.signal_name} and was killed",
            )
        if (outside_end := check()) is not None:
            stacks = f"; {write_stacks(roles)}" if outside_end.is_stall else ""
            end_roles(roles, min(stop.deadline, time.monotonic() + ORDERED_END_S))
            return replace(outside_end, cause=outside_end.cause + stacks)
        time.sleep(_POLL_S)


def end_roles(roles: Sequence[Role], deadline: float) -> None:
    """End the running roles by a deadline of time.monotonic(): TERM, wait, KILL."""
    running = [role for role in roles if role.child.poll() is None]
    _signal_all(running, signal.SIGTERM)
    while any(role.child.poll() is None for role in running) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    _signal_all([role for role in running if role.child.poll() is None], signal.SIGKILL)
    for role in running:
        role.child.wait(10.0)


def write_stacks(roles: Sequence[Role]) -> str:
    """Make every Python process of the roles write its threads' stacks to its log, and end it.

    PYTHONFAULTHANDLER makes SIGABRT do both. Stopped processes are continued first.
    """
    running = [role for role in roles if role.child.poll() is None]
    _signal_all(running, signal.SIGCONT)
    _signal_all(running, signal.SIGABRT)
    # Send no other signal meanwhile: SIGTERM would end a process before its handler has written the stacks.
    deadline = time.monotonic() + _STACKS_S
    while any(role.child.poll() is None for role in running) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    end_roles(roles, time.monotonic())
    return f"stacks of {_names(running)} are at the end of their logs"


def _find_end(roles: Sequence[Role], *, is_stopping: bool) -> NodeEnd | None:
    """Return the end of the node, or None while it runs."""
    codes = {role.name: role.child.poll() for role in roles}
    needed = [role for role in roles if role.plan.need is Need.SUCCESS]
    if needed and all(codes[role.name] == EXIT_DONE for role in needed):
        return NodeEnd(exit_code=EXIT_DONE, cause="", role=needed[0].name)
    for role in roles:
        code = codes[role.name]
        if code is None or (code == EXIT_DONE and role.plan.need is Need.SUCCESS):
            continue
        exit_code = from_wait(code)
        if role.plan.need is Need.NOTHING and exit_code not in _REFUSALS:
            continue
        if is_stopping and exit_code == _KILLED_BY_TERM and role.plan.need is Need.SUCCESS:
            # It had not begun to save: the last checkpoint is its state, and it can be requeued.
            return NodeEnd(exit_code=EXIT_INTERRUPTED, cause="", role=role.name)
        if exit_code == EXIT_INTERRUPTED:
            return NodeEnd(exit_code=exit_code, cause="", role=role.name)
        # A sidecar that exits with 0 has left the run, which is no success.
        failure = EXIT_FAILED if exit_code == EXIT_DONE else exit_code
        return NodeEnd(exit_code=failure, cause=_describe_end(role), role=role.name)
    # None of them was needed: other nodes determine the job's exit code.
    return None if None in codes.values() else NodeEnd(exit_code=EXIT_DONE, cause="")


def _describe_end(role: Role) -> str:
    exit_code = from_wait(role.child.poll() or 0)
    early = "" if role.plan.need is Need.SUCCESS else " while the run went on"
    words = role.child.tail(NUM_TAIL_LINES)
    return f"role {role.name} ended{early} with {describe_exit(exit_code)}; its last lines:\n{words}"


def _signal_all(roles: Sequence[Role], number: signal.Signals) -> None:
    for role in roles:
        if role.child.poll() is None:
            # The leader is not reaped yet, so the group's number cannot have been reused.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(role.child.pid, number)


def _names(roles: Sequence[Role]) -> str:
    return ", ".join(role.name for role in roles) or "no role"


class PeerWatch:
    """Watches the other nodes through the attempt's files, at most once a second.

    A node must not run on for hours after a peer's end. Every agent reads the others' exit files; node 0 also
    writes a heartbeat, which shows its loss without an exit file.
    """

    def __init__(self, task: NodeTask, *, is_sidecar: bool) -> None:
        self._task = task
        self._is_sidecar = is_sidecar
        self._looked_at = 0.0
        self._heartbeat_path = task.attempt_path / "alive"
        self._seen: tuple[float | None, float] = (None, time.monotonic())
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._write_heartbeats, name="heartbeat", daemon=True)

    def __enter__(self) -> PeerWatch:
        """Begin to write heartbeats, on node 0."""
        if self._task.node == 0 and self._task.has_shared_disk:
            self._thread.start()
        return self

    def __exit__(self, *details: object) -> None:
        """Stop."""
        self._stopped.set()

    def check(self) -> NodeEnd | None:
        """Return this node's end if another node has ended or a later attempt has begun, else None."""
        if not self._task.has_shared_disk or time.monotonic() - self._looked_at < _LOOK_EVERY_S:
            return None
        self._looked_at = time.monotonic()
        fence = read_fence(self._task.trial_path)
        if fence is not None and fence[0] > self._task.number:
            cause = f"attempt {fence[1]} has begun: this one is cut off from the run and ends"
            return NodeEnd(exit_code=EXIT_FAILED, cause=cause, role="agent")
        return self._find_ended() or self._find_lost()

    def _find_ended(self) -> NodeEnd | None:
        """Return the end that another node's exit causes. After node 0's success only sidecars end."""
        for path in sorted((self._task.attempt_path / "exit").glob("[0-9]*")):
            if not path.name.isdigit() or int(path.name) == self._task.node:
                continue
            code = read_exit_code(path)
            if code is None or (code == EXIT_DONE and not (path.name == "0" and self._is_sidecar)):
                continue
            if self._is_sidecar and path.name == "0":
                return NodeEnd(exit_code=EXIT_DONE, cause="")
            if code == EXIT_INTERRUPTED:
                # That node was stopped, and this one is or will be stopped too.
                continue
            cause = f"node {path.name} ended with {describe_exit(code)}"
            # After a refusal nothing is wrong with this node, and the job may start again on it.
            own = EXIT_INTERRUPTED if code == EXIT_REFUSED else EXIT_FAILED
            return NodeEnd(exit_code=EXIT_DONE if self._is_sidecar else own, cause=cause)
        return None

    def _find_lost(self) -> NodeEnd | None:
        """Return the end that the silence of node 0 causes."""
        if self._task.node == 0:
            return None
        try:
            changed_at = self._heartbeat_path.stat().st_mtime
        except OSError:
            changed_at = None
        last_heartbeat, since = self._seen
        # Changes are timed by this node's clock, because node 0's may be minutes off.
        if changed_at is not None and changed_at != last_heartbeat:
            self._seen = (changed_at, time.monotonic())
            return None
        silent_s = time.monotonic() - since
        if silent_s < (FIRST_HEARTBEAT_LIMIT_S if last_heartbeat is None else MAX_SILENCE_S):
            return None
        cause = f"node 0 has sent no heartbeat for {silent_s:.0f} s"
        return NodeEnd(exit_code=EXIT_FAILED, cause=cause, role="agent")

    def _write_heartbeats(self) -> None:
        while not self._stopped.wait(HEARTBEAT_EVERY_S):
            try:
                self._heartbeat_path.write_text(f"{time.time():.0f}")
            except OSError:
                # A full disk ends the roles anyway; the next heartbeat may succeed.
                continue


class StallWatch:
    """Notices that neither a role's log nor the run's record grows.

    The training loop has a watchdog for its own stages; this one also sees a role that hangs before or
    outside of it. It compares sizes and not times, because clocks of file servers differ.
    """

    def __init__(self, plan: JobPlan, task: NodeTask, roles: list[str]) -> None:
        self._limit_s = plan.max_silence_s
        self._logs = [task.log_path / f"{role}.log" for role in roles]
        self._paths = [*self._logs, task.trial_path / "metrics.jsonl", task.trial_path / "events.jsonl"]
        self._paths.append(task.attempt_path / "train.log")
        self._sizes = self._measure()
        self._moved_at = self._looked_at = time.monotonic()

    def check(self) -> NodeEnd | None:
        """Return the end that a silence beyond the limit causes, with the last line of every log."""
        now = time.monotonic()
        if self._limit_s is None or now - self._looked_at < min(_LOOK_EVERY_S, self._limit_s / 4):
            return None
        self._looked_at = now
        sizes = self._measure()
        if sizes != self._sizes:
            self._sizes, self._moved_at = sizes, now
            return None
        if now - self._moved_at < self._limit_s:
            return None
        last_lines = "; ".join(f"the last line of {path.stem} is {tail(path, 1)!r}" for path in self._logs)
        cause = f"nothing moved for {now - self._moved_at:.0f} s: {last_lines}"
        return NodeEnd(exit_code=EXIT_FAILED, cause=cause, role="agent", is_stall=True)

    def _measure(self) -> list[int]:
        return [path.stat().st_size if path.exists() else 0 for path in self._paths]
