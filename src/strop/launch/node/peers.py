"""The other nodes of an attempt, as their files show them.

A node whose partner has ended must not go on for hours. Every agent looks at the others' exit files; node 0
also gives a sign of life, so that its disappearance without an exit file is noticed too.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

from strop.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED
from strop.launch.attempts import read_exit_code
from strop.launch.exit_codes import describe_exit
from strop.launch.node.roles import NodeEnd
from strop.launch.node.task import NodeTask
from strop.record.fence import read_fence

SIGN_EVERY_S = 5.0
MAX_SILENCE_S = 120.0
"""Shared file systems show a change to other nodes after up to a minute."""
FIRST_SIGN_LIMIT_S = 900.0
"""For code and preflight of node 0, which come before its first sign, and may wait for all nodes."""
_LOOK_EVERY_S = 1.0


class PeerWatch:
    """Looks at the other nodes, at most once a second."""

    def __init__(self, task: NodeTask, *, is_companion: bool) -> None:
        self._task = task
        self._is_companion = is_companion
        self._looked_at = 0.0
        self._sign_path = task.attempt_path / "alive"
        self._seen: tuple[float | None, float] = (None, time.monotonic())
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._give_signs, name="signs-of-life", daemon=True)

    def __enter__(self) -> PeerWatch:
        """Begin to give signs of life, on node 0."""
        if self._task.node == 0:
            self._thread.start()
        return self

    def __exit__(self, *details: object) -> None:
        """Stop."""
        self._stopped.set()

    def find_order(self) -> NodeEnd | None:
        """Return why this node must end because of another one, or because a later attempt has begun."""
        if time.monotonic() - self._looked_at < _LOOK_EVERY_S:
            return None
        self._looked_at = time.monotonic()
        return self._find_overtaken() or self._find_ended() or self._find_lost()

    def _find_overtaken(self) -> NodeEnd | None:
        fence = read_fence(self._task.member_path)
        if fence is None or fence[0] <= self._task.number:
            return None
        cause = f"attempt {fence[1]} has begun: this one is cut off from the run and ends"
        return NodeEnd(exit_code=EXIT_FAILED, cause=cause, role="agent")

    def _find_ended(self) -> NodeEnd | None:
        """Return the end that another node's exit orders. Of node 0's success only companions end."""
        for path in sorted((self._task.attempt_path / "exit").glob("[0-9]*")):
            if not path.name.isdigit() or int(path.name) == self._task.node:
                continue
            code = read_exit_code(path)
            if code is None or (code == EXIT_DONE and not (path.name == "0" and self._is_companion)):
                continue
            if self._is_companion and path.name == "0":
                return NodeEnd(exit_code=EXIT_DONE, cause="")
            if code == EXIT_INTERRUPTED:
                # It was told to end, and so was this one, or will be.
                continue
            cause = f"node {path.name} ended with {describe_exit(code)}"
            return NodeEnd(exit_code=EXIT_DONE if self._is_companion else EXIT_FAILED, cause=cause)
        return None

    def _find_lost(self) -> NodeEnd | None:
        """Return the end that the silence of node 0 orders."""
        if self._task.node == 0:
            return None
        changed_at = _changed_at(self._sign_path)
        seen, since = self._seen
        # Not against our clock: the other one's may be minutes off.
        if changed_at is not None and changed_at != seen:
            self._seen = (changed_at, time.monotonic())
            return None
        silent_s = time.monotonic() - since
        if silent_s < (FIRST_SIGN_LIMIT_S if seen is None else MAX_SILENCE_S):
            return None
        cause = f"node 0 has given no sign of life for {silent_s:.0f} s"
        return NodeEnd(exit_code=EXIT_FAILED, cause=cause, role="agent")

    def _give_signs(self) -> None:
        while not self._stopped.wait(SIGN_EVERY_S):
            try:
                self._sign_path.write_text(f"{time.time():.0f}")
            except OSError:
                # A full disk ends the roles by itself; the next sign may succeed.
                continue


def _changed_at(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None
