"""What an agent is told: which node of which attempt it is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

TERM_GRACE_S = 25.0
"""After SIGTERM: schedulers kill 30 s later where nothing else is set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeTask:
    """One node of one attempt of one member."""

    job_path: Path
    """`<home>/job`."""
    member_path: Path
    """The run's directory."""
    attempt: str
    """Name of the attempt's folder."""
    number: int
    """From 0: how often the member lived before."""
    node: int
    """From 0, over both parts; node 0 is the first of the main part."""
    num_nodes: int
    part: Literal["main", "cpu"] = "main"
    grace_s: float = 120.0
    """Between the announcement of an end and that end."""
    term_grace_s: float = TERM_GRACE_S
    """Between SIGTERM and the kill that follows it."""
    address: str = "127.0.0.1"
    """Of node 0, as the other nodes reach it."""

    @property
    def attempt_path(self) -> Path:
        """The attempt's folder."""
        return self.member_path / "attempts" / self.attempt

    @property
    def log_path(self) -> Path:
        """The folder of this node's logs."""
        return self.attempt_path / str(self.node)

    @property
    def exit_path(self) -> Path:
        """Where this node's exit code is written last."""
        return self.attempt_path / "exit" / str(self.node)
