"""What ends a node's roles from outside: another node's end or loss, a later attempt, a stall."""

from __future__ import annotations

import threading
import time

from strop.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED
from strop.hardware import tail
from strop.launch.attempts import describe_exit, read_exit_code
from strop.launch.contract import JobPlan
from strop.launch.node.environment import NodeTask
from strop.launch.node.roles import NodeEnd
from strop.record.fence import read_fence

HEARTBEAT_EVERY_S = 5.0
MAX_SILENCE_S = 120.0
"""Shared file systems show a change to other nodes after up to a minute."""
FIRST_HEARTBEAT_LIMIT_S = 900.0
"""For code and preflight of node 0, which come before its first heartbeat, and may wait for all nodes."""
_LOOK_EVERY_S = 1.0


class PeerWatch:
    """Watches the other nodes through the attempt's files, at most once a second.

    A node whose peer has ended must not run on for hours. Every agent reads the others' exit files; node 0
    also writes a heartbeat, so that its loss without an exit file is noticed too.
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
        if self._task.node == 0:
            self._thread.start()
        return self

    def __exit__(self, *details: object) -> None:
        """Stop."""
        self._stopped.set()

    def check(self) -> NodeEnd | None:
        """Return why this node must end because of another one, or because a later attempt has begun."""
        if time.monotonic() - self._looked_at < _LOOK_EVERY_S:
            return None
        self._looked_at = time.monotonic()
        return self._find_later_attempt() or self._find_ended() or self._find_lost()

    def _find_later_attempt(self) -> NodeEnd | None:
        fence = read_fence(self._task.member_path)
        if fence is None or fence[0] <= self._task.number:
            return None
        cause = f"attempt {fence[1]} has begun: this one is cut off from the run and ends"
        return NodeEnd(exit_code=EXIT_FAILED, cause=cause, role="agent")

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
                # It was told to end, and so was this one, or will be.
                continue
            cause = f"node {path.name} ended with {describe_exit(code)}"
            return NodeEnd(exit_code=EXIT_DONE if self._is_sidecar else EXIT_FAILED, cause=cause)
        return None

    def _find_lost(self) -> NodeEnd | None:
        """Return the end that the silence of node 0 causes."""
        if self._task.node == 0:
            return None
        try:
            changed_at = self._heartbeat_path.stat().st_mtime
        except OSError:
            changed_at = None
        seen, since = self._seen
        # Changes are timed by this node's clock: the other one's may be minutes off.
        if changed_at is not None and changed_at != seen:
            self._seen = (changed_at, time.monotonic())
            return None
        silent_s = time.monotonic() - since
        if silent_s < (FIRST_HEARTBEAT_LIMIT_S if seen is None else MAX_SILENCE_S):
            return None
        cause = f"node 0 has given no sign of life for {silent_s:.0f} s"
        return NodeEnd(exit_code=EXIT_FAILED, cause=cause, role="agent")

    def _write_heartbeats(self) -> None:
        while not self._stopped.wait(HEARTBEAT_EVERY_S):
            try:
                self._heartbeat_path.write_text(f"{time.time():.0f}")
            except OSError:
                # A full disk ends the roles by itself; the next heartbeat may succeed.
                continue


class StallWatch:
    """Notices that neither a role's log nor the run's record grows any more.

    The training loop has a watchdog for its own stages; this one also sees a role that hangs before or
    outside of it. It compares sizes, not times: clocks of file servers differ.
    """

    def __init__(self, plan: JobPlan, task: NodeTask, roles: list[str]) -> None:
        self._limit_s = plan.max_silence_s
        self._logs = [task.log_path / f"{role}.log" for role in roles]
        self._paths = [*self._logs, task.member_path / "metrics.jsonl", task.member_path / "events.jsonl"]
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
        last_lines = "; ".join(f"{path.stem} said last {tail(path, 1)!r}" for path in self._logs)
        cause = f"nothing moved for {now - self._moved_at:.0f} s: {last_lines}"
        return NodeEnd(exit_code=EXIT_FAILED, cause=cause, role="agent", is_stall=True)

    def _measure(self) -> list[int]:
        return [path.stat().st_size if path.exists() else 0 for path in self._paths]
