"""An evaluation's files where hosts see no common disk: kept for the next start, sent to the first host.

    <run>/eval/<task>-step-000020/examples-*.parquet    replies, whole as they appear
    <run>/eval/*.replies-*/part-<n>_rank0.db, *.done    lm-eval's, once a share has asked all of one kind
    <run>/eval/.shares/<attempt>/<node>                 a node's share is done; sent after all of its replies

What the first host has, the platform keeps in S3 and brings to every host at the next start: each asks only
what is missing. Files cross the hosts' own connection (`rendezvous`), which a job without network has too.
Not covered: what lm-eval was in the middle of.
"""

from __future__ import annotations

import base64
import shutil
import sqlite3
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path, PurePosixPath
from typing import Any

EVALUATION_FOLDER = "eval"
"""Of a job that evaluates, in its own directory."""
SHARE_MESSAGE = "share"
_MARKS = ".shares"
_LEFT_OUT = (".partial-", ".replies-", "/lock", f"/{_MARKS}/")
_PIECE_BYTES = 256 << 10
"""Of a file in one message: signs of life go between two of them."""
_LOOK_EVERY_S = 0.5
Send = Callable[[Mapping[str, Any]], None]


def list_evaluation(trial_path: Path) -> list[Path]:
    """Return an evaluation's results and replies that are whole; lm-eval's cache changes as it grows."""
    found = [path for path in sorted((trial_path / EVALUATION_FOLDER).rglob("*")) if path.is_file()]
    return [path for path in found if not any(part in path.as_posix() for part in _LEFT_OUT)]


def restore_evaluation(evaluation_path: Path, trial_path: Path) -> None:
    """Bring back what an earlier start of an evaluation had written. Raises: OSError if the disk fails."""
    if evaluation_path.is_dir():
        shutil.copytree(evaluation_path, trial_path, dirs_exist_ok=True)


class Worker:
    """Repeats a piece of work in its own thread, at pauses that may double up to a limit."""

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
    """Sends the first host what this one's shares have kept. What is there at its start is there too."""

    def __init__(self, trial_path: Path, attempt: str, send: Send) -> None:
        self._trial_path, self._folder, self._send = trial_path, trial_path / EVALUATION_FOLDER, send
        self._marks = self._folder / _MARKS / attempt
        self._sent = {path: _version(path) for path in list_evaluation(trial_path)}
        self._last_error = ""
        super().__init__("shares-to-head", self.send_new, _LOOK_EVERY_S)

    def stop(self) -> None:
        """Send the rest and end."""
        self._join()
        self.send_new()

    def send_new(self) -> None:
        """Send what is new, and the marks that were there before it."""
        marks = [path for path in sorted(self._marks.glob("*")) if path.name.isdigit()]
        kinds = sorted(self._folder.glob("*.replies-*/*.done"))
        try:
            for path in [*list_evaluation(self._trial_path), *kinds, *marks]:
                if self._sent.get(path) == (version := _version(path)):
                    continue
                if path in kinds:
                    self._send_replies(path)
                name = (
                    path.relative_to(self._folder).as_posix()
                    if path not in marks
                    else f"{_MARKS}/{path.name}"
                )
                self._send_file(path, name)
                self._sent[path] = version
        except (OSError, sqlite3.Error) as error:
            # The next look sends it.
            if str(error) != self._last_error:
                self._last_error = str(error)
                sys.stderr.write(f"shares: not sent yet: {error}\n")

    def _send_replies(self, done: Path) -> None:
        """Send lm-eval's cache as it is now: it may grow meanwhile, so it is copied by SQLite itself."""
        share = done.stem.rpartition("-")[2]
        source = done.with_name(f"part-{share}_rank0.db")
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "copy.db"
            with (
                closing(sqlite3.connect(f"file:{source}?mode=ro", uri=True)) as old,
                closing(sqlite3.connect(copy)) as new,
            ):
                old.backup(new)
            self._send_file(copy, source.relative_to(self._folder).as_posix())

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
    """Write a piece of a file that another host sent; the file appears whole.

    Raises: ValueError for a name outside the evaluation's folder; OSError if the disk fails.
    """
    name = PurePosixPath(str(message["name"]))
    if name.is_absolute() or ".." in name.parts or not name.parts:
        raise ValueError(f"{name} is no file of an evaluation")
    if name.parts[0] == _MARKS:
        # Of this attempt, whatever its number is there: hosts count their own starts.
        name = PurePosixPath(_MARKS, attempt, name.name)
    target = trial_path / EVALUATION_FOLDER / name
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.partial-host-{node}")
    with partial.open("ab" if message["start"] else "wb") as file:
        file.write(base64.b64decode(message["data"]))
    if message["is_last"]:
        partial.replace(target)


def _version(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_mtime_ns, found.st_size
