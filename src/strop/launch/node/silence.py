"""When nothing moves any more: no line in any role's log, and no progress of the run.

The loop has its own watchdog for its stages; this one also sees a role that hangs before or outside of it.
"""

from __future__ import annotations

import time
from pathlib import Path

from strop.errors import EXIT_FAILED
from strop.launch.contract import JobPlan
from strop.launch.node.roles import NodeEnd
from strop.launch.node.task import NodeTask

_SIGNS = ("metrics.jsonl", "events.jsonl")
_LOOK_EVERY_S = 1.0


class SilenceWatch:
    """Compares sizes, not times: clocks of file servers differ."""

    def __init__(self, plan: JobPlan, task: NodeTask, roles: list[str]) -> None:
        self._limit_s = plan.max_silence_s
        self._logs = [task.log_path / f"{role}.log" for role in roles]
        self._paths = [*self._logs, *(task.member_path / name for name in _SIGNS)]
        self._paths.append(task.attempt_path / "train.log")
        self._sizes = self._measure()
        self._moved_at = self._looked_at = time.monotonic()

    def find_order(self) -> NodeEnd | None:
        """Return the end that a silence beyond the limit orders, with where everything stood."""
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
        cause = f"nothing moved for {now - self._moved_at:.0f} s: {'; '.join(map(_last_line, self._logs))}"
        return NodeEnd(exit_code=EXIT_FAILED, cause=cause, role="agent", is_stall=True)

    def _measure(self) -> list[int]:
        return [path.stat().st_size if path.exists() else 0 for path in self._paths]


def _last_line(path: Path) -> str:
    from strop.hardware import tail

    return f"{path.stem} said last {tail(path, 1)!r}"
