"""An evaluation's files on hosts without a common disk: kept for the next start, sent to the first host.

    <run>/eval/<task>-step-000020/examples-*.parquet    replies, written atomically
    <run>/eval/.shares/<attempt>/<node>                 a node's share is done; sent after all its replies

The platform keeps the first host's files in S3 and copies them to every host at the next start, so that each
requests only missing replies. Files go through the connection of the hosts (`rendezvous`), which jobs without
network have too. Not covered: unfinished work of lm-eval, which has one host.
"""

from __future__ import annotations

import base64
import shutil
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

EVALUATION_FOLDER = "eval"
"""The folder of an evaluation in its job's directory."""
SHARE_MESSAGE = "share"
_MARKS = ".shares"
_LEFT_OUT = (".partial-", ".replies-", "/lock", f"/{_MARKS}/")
_PIECE_BYTES = 256 << 10
"""Bytes of a file in one message; heartbeats are sent between messages."""
_LOOK_EVERY_S = 0.5
Send = Callable[[Mapping[str, Any]], None]


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


class ShareSender(Worker):
    """Sends new files of this host's shares to the first host, which has those of earlier starts."""

    def __init__(self, trial_path: Path, attempt: str, send: Send) -> None:
        self._trial_path, self._folder, self._send = trial_path, trial_path / EVALUATION_FOLDER, send
        self._marks = self._folder / _MARKS / attempt
        self._sent = {path: _version(path) for path in list_evaluation(trial_path)}
        self._last_error = ""
        super().__init__("shares-to-head", self.send_new, _LOOK_EVERY_S)

    def stop(self) -> None:
        """Send the remaining files and end."""
        self._join()
        self.send_new()

    def send_new(self) -> None:
        """Send new files, then the marks that were listed before them."""
        marks = [path for path in sorted(self._marks.glob("*")) if path.name.isdigit()]
        try:
            for path in [*list_evaluation(self._trial_path), *marks]:
                if self._sent.get(path) == (version := _version(path)):
                    continue
                name = (
                    path.relative_to(self._folder).as_posix()
                    if path not in marks
                    else f"{_MARKS}/{path.name}"
                )
                self._send_file(path, name)
                self._sent[path] = version
        except OSError as error:
            # The next call sends it.
            if str(error) != self._last_error:
                self._last_error = str(error)
                sys.stderr.write(f"shares: not sent yet: {error}\n")

    def _send_file(self, path: Path, name: str) -> None:
        data = path.read_bytes()
        starts = range(0, len(data), _PIECE_BYTES) or (0,)
        for start in starts:
            piece = base64.b64encode(data[start : start + _PIECE_BYTES]).decode()
            is_last = start == starts[-1]
            self._send(
                {"kind": SHARE_MESSAGE, "name": name, "start": start, "data": piece, "is_last": is_last}
            )


def take_share(trial_path: Path, attempt: str, node: int, message: Mapping[str, Any]) -> None:
    """Write a piece of a file from another host; the last piece renames the file into place.

    Raises: ValueError for a name outside the evaluation's folder; OSError if the disk fails.
    """
    name = PurePosixPath(str(message["name"]))
    if name.is_absolute() or ".." in name.parts or not name.parts:
        raise ValueError(f"{name} is no file of an evaluation")
    if name.parts[0] == _MARKS:
        # The mark belongs to this attempt, whatever its number there: each host counts its own starts.
        name = PurePosixPath(_MARKS, attempt, name.name)
    target = trial_path / EVALUATION_FOLDER / name
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.partial-host-{node}")
    with partial.open("ab" if message["start"] else "wb") as file:
        file.write(base64.b64decode(message["data"]))
    if message["is_last"]:
        partial.replace(target)


def _version(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_mtime_ns, stat.st_size
