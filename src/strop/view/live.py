"""One run that may still grow, read for the page wherever its record is.

Only the new end of a log is read, a file of rollouts only when it is opened, and for a list only the columns
that it shows. What is not there yet is absent. Texts stay as they were written: the page shows them as text.
"""

from __future__ import annotations

import json
import re
import struct
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any

import numpy as np

from strop.errors import ConfigError, StoreError
from strop.io import write_bytes_atomically
from strop.record import Event, RunState
from strop.record.events import to_event
from strop.record.files import DirectoryRecord, LineFollower, RecordFiles
from strop.record.run_dir import DISCARDED, STATE_NAME, TOKENIZER_NAME, parse_state
from strop.run.runs import RunPhase, find_phase
from strop.spec.eval_file import is_of_file

if TYPE_CHECKING:
    from tokenizers import Tokenizer as FastTokenizer

    from strop.evaluate import EvalResult
    from strop.record.rollouts import StoredRollout
    from strop.rollout import Turn

METRICS, EVENTS, TIMELINE, NOTES = "metrics.jsonl", "events.jsonl", "timeline.jsonl", "notes.md"
SEARCH_LIMIT_S = 0.5
"""After it a search says how far it came, and the page asks on."""
MAX_FOUND = 200
ROLLOUTS = "rollouts"
_STEP = re.compile(rb'\{"step":(\d+)')
TRAINING, EVALUATION = "step", "eval"
"""Source of rollouts: those that a step trained on, or those that the evaluation after it judged."""
_STEP_FILES = {
    TRAINING: re.compile(r"rollouts/step-(\d+)\.parquet"),
    EVALUATION: re.compile(r"eval/[^/]+-step-(\d+)/[^/]+\.parquet"),
}
_KEY = re.compile(r"(d|\d+\.|)(\d{1,9})")
MAX_KEPT_FILES = 3


@dataclass(kw_only=True, slots=True, eq=False)
class LiveRun:
    """A run, by its name on the page."""

    key: str
    record: RecordFiles
    metrics: list[dict[str, float]] = field(default_factory=list)
    _lock: RLock = field(default_factory=RLock)
    """A page asks several things at once, and each is answered by a thread of its own."""
    _metrics_log: LineFollower = field(init=False)
    _results: dict[tuple[str, str | None], EvalResult] = field(default_factory=dict)
    _files: dict[tuple[str, str | None], bytes] = field(default_factory=dict)
    """The rollouts' files that were opened last: pages ask about one step many times. By name and version: a
    resumed run writes a step anew."""
    _tokenizer: FastTokenizer | None = None
    _timeline_log: LineFollower = field(init=False)
    _timeline: list[tuple[int, int]] = field(default_factory=list)
    """Step of each line, and the byte behind it."""

    def __post_init__(self) -> None:
        self._metrics_log = LineFollower(self.record, METRICS)
        self._timeline_log = LineFollower(self.record, TIMELINE)

    def read_state(self) -> RunState:
        """Return what run.json says. Raises: StoreError if there is none; CorruptRecord if it is damaged."""
        place = self.record.describe(STATE_NAME)
        data = self.record.read(STATE_NAME)
        if data is None:
            raise StoreError(
                f"there is no run at {place}",
                allowed="a run's directory, a folder of runs, or a run's mirror in a store",
                next_step="see `strop ls` for the runs that there are",
            )
        return parse_state(data, place)

    def read_metrics(self) -> int:
        """Bring `metrics` up to date; return the bytes that they stand in."""
        with self._lock:
            is_anew, lines = self._metrics_log.read_records()
            # Another list each time: who reads the one of before is not disturbed.
            if lines or is_anew:
                self.metrics = [*([] if is_anew else self.metrics), *lines]
            return self._metrics_log.offset

    def pack_metrics(self) -> bytes:
        """Return all metrics as columns: length of a header, the header as JSON, float32 by name and step.

        The header is padded, so that the numbers begin at a multiple of four bytes. NaN stands for absent.
        """
        with self._lock:
            offset, lines = self.read_metrics(), self.metrics
        names = list(dict.fromkeys(name for line in lines for name in line))
        columns = np.full((len(names), len(lines)), np.nan, dtype="<f4")
        place = {name: index for index, name in enumerate(names)}
        for index, line in enumerate(lines):
            for name, value in line.items():
                columns[place[name], index] = value
        head = json.dumps({"names": names, "num_steps": len(lines), "offset": offset}).encode()
        head += b" " * (-len(head) % 4)
        return struct.pack("<I", len(head)) + head + columns.tobytes()

    def read_events(self) -> tuple[list[Event], int]:
        """Return the events of the run, and the bytes that they stand in. Raises: CorruptRecord."""
        log = LineFollower(self.record, EVENTS)
        place = self.record.describe(EVENTS)
        return [to_event(line, place) for line in log.read_records()[1]], log.offset

    def read_results(self) -> list[EvalResult]:
        """Return the run's own evaluations, by step; each is read once.

        Where it has none, those that a file described, which a process beside the run wrote.
        """
        from strop.evaluate.result import parse_result

        names = [name for name in self.record.list("eval") if name.endswith(".json") and name.count("/") == 1]
        names = [name for name in names if not is_of_file(Path(name))] or names
        found = {}
        for mark in [(name, self.record.version(name)) for name in names]:
            known = self._results.get(mark)
            if known is None and (data := self.record.read(mark[0])) is not None:
                known = parse_result(data, self.record.describe(mark[0]))
            if known is not None:
                found[mark] = known
        self._results = found
        return sorted(found.values(), key=lambda result: result.step)

    def rollout_steps(self, of: str = TRAINING) -> list[int]:
        """Return the steps whose rollouts are recorded, or the replies of their evaluation, in order."""
        names = self.record.list("eval" if of == EVALUATION else ROLLOUTS)
        found = (_STEP_FILES[of].fullmatch(name) for name in names)
        return sorted({int(match[1]) for match in found if match is not None})

    def find_phase(self) -> str:
        """Return where the run stands: a `RunPhase`, or 'unfinished' where nobody can tell from here."""
        if self.read_state().finished_at is not None:
            return RunPhase.FINISHED.value
        return find_phase(self.path).value if self.path is not None else "unfinished"

    @property
    def path(self) -> Path | None:
        """The run's directory, where it is one that is seen here."""
        return self.record.path if isinstance(self.record, DirectoryRecord) else None

    @property
    def is_local(self) -> bool:
        """Whether it may be looked at many times a second."""
        return self.path is not None

    def write_notes(self, text: str) -> None:
        """Replace the notes. Raises: StoreError if the disk fails, or the run is not seen here."""
        if self.path is None:
            raise StoreError(
                f"{self.record.describe(NOTES)} cannot be written from here",
                allowed="notes of runs whose directory is seen here",
                next_step="write them where the run is; the mirror follows",
            )
        write_bytes_atomically(self.path / NOTES, text.encode())

    def read_marks(self) -> tuple[object, ...]:
        """Return what differs once a run has an evaluation more, or ends, or has new notes."""
        return (self.record.read(STATE_NAME), self.record.read(NOTES), *self.record.list("eval"))

    def list_rows(self, step: int, of: str = TRAINING) -> list[dict[str, Any]]:
        """Return the rows of a step, or of its evaluation; `key` is what `read_row` takes.

        Those that no step took come last.
        """
        from strop.record.rows import list_rows

        return [
            asdict(row) | {"key": f"{prefix}{row.index}"}
            for prefix, name in self._files_of(step, of).items()
            for row in list_rows(*self._read_file(name))
        ]

    def read_row(self, step: int, key: str, of: str = TRAINING) -> StoredRollout:
        """Return a rollout. Raises: ConfigError if it is no key; StoreError if there is no such row."""
        from strop.record.rows import read_row

        match, names = _KEY.fullmatch(key), self._files_of(step, of)
        if match is None or match[1] not in names:
            raise ConfigError(
                f"rollout {key!r} of step {step}",
                allowed="the key of a row of the step's list",
                next_step="choose one of the step's list",
            )
        return read_row(*self._read_file(names[match[1]]), int(match[2]))

    def search(self, text: str, steps: Sequence[int], of: str = TRAINING) -> dict[str, Any]:
        """Look for a text in the rollouts of some steps, in their order, for half a second.

        Returns what was found, and the step at which to go on, None at the end.
        """
        from strop.record.rows import find_rows, list_rows

        found: list[dict[str, Any]] = []
        until = time.monotonic() + SEARCH_LIMIT_S
        for step in steps:
            if time.monotonic() >= until or len(found) >= MAX_FOUND:
                return {"found": found, "next": step}
            for prefix, name in self._files_of(step, of).items():
                data, place = self._read_file(name)
                hits = set(find_rows(data, place, text))
                rows = list_rows(data, place) if hits else ()
                found += [
                    {"step": step, "key": f"{prefix}{row.index}", **asdict(row)}
                    for row in rows
                    if row.index in hits
                ]
        return {"found": found, "next": None}

    def _files_of(self, step: int, of: str) -> dict[str, str]:
        """Return the files of a step's rollouts, by what the keys of their rows begin with."""
        if of == EVALUATION:
            folder = re.compile(rf"eval/[^/]+-step-{step:06d}/[^/]+\.parquet")
            shards = [name for name in self.record.list("eval") if folder.fullmatch(name)]
            return {f"{number}.": name for number, name in enumerate(shards)}
        discarded = f"{DISCARDED}/step-{step:06d}.parquet"
        has_discarded = discarded in self.record.list(DISCARDED)
        return {"": f"{ROLLOUTS}/step-{step:06d}.parquet"} | ({"d": discarded} if has_discarded else {})

    def _read_file(self, name: str) -> tuple[bytes, str]:
        """Return the bytes of a rollouts' file, and where it is. Raises: StoreError if there is none."""
        place, mark = self.record.describe(name), (name, self.record.version(name))
        with self._lock:
            if mark not in self._files:
                data = self.record.read(name)
                if data is None:
                    raise StoreError(
                        f"{place} is not there",
                        allowed="a step whose rollouts are recorded",
                        next_step="choose another step; a resumed run writes it again",
                    )
                kept = [*self._files][-MAX_KEPT_FILES:]
                self._files = {one: self._files[one] for one in kept} | {mark: data}
            return self._files[mark], place

    def read_timeline(self, first: int, last: int) -> list[dict[str, Any]]:
        """Return the lines of the timeline of some steps. Only they are decoded: all of it may be large."""
        with self._lock:
            new = self._timeline_log.read_new()
            known = [] if new.is_restarted else self._timeline
            end = known[-1][1] if known else 0
            for line in new.lines:
                end += len(line) + 1
                found = _STEP.match(line)
                known.append((int(found[1]) if found else 0, end))
            self._timeline = known
            wanted = [place for place, (step, _) in enumerate(known) if first <= step <= last]
            if not wanted:
                return []
            start = known[wanted[0] - 1][1] if wanted[0] else 0
            data = self.record.read_from(TIMELINE, start)[: known[wanted[-1]][1] - start]
        return [json.loads(line) for line in data.split(b"\n")[:-1]]

    def cut_tokens(self, turn: Turn) -> list[str] | None:
        """Return what each token of a turn reads as; None where the run's tokenizer is not at hand yet."""
        if self._tokenizer is None:
            data = self.record.read(TOKENIZER_NAME)
            if data is None:
                return None
            from tokenizers import Tokenizer as FastTokenizer

            self._tokenizer = FastTokenizer.from_buffer(data)
        return cut_text(self._tokenizer, turn.token_ids.tolist())


_CONTEXT_TOKENS = 4
"""Tokens before one that its text may depend on: spaces that a decoder drops at a beginning."""


def cut_text(tokenizer: FastTokenizer, token_ids: Sequence[int]) -> list[str]:
    """Return what each token adds to the text.

    A token that ends within a character adds nothing, the one that completes it all of it.
    """
    ids, pieces, done = list(token_ids), [], 0
    for index in range(len(ids)):
        start = max(0, done - _CONTEXT_TOKENS)
        before = tokenizer.decode(ids[start:done], skip_special_tokens=False)
        text = tokenizer.decode(ids[start : index + 1], skip_special_tokens=False)
        if text.endswith("\ufffd") and index + 1 < len(ids) and index - done < _CONTEXT_TOKENS:
            pieces.append("")
            continue
        pieces.append(text[len(before) :])
        done = index + 1
    return pieces
