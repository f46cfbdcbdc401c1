"""An evaluation's files on its host: the platform keeps them in S3 and copies them back at the next start.

    <run>/eval/<task>-step-000020/examples-*.parquet    replies, written atomically

So only missing replies are requested again. Not covered: unfinished work of lm-eval.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

EVALUATION_FOLDER = "eval"
"""The folder of an evaluation in its job's directory."""
_LEFT_OUT = (".partial-", ".replies-", "/lock", "/.shares/")


def list_evaluation(trial_path: Path) -> list[Path]:
    """Return an evaluation's complete results and replies, without lm-eval's growing cache."""
    files = [path for path in sorted((trial_path / EVALUATION_FOLDER).rglob("*")) if path.is_file()]
    return [path for path in files if not any(part in path.as_posix() for part in _LEFT_OUT)]


def restore_evaluation(evaluation_path: Path, trial_path: Path) -> None:
    """Restore the files of an evaluation's earlier start. Raises: OSError if the disk fails."""
    if evaluation_path.is_dir():
        shutil.copytree(evaluation_path, trial_path, dirs_exist_ok=True)


class Worker:
    """Repeats work in its own thread, with pauses that double up to a limit."""

    def __init__(
        self, name: str, work: Callable[[], None], pause_s: float, max_pause_s: float | None = None
    ) -> None:
        self._work, self._pause_s, self._max_pause_s = work, pause_s, max_pause_s or pause_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def _join(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def _repeat(self) -> None:
        pause_s = self._pause_s
        while not self._stopped.wait(pause_s):
            self._work()
            pause_s = min(self._max_pause_s, pause_s * 2)
