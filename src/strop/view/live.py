"""One run that may still grow, read from any record for the page.

Only the new end of a log is read, a file of rollouts only when it is opened, and for a list only the needed
columns. Missing records are absent. Texts stay as recorded: the page shows them as text.
"""

from __future__ import annotations

import json
import re
import time
import tomllib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any

from strop.errors import ConfigError, CorruptRecord, StoreError
from strop.io import write_bytes_atomically
from strop.record import Event, RunState
from strop.record.events import to_event
from strop.record.files import DirectoryRecord, LineFollower, RecordFiles
from strop.record.prediction import PREDICTION_NAME, Prediction, parse_prediction
from strop.record.run_dir import DISCARDED, STATE_NAME, TOKENIZER_NAME, parse_state
from strop.run.runs import RunPhase, find_phase
from strop.spec.eval_file import is_of_file

if TYPE_CHECKING:
    from tokenizers import Tokenizer as FastTokenizer

    from strop.evaluate import EvalResult
    from strop.record.rollouts import StoredRollout
    from strop.rollout import Turn

METRICS, EVENTS, TIMELINE = "metrics.jsonl", "events.jsonl", "timeline.jsonl"
NOTES, AUDIT = "notes.md", "audit.json"
SEARCH_LIMIT_S = 0.5
"""Limit of one search request; the page continues from the returned step."""
MAX_FOUND = 200
ROLLOUTS = "rollouts"
_STEP = re.compile(rb'\{"step":(\d+)')
TRAINING, EVALUATION = "step", "eval"
"""Source of rollouts: training of a step, or the evaluation after it."""
_STEP_FILES = {
    TRAINING: re.compile(r"rollouts/step-(\d+)\.parquet"),
    EVALUATION: re.compile(r"eval/[^/]+-step-(\d+)/[^/]+\.parquet"),
}
_KEY = re.compile(r"(d|\d+\.|)(\d{1,9})")
MAX_KEPT_FILES = 3


@dataclass(kw_only=True, slots=True, eq=False)
class LiveRun:
    """A run; `key` is its name on the page."""

    key: str
    record: RecordFiles
    metrics: list[dict[str, float]] = field(default_factory=list)
    _lock: RLock = field(default_factory=RLock)
    """A page sends several requests at once, each answered in another thread."""
    _metrics_log: LineFollower = field(init=False)
    _results: dict[tuple[str, str | None], EvalResult] = field(default_factory=dict)
    _files: dict[tuple[str, str | None], bytes] = field(default_factory=dict)
    """The last opened files of rollouts, because pages read one step many times. By name and version, because
    a resumed run rewrites a step."""
    _tokenizer: FastTokenizer | None = None
    _timeline_log: LineFollower = field(init=False)
    _timeline: list[tuple[int, int]] = field(default_factory=list)
    """Step and end offset of each line."""

    def __post_init__(self) -> None:
        self._metrics_log = LineFollower(self.record, METRICS)
        self._timeline_log = LineFollower(self.record, TIMELINE)

    def read_state(self) -> RunState:
        """Read run.json. Raises: StoreError if there is none; CorruptRecord if it is damaged."""
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
        """Bring `metrics` up to date; return the offset behind them in the log."""
        with self._lock:
            is_restarted, lines = self._metrics_log.read_records()
            # A new list each time: other threads may read the old one.
            if lines or is_restarted:
                self.metrics = [*([] if is_restarted else self.metrics), *lines]
            return self._metrics_log.offset

    def list_metrics(self) -> dict[str, Any]:
        """Return all metrics as columns by name, and the offset behind them in the log.

        Seven digits of a number are enough for a chart; None is what a step did not measure.
        """
        with self._lock:
            offset, lines = self.read_metrics(), self.metrics
        names = dict.fromkeys(name for line in lines for name in line)
        columns = {
            name: [None if (value := line.get(name)) is None else float(f"{value:.7g}") for line in lines]
            for name in names
        }
        return {"offset": offset, "columns": columns}

    def read_events(self) -> tuple[list[Event], int]:
        """Return the events of the run, and the offset behind them in the log. Raises: CorruptRecord."""
        log = LineFollower(self.record, EVENTS)
        place = self.record.describe(EVENTS)
        return [to_event(line, place) for line in log.read_records()[1]], log.offset

    def read_results(self) -> list[EvalResult]:
        """Return the run's own evaluations, by step; each is read once.

        If it has none, return those of evaluation files, written by a process beside the run.
        """
        from strop.evaluate.result import parse_result

        names = [name for name in self.record.list("eval") if name.endswith(".json") and name.count("/") == 1]
        names = [name for name in names if not is_of_file(Path(name))] or names
        results = {}
        for name in names:
            mark = name, self.record.version(name)
            result = self._results.get(mark)
            if result is None and (data := self.record.read(name)) is not None:
                result = parse_result(data, self.record.describe(name))
            if result is not None:
                results[mark] = result
        self._results = results
        return sorted(results.values(), key=lambda result: result.step)

    def read_evals(self) -> list[EvalResult]:
        """Return the largest set of evaluations that can be compared with each other, by step."""
        by_protocol: dict[str, list[EvalResult]] = defaultdict(list)
        for result in self.read_results():
            by_protocol[result.protocol_digest].append(result)
        return max(by_protocol.values(), key=len, default=[])

    def read_text(self, name: str) -> str:
        """Return the text of a file; empty if there is none. Raises: StoreError."""
        return (self.record.read(name) or b"").decode(errors="replace")

    def read_spec(self) -> Mapping[str, Any]:
        """Return the run's settings, by section. Raises: StoreError."""
        return tomllib.loads(self.read_text("spec.toml"))

    def read_plan(self) -> Prediction | None:
        """Return the predicted time and memory; None without a plan. Raises: CorruptRecord."""
        data = self.record.read(PREDICTION_NAME)
        return None if data is None else parse_prediction(data, self.record.describe(PREDICTION_NAME))

    def read_audit(self) -> Mapping[str, Any] | None:
        """Return the report of the task's audit; None without one. Raises: CorruptRecord."""
        try:
            audit = json.loads(self.record.read(AUDIT) or b"null")
            if isinstance(audit, dict | None):
                return audit
            problem = "it is no JSON object"
        except ValueError as error:
            problem = str(error)
        raise CorruptRecord(
            f"{self.record.describe(AUDIT)} is damaged ({problem})",
            allowed="the JSON that strop wrote",
            next_step="remove it: `strop audit` makes another one",
        )

    def rollout_steps(self, of: str = TRAINING) -> list[int]:
        """Return the steps with recorded rollouts, or with recorded replies of an evaluation, in order."""
        names = self.record.list("eval" if of == EVALUATION else ROLLOUTS)
        matches = (_STEP_FILES[of].fullmatch(name) for name in names)
        return sorted({int(match[1]) for match in matches if match is not None})

    def find_phase(self) -> str:
        """Return the run's phase: a `RunPhase`, or 'unfinished' if it cannot be seen from here."""
        if self.read_state().finished_at is not None:
            return RunPhase.FINISHED.value
        return find_phase(self.path).value if self.path is not None else "unfinished"

    @property
    def path(self) -> Path | None:
        """The run's directory if it is on this machine, and may be polled many times a second."""
        return self.record.path if isinstance(self.record, DirectoryRecord) else None

    def write_notes(self, text: str) -> None:
        """Replace the notes. Raises: StoreError if the disk fails, or the run is not on this machine."""
        if self.path is None:
            raise StoreError(
                f"{self.record.describe(NOTES)} cannot be written from here",
                allowed="notes of runs whose directory is seen here",
                next_step="write them where the run is; the mirror follows",
            )
        write_bytes_atomically(self.path / NOTES, text.encode())

    def read_marks(self) -> tuple[object, ...]:
        """Return a value that changes with a new evaluation, the run's end, or new notes."""
        return (self.record.read(STATE_NAME), self.record.read(NOTES), *self.record.list("eval"))

    def list_rows(self, step: int, of: str = TRAINING) -> list[dict[str, Any]]:
        """Return the rows of a step, or of its evaluation; `key` is for `read_row`.

        Discarded rollouts come last.
        """
        from strop.record.rollouts import list_rows

        return [
            asdict(row) | {"key": f"{prefix}{row.index}"}
            for prefix, name in self._files_of(step, of).items()
            for row in list_rows(*self._read_file(name))
        ]

    def choose_rows(self, step: int) -> list[dict[str, Any]]:
        """Return rows of the example of a step whose rewards differ most: its best, a middle one, its worst.

        Ties go to the first; unscored rollouts are chosen only if an example has no scored ones.
        """
        groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for row in self.list_rows(step):
            groups[row["example_id"]].append(row)

        def spread(group: Sequence[Mapping[str, Any]]) -> float:
            rewards = [row["reward"] for row in group if row["reward"] is not None]
            return max(rewards) - min(rewards) if rewards else -1.0

        group = max(groups.values(), key=spread, default=[])
        scored = [row for row in group if row["reward"] is not None] or group
        ranked = sorted(scored, key=lambda row: -(row["reward"] or 0.0))
        positions = dict.fromkeys((0, len(ranked) // 2, len(ranked) - 1))
        return [ranked[position] for position in positions] if ranked else []

    def read_row(self, step: int, key: str, of: str = TRAINING) -> StoredRollout:
        """Return a rollout. Raises: ConfigError for a malformed key; StoreError if there is no such row."""
        from strop.record.rollouts import read_row

        match, names = _KEY.fullmatch(key), self._files_of(step, of)
        if match is None or match[1] not in names:
            raise ConfigError(
                f"rollout {key!r} of step {step}",
                allowed="the key of a row of the step's list",
                next_step="choose one of the step's list",
            )
        return read_row(*self._read_file(names[match[1]]), int(match[2]))

    def search(self, text: str, steps: Sequence[int], of: str = TRAINING) -> dict[str, Any]:
        """Search a text in the rollouts of some steps, in their order, for `SEARCH_LIMIT_S`.

        Returns the matches, and the step at which to continue, None at the end.
        """
        from strop.record.rollouts import find_rows, list_rows

        matches: list[dict[str, Any]] = []
        until = time.monotonic() + SEARCH_LIMIT_S
        for step in steps:
            if time.monotonic() >= until or len(matches) >= MAX_FOUND:
                return {"found": matches, "next": step}
            for prefix, name in self._files_of(step, of).items():
                data, place = self._read_file(name)
                hits = set(find_rows(data, place, text))
                rows = list_rows(data, place) if hits else ()
                matches += [
                    {"step": step, "key": f"{prefix}{row.index}", **asdict(row)}
                    for row in rows
                    if row.index in hits
                ]
        return {"found": matches, "next": None}

    def _files_of(self, step: int, of: str) -> dict[str, str]:
        """Return the files of a step's rollouts, by the prefix of their rows' keys."""
        if of == EVALUATION:
            folder = re.compile(rf"eval/[^/]+-step-{step:06d}/[^/]+\.parquet")
            shards = [name for name in self.record.list("eval") if folder.fullmatch(name)]
            return {f"{number}.": name for number, name in enumerate(shards)}
        discarded = f"{DISCARDED}/step-{step:06d}.parquet"
        has_discarded = discarded in self.record.list(DISCARDED)
        return {"": f"{ROLLOUTS}/step-{step:06d}.parquet"} | ({"d": discarded} if has_discarded else {})

    def _read_file(self, name: str) -> tuple[bytes, str]:
        """Return the bytes of a file of rollouts, and its place. Raises: StoreError if there is none."""
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
                kept = [*self._files.items()][-MAX_KEPT_FILES:]
                self._files = {**dict(kept), mark: data}
            return self._files[mark], place

    def read_timeline(self, first: int, last: int) -> list[dict[str, Any]]:
        """Return the timeline's lines of some steps; only these are decoded, because the log may be large."""
        with self._lock:
            new = self._timeline_log.read_new()
            index = [] if new.is_restarted else self._timeline
            end = index[-1][1] if index else 0
            for line in new.lines:
                end += len(line) + 1
                match = _STEP.match(line)
                index.append((int(match[1]) if match else 0, end))
            self._timeline = index
            places = [place for place, (step, _) in enumerate(index) if first <= step <= last]
            if not places:
                return []
            start = index[places[0] - 1][1] if places[0] else 0
            data = self.record.read_from(TIMELINE, start)[: index[places[-1]][1] - start]
        return [json.loads(line) for line in data.split(b"\n")[:-1]]

    def cut_tokens(self, turn: Turn) -> list[str] | None:
        """Return the text of each token of a turn; None if the run's tokenizer is not recorded yet."""
        if self._tokenizer is None:
            data = self.record.read(TOKENIZER_NAME)
            if data is None:
                return None
            from tokenizers import Tokenizer as FastTokenizer

            self._tokenizer = FastTokenizer.from_buffer(data)
        return cut_text(self._tokenizer, turn.token_ids.tolist())


_CONTEXT_TOKENS = 4
"""Earlier tokens that a token's text may depend on: decoders drop spaces at the beginning."""


def cut_text(tokenizer: FastTokenizer, token_ids: Sequence[int]) -> list[str]:
    """Return the text that each token adds.

    A token that ends within a character adds nothing; the token that completes it adds all of it.
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
