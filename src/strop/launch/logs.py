"""The logs of a job's nodes and roles, line by line, while they grow and long after.

They are files of the trial's directory, so they stay readable when the scheduler has forgotten the job. The
output of the scheduler or the supervisor itself is the role `scheduler`: it is shown on request, and if there
are no other logs because no agent could begin.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from strop.errors import StoreError
from strop.launch.job_dir import ATTEMPTS_FOLDER, JOB_FOLDER
from strop.record.files import LogLine, LogSource, RecordFiles

_POLL_S = 0.2
_LOG = re.compile(rf"{ATTEMPTS_FOLDER}/(?P<attempt>[^/]+)/(?P<node>\d+)/(?P<role>[^/]+)\.log")
_OF_SCHEDULER = re.compile(rf"{JOB_FOLDER}/(?P<attempt>[^/]+\.out|supervisor\.log)(?P<node>)(?P<role>)")
SCHEDULER = "scheduler"
_LIST_EVERY_S = 0.4
"""Interval of the search for new roles and attempts; known files are read at every poll."""
_ASK_EVERY_S = 1.0
_ASK_SHARE = 10.0
"""Pause between two checks whether the job is over, as a multiple of the last one's duration."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogFilter:
    """Selects logs; None selects all of a kind."""

    attempt: str | None = None
    """The attempt's name; `latest` for the newest one."""
    node: int | None = None
    role: str | None = None

    def takes(self, *, attempt: str, node: str, role: str) -> bool:
        """Whether a line is selected. `latest` selects all: only a list shows the newest attempt."""
        return (
            self.attempt in {None, "latest", attempt, attempt.rpartition("-")[2]}
            and self.node in {None, int(node) if node.isdigit() else -1}
            and self.role in {None, role}
        )


class FilteredLogs:
    """The selected lines of logs that are not files."""

    def __init__(self, source: LogSource, log_filter: LogFilter) -> None:
        self._source = source
        self._filter = log_filter
        self.is_empty = True
        """Whether no line has been selected yet."""

    def read_new(self) -> list[LogLine]:
        """Return the selected lines since the last call. Raises: StoreError."""
        return self._take(self._source.read_new())

    def read_rest(self) -> list[LogLine]:
        """Return all remaining selected lines. Raises: StoreError."""
        rest: list[LogLine] = []
        while lines := self._source.read_new():
            rest += self._take(lines)
        return rest

    def _take(self, lines: list[LogLine]) -> list[LogLine]:
        takes = self._filter.takes
        selected = [line for line in lines if takes(attempt=line.attempt, node=line.node, role=line.role)]
        self.is_empty = self.is_empty and not selected
        return selected


class FileLogs:
    """A `LogSource` over a trial's files."""

    def __init__(self, record: RecordFiles, log_filter: LogFilter) -> None:
        self._record = record
        self._filter = log_filter
        self._offsets: dict[str, int] = {}
        self._partial: dict[str, bytes] = {}
        self._names: list[str] = []
        self._listed_at = float("-inf")

    def read_new(self) -> list[LogLine]:
        """Return the complete lines since the last call, file by file. Raises: StoreError."""
        if time.monotonic() - self._listed_at > _LIST_EVERY_S:
            self._names, self._listed_at = self._list_selected(), time.monotonic()
        return [line for name in self._names for line in self._read_file(name, is_end=False)]

    def read_rest(self) -> list[LogLine]:
        """Return the remaining lines, with unfinished last ones. Raises: StoreError."""
        self._names = self._list_selected()
        return [line for name in self._names for line in self._read_file(name, is_end=True)]

    @property
    def is_empty(self) -> bool:
        """Whether no file has been selected yet."""
        return not self._names

    def _list_selected(self) -> list[str]:
        logs = [
            (match, name) for name in self._record.list(ATTEMPTS_FOLDER) if (match := _LOG.fullmatch(name))
        ]
        if self._filter.attempt == "latest" and logs:
            newest = max((match["attempt"] for match, _ in logs), key=number_of)
            logs = [(match, name) for match, name in logs if match["attempt"] == newest]
        # The logs of an attempt stay together, and the tenth attempt comes after the ninth.
        logs.sort(key=lambda item: (number_of(item[0]["attempt"]), item[1]))
        names = [name for match, name in logs if self._filter.takes(**match.groupdict())]
        if self._filter.role == SCHEDULER or (not names and self._filter == LogFilter()):
            return [name for name in self._record.list(JOB_FOLDER) if _OF_SCHEDULER.fullmatch(name)]
        return names

    def _read_file(self, name: str, *, is_end: bool) -> Iterator[LogLine]:
        data = b""
        while part := self._record.read_from(name, self._offsets.get(name, 0)):
            self._offsets[name] = self._offsets.get(name, 0) + len(part)
            data += part
            if not is_end:
                break
        if not data and not is_end:
            return
        *lines, rest = (self._partial.pop(name, b"") + data).split(b"\n")
        if rest and is_end:
            lines.append(rest)
        elif rest:
            self._partial[name] = rest
        match = _LOG.fullmatch(name) or _OF_SCHEDULER.fullmatch(name)
        assert match is not None
        for line in lines:
            text = line.decode(errors="replace").rstrip("\r")
            yield LogLine(
                text=text,
                attempt=match["attempt"],
                node=match["node"] or "-",
                role=match["role"] or SCHEDULER,
            )


def number_of(attempt: str) -> int:
    """Return the number at the end of an attempt's name, so that 10 comes after 9; -1 without one."""
    number = attempt.rpartition("-")[2]
    return int(number) if number.isdigit() else -1


def follow(source: FileLogs | FilteredLogs, *, is_over: Callable[[], bool]) -> Iterator[LogLine]:
    """Yield lines as they are written, until the job is over and the logs are read to their end."""
    ask_at, over = float("-inf"), False
    while not over:
        yield from source.read_new()
        began = time.monotonic()
        if began >= ask_at:
            # Before the last read, so that lines written until the end are still read.
            over = is_over()
            # A scheduler that is slow to answer is queried less often, so that lines do not wait for it.
            ask_at = time.monotonic() + max(_ASK_EVERY_S, _ASK_SHARE * (time.monotonic() - began))
        if not over:
            time.sleep(_POLL_S)
    yield from source.read_rest()


def require_logs(source: FileLogs | FilteredLogs, record: RecordFiles) -> None:
    """Refuse to show empty logs. Raises: StoreError naming the place."""
    if source.is_empty:
        raise StoreError(
            f"there is no log below {record.describe(ATTEMPTS_FOLDER)}",
            allowed="a job that has begun, and an attempt, node and role that it has",
            next_step="ask `strop status` how it stands, or wait with `strop logs -f`",
        )
