"""What a run writes beside its checkpoints, sent as it grows.

Rollouts go before the metrics that mention them, so whoever reads the mirror finds the rollouts of every
step that has a line. Files that grow are sent up to their last line end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from strop.io.leftovers import LEFTOVER_PATTERN
from strop.record.mirror.layout import MIRROR_FOLDER, TRACES
from strop.record.mirror.pins import pin_file
from strop.record.run_dir import STATE_NAME
from strop.store.record_store import RecordStore
from strop.store.uris import join_uri

LOGS = ("events.jsonl", "metrics.jsonl")
"""Sent last, in this order."""
_SINGLE = ("spec.toml", "env.txt", STATE_NAME, "report.html")
_GROWING = frozenset({".jsonl", ".log", ".out", ".txt"})
FEW_FILES = 100
SMALL_BYTES = 8 << 20
"""Read into memory and sent at once; larger ones are held by a link."""
GROWTH_FRAC = 0.05
"""A large log is sent again when it has grown by so much: all that is ever sent of it is then no more than
some twenty times its size."""
EAGER_BYTES = 1 << 20
"""A file below this size is sent at every change."""

Signature = tuple[int, int]
"""Size and modification time in nanoseconds."""


class TraceSender:
    """Sends what has changed since the last pass."""

    def __init__(self, run_path: Path, store: RecordStore, uri: str) -> None:
        self._run_path = run_path
        self._store = store
        self._uri = join_uri(uri, TRACES)
        self._sent: dict[str, Signature] = {}
        self._has_compared = False
        """Whether it knows what earlier uploaders sent."""

    @property
    def has_much_to_compare(self) -> bool:
        """Whether it has to ask for more than a few files first, which takes a request for each."""
        return not self._has_compared and len(list(self._list_names())) > FEW_FILES

    def send(self, *, is_whole: bool, should_yield: Callable[[], bool]) -> bool:
        """Send what is new. `is_whole`: however little it has grown.

        Returns False where it made room for something more urgent: the next call goes on.
        Raises: StoreErrors; OSError if a file cannot be read.
        """
        # Taken before the rollouts are listed, and sent after them.
        logs = {name: data for name in LOGS if (data := self._read_log(name, is_whole)) is not None}
        names = [name for name in self._list_names() if self._is_due(name, is_whole=is_whole)]
        for missing in self._drop_known(names):
            self._send(missing)
            if should_yield():
                return False
        for log, (content, signature) in logs.items():
            self._store.write(join_uri(self._uri, log), content)
            self._sent[log] = signature
        return True

    def _list_names(self) -> Iterator[str]:
        for folder, pattern in (("rollouts", "*.parquet"), ("eval", "*.json"), ("attempts", "**/*")):
            for path in sorted((self._run_path / folder).glob(pattern)):
                if path.is_file() and not path.is_symlink() and LEFTOVER_PATTERN.search(path.name) is None:
                    yield path.relative_to(self._run_path).as_posix()
        yield from (name for name in _SINGLE if (self._run_path / name).is_file())

    def _drop_known(self, names: list[str]) -> list[str]:
        """Leave out what an earlier uploader sent: asked of the store once, by digests."""
        if self._has_compared:
            return names
        fixed = {name: self._run_path / name for name in names if Path(name).suffix not in _GROWING}
        missing = set(self._store.plan_put(fixed, self._uri).moved)
        for name in fixed.keys() - missing:
            self._sent[name] = sign(self._run_path / name)
        self._has_compared = True
        return [name for name in names if name not in fixed or name in missing]

    def _is_due(self, name: str, *, is_whole: bool) -> bool:
        try:
            size_bytes, changed_ns = sign(self._run_path / name)
        except FileNotFoundError:
            return False
        before = self._sent.get(name)
        if before is None or is_whole or Path(name).suffix not in _GROWING:
            return before != (size_bytes, changed_ns)
        is_shorter = size_bytes < before[0]
        return is_shorter or size_bytes - before[0] > (
            0 if size_bytes < EAGER_BYTES else GROWTH_FRAC * before[0]
        )

    def _read_log(self, name: str, is_whole: bool) -> tuple[bytes, Signature] | None:
        path = self._run_path / name
        if not path.is_file() or not self._is_due(name, is_whole=is_whole):
            return None
        signature = sign(path)
        return cut_at_line_end(path.read_bytes()), signature

    def _send(self, name: str) -> None:
        path, place = self._run_path / name, join_uri(self._uri, name)
        try:
            signature = sign(path)
            is_growing = path.suffix in _GROWING
            if signature[0] <= SMALL_BYTES or is_growing:
                data = path.read_bytes()
                self._store.write(place, cut_at_line_end(data) if is_growing else data)
            else:
                self._store.put_file(pin_file(self._run_path, path), place)
        except FileNotFoundError:
            return  # A resumed run removes what it writes anew.
        self._sent[name] = signature


def sign(path: Path) -> Signature:
    """Return what tells whether a file has changed."""
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def cut_at_line_end(data: bytes) -> bytes:
    """Leave out a line that is still being written."""
    return data[: data.rfind(b"\n") + 1]


def remove_pins(run_path: Path) -> None:
    """Let go of single files that a killed uploader held."""
    for path in (run_path / MIRROR_FOLDER).glob("one*"):
        path.unlink(missing_ok=True)


def yield_after(limit_s: float, is_urgent: Callable[[], bool]) -> Callable[[], bool]:
    """Return a question that is answered with yes when something is urgent and a turn was long enough."""
    began_at = time.monotonic()
    return lambda: time.monotonic() - began_at > limit_s and is_urgent()
