"""The logs of a job's nodes and roles as lines, while they grow and long after.

They are files of the member's directory, so that they can be read when the scheduler has forgotten the job.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from strop.errors import StoreError, explain_refusal
from strop.launch.jobs.contract import LogLine, RecordFiles
from strop.launch.jobs.home import ATTEMPTS_FOLDER

POLL_S = 0.2
_LOG = re.compile(rf"{ATTEMPTS_FOLDER}/(?P<attempt>[^/]+)/(?P<node>\d+)/(?P<role>[^/]+)\.log")
_LIST_EVERY_S = 1.0
"""New roles and attempts are looked for this often; lines of known files at every poll."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogFilter:
    """Which logs are wanted; None of a kind: all of them."""

    attempt: str | None = None
    """By name; `latest` for the newest one."""
    node: int | None = None
    role: str | None = None


class FileLogs:
    """A `LogSource` over a member's files."""

    def __init__(self, record: RecordFiles, wanted: LogFilter) -> None:
        self._record = record
        self._wanted = wanted
        self._offsets: dict[str, int] = {}
        self._partial: dict[str, bytes] = {}
        self._names: list[str] = []
        self._listed_at = float("-inf")

    def read_new(self) -> list[LogLine]:
        """Return the complete lines since the last call, file by file. Raises: StoreError."""
        if time.monotonic() - self._listed_at > _LIST_EVERY_S:
            self._names, self._listed_at = self._list_wanted(), time.monotonic()
        return [line for name in self._names for line in self._read_file(name, is_end=False)]

    def read_rest(self) -> list[LogLine]:
        """Return what is left, unfinished last lines too. Raises: StoreError."""
        self._names = self._list_wanted()
        return [line for name in self._names for line in self._read_file(name, is_end=True)]

    @property
    def num_files(self) -> int:
        """How many files were found."""
        return len(self._names)

    def _list_wanted(self) -> list[str]:
        found = [
            (match, name) for name in self._record.list(ATTEMPTS_FOLDER) if (match := _LOG.fullmatch(name))
        ]
        if self._wanted.attempt == "latest" and found:
            newest = max((match["attempt"] for match, _ in found), key=_number_of)
            found = [(match, name) for match, name in found if match["attempt"] == newest]
        return [name for match, name in found if self._is_wanted(match)]

    def _is_wanted(self, match: re.Match[str]) -> bool:
        wanted = self._wanted
        return (
            wanted.attempt in {None, "latest", match["attempt"], match["attempt"].rpartition("-")[2]}
            and wanted.node in {None, int(match["node"])}
            and wanted.role in {None, match["role"]}
        )

    def _read_file(self, name: str, *, is_end: bool) -> Iterator[LogLine]:
        data = self._record.read_from(name, self._offsets.get(name, 0))
        if not data and not is_end:
            return
        self._offsets[name] = self._offsets.get(name, 0) + len(data)
        *lines, rest = (self._partial.pop(name, b"") + data).split(b"\n")
        if rest and is_end:
            lines.append(rest)
        elif rest:
            self._partial[name] = rest
        match = _LOG.fullmatch(name)
        assert match is not None
        for line in lines:
            text = line.decode(errors="replace").rstrip("\r")
            yield LogLine(text=text, attempt=match["attempt"], node=match["node"], role=match["role"])


def _number_of(attempt: str) -> int:
    """Return the number that an attempt's name ends in: 10 comes after 9."""
    number = attempt.rpartition("-")[2]
    return int(number) if number.isdigit() else -1


def follow(source: FileLogs, *, is_over: Callable[[], bool], poll_s: float = POLL_S) -> Iterator[LogLine]:
    """Yield lines as they are written, until the job is over and everything is said."""
    asked_at, over = float("-inf"), False
    while not over:
        yield from source.read_new()
        if time.monotonic() - asked_at > max(1.0, poll_s):
            # Before the last read: what was written until the end is still read.
            over, asked_at = is_over(), time.monotonic()
        if not over:
            time.sleep(poll_s)
    yield from source.read_rest()


def require_logs(source: FileLogs, record: RecordFiles) -> None:
    """Refuse where there is nothing to show. Raises: StoreError naming the place that was looked at."""
    if source.num_files == 0:
        raise StoreError(
            explain_refusal(
                f"there is no log below {record.describe(ATTEMPTS_FOLDER)}",
                allowed="a job that has begun, and an attempt, node and role that it has",
                next_step="ask `strop status` how it stands, or wait with `strop logs -f`",
            )
        )
