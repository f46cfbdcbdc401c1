"""The records of runs as tables for `strop query`.

Small ones are Arrow tables, built from the lines and results of all runs. Rollouts stay in their files: an
Arrow data set reads only the columns and steps that a question needs, from a disk or from S3, and unites
formats by column name. Columns that an older file lacks are null.

Importing this module imports pyarrow.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
from pyarrow.fs import FileSystem, LocalFileSystem

from strop.errors import CorruptRecord
from strop.evaluate.harness import HarnessResult
from strop.evaluate.result import EvalResult, parse_result
from strop.record.files import LineFollower, RecordFiles
from strop.record.rollouts import SCHEMA
from strop.record.run_dir import DISCARDED, STATE_NAME
from strop.spec.display import dotted, walk_values
from strop.store.uris import is_remote

Records = Mapping[str, RecordFiles]
"""The record of each run, by its name in the column `run`."""
RUN, STEP = "_run", "_step"
"""Columns of the data set that its view renames: the files have another column `step`."""
_STEP_FILE = re.compile(r"(?:[a-z]+/|eval/[^/]+-)step-(\d+)(?:/[^/]+)?\.parquet")
_RUN_AND_STEP = [("run", pa.string()), ("step", pa.int64())]


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """One table of `strop query`."""

    about: str
    """Meaning of a row."""
    read: Callable[[Records], pa.Table | ds.Dataset]
    """Raises: StoreError if a place does not answer; CorruptRecord if a file is damaged."""
    select: str = "*"
    """The view's columns."""


def read_rollouts(records: Records, folder: str = "rollouts") -> ds.Dataset:
    """Return the rollouts of all steps as a lazy data set."""
    files, parquet = _Files(), ds.ParquetFileFormat()
    fragments = []
    for run, record in records.items():
        for name in record.list(folder):
            match = _STEP_FILE.fullmatch(name)
            if match is None:
                continue
            place, path = files.open(record.describe(name))
            # Known without opening the file, so that a condition on them skips whole files.
            partition = (ds.field(RUN) == run) & (ds.field(STEP) == int(match[1]))
            fragments.append(parquet.make_fragment(path, place, partition_expression=partition))
    schema = SCHEMA.remove_metadata()
    for name, kind in ((RUN, pa.string()), (STEP, pa.int64())):
        schema = schema.append(pa.field(name, kind))
    return ds.FileSystemDataset(fragments, schema, parquet, files.any)


class _Files:
    """The local and the remote file system, each opened once."""

    def __init__(self) -> None:
        self._remote: FileSystem | None = None
        self._local = LocalFileSystem()

    @property
    def any(self) -> FileSystem:
        """The remote file system if a place needed it, else the local one."""
        return self._remote or self._local

    def open(self, place: str) -> tuple[FileSystem, str]:
        """Return the file system of a path or URI, and the path in it."""
        if not is_remote(place):
            return self._local, place
        if self._remote is None:
            from strop.store.s3_client import open_arrow_files

            self._remote = open_arrow_files()
        return self._remote, place.partition("://")[2]


def read_metrics(records: Records) -> pa.Table:
    """Return a row for each step and a column for each metric; null if it was not computed."""
    rows = [{**line, "run": run} for run, line in _read_lines(records, "metrics.jsonl")]
    names = dict.fromkeys(name for row in rows for name in row)
    numbers = [(name, pa.float64()) for name in names if name not in ("run", "step")]
    return _to_table(rows, [*_RUN_AND_STEP, *numbers], "metrics.jsonl")


_EVENT = [
    ("kind", pa.string()),
    ("cause", pa.string()),
    ("detail", pa.string()),
    ("trace", pa.string()),
    ("example_ids", pa.list_(pa.string())),
    ("num_examples", pa.int64()),
    ("occurrence", pa.int64()),
    ("at", pa.float64()),
]


def read_events(records: Records) -> pa.Table:
    """Return a row for each event."""
    rows = [{**line, "run": run} for run, line in _read_lines(records, "events.jsonl")]
    return _to_table(rows, [*_RUN_AND_STEP, *_EVENT], "events.jsonl")


_SPAN = [
    ("lane", pa.string()),
    ("name", pa.string()),
    ("started_at", pa.float64()),
    ("ended_at", pa.float64()),
    ("seconds", pa.float64()),
    ("detail", pa.string()),
]


def read_timeline(records: Records) -> pa.Table:
    """Return a row for each span of a lane."""
    rows = [
        {
            "run": run,
            "step": line["step"],
            "lane": span.get("lane"),
            "name": span.get("name"),
            "started_at": span.get("start"),
            "ended_at": span.get("end"),
            "seconds": span["end"] - span["start"] if "start" in span and "end" in span else None,
            "detail": json.dumps(span.get("detail") or {}),
        }
        for run, line in _read_lines(records, "timeline.jsonl")
        for span in line["spans"]
    ]
    return _to_table(rows, [*_RUN_AND_STEP, *_SPAN], "timeline.jsonl")


_EVALUATED = [
    ("task", pa.string()),
    ("split", pa.string()),
    ("replies", pa.string()),
    ("example_id", pa.string()),
    ("problem", pa.string()),
    ("num_judged", pa.int64()),
    ("solved_frac", pa.float64()),
    ("format_ok_frac", pa.float64()),
    ("in_format_solved_frac", pa.float64()),
    ("reward_mean", pa.float64()),
    ("value", pa.float64()),
    ("protocol", pa.string()),
    ("validity", pa.string()),
]


def read_evals(records: Records) -> pa.Table:
    """Return a row for each evaluated example; for a result of lm-eval, a row for each number."""
    rows: list[dict[str, Any]] = []
    for run, record in records.items():
        for name in record.list("eval"):
            if not name.endswith(".json") or name.count("/") > 1:
                continue
            data, place = record.read(name), record.describe(name)
            if data is None:
                continue  # A resume has removed it meanwhile.
            result = _read_result(data, place)
            rows += [{"run": run, "step": result.step, **row} for row in _list_scores(result)]
    return _to_table(rows, [*_RUN_AND_STEP, *_EVALUATED], "eval/")


def _read_result(data: bytes, place: str) -> EvalResult | HarnessResult:
    try:
        is_harness = "harness" in json.loads(data)
    except (ValueError, TypeError):
        is_harness = False
    if not is_harness:
        return parse_result(data, place)
    try:
        return HarnessResult.read(data)
    except ValueError as error:
        raise _damaged(place, error) from error


def _list_scores(result: EvalResult | HarnessResult) -> Iterator[dict[str, Any]]:
    if isinstance(result, HarnessResult):
        for name, metric in result.metrics.items():
            yield {"task": result.task, "replies": name, "value": metric.value}
        return
    same = {
        "task": result.full_name,
        "split": result.split.value,
        "protocol": result.protocol_digest,
        "validity": result.validity.value,
    }
    for kind, score in result.scores.items():
        for example_id, share in score.by_example.items():
            yield {
                **same,
                "replies": kind,
                "example_id": example_id,
                "problem": share.problem,
                "num_judged": share.num_judged,
                "solved_frac": share.solved_frac,
                "format_ok_frac": share.format_ok_frac,
                "in_format_solved_frac": share.in_format_solved_frac,
                "reward_mean": share.reward_mean,
            }


_RUN = [
    ("name", pa.string()),
    ("place", pa.string()),
    ("created_at", pa.float64()),
    ("finished_at", pa.float64()),
    ("num_attempts", pa.int64()),
    ("seed", pa.int64()),
    ("settings", pa.map_(pa.string(), pa.string())),
    ("facts", pa.string()),
]


def read_runs(records: Records) -> pa.Table:
    """Return a row for each run; `step` is the last recorded one, 0 before the first."""
    last_steps = dict.fromkeys(records, 0)
    for run, line in _read_lines(records, "metrics.jsonl"):
        last_steps[run] = max(last_steps[run], line["step"])
    rows = []
    for run, record in records.items():
        try:
            state = json.loads(record.read(STATE_NAME) or b"")
            spec = tomllib.loads((record.read("spec.toml") or b"").decode())
            settings = {dotted(key): value for key, value in walk_values(spec)}
            texts = {
                key: value if isinstance(value, str) else json.dumps(value) for key, value in settings.items()
            }
            rows.append(
                {
                    "run": run,
                    "step": last_steps[run],
                    "name": state["name"],
                    "place": record.describe("").rstrip("/."),
                    "created_at": state["created_at"],
                    "finished_at": state["finished_at"],
                    "num_attempts": state["num_attempts"],
                    "seed": settings.get("seed", 0),
                    "settings": list(texts.items()),
                    "facts": json.dumps(state["facts"]),
                }
            )
        except (ValueError, TypeError, KeyError) as error:
            raise _damaged(record.describe(STATE_NAME), error) from error
    return _to_table(rows, [*_RUN_AND_STEP, *_RUN], STATE_NAME)


def _read_lines(records: Records, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield run and content of each complete line of a log; an incomplete last line is left out."""
    for run, record in records.items():
        lines = LineFollower(record, name).read_new().lines
        try:
            records_of_run = json.loads(b"[%b]" % b",".join(lines))
            if len(records_of_run) != len(lines):
                raise ValueError("a line holds several values")
            for line in records_of_run:
                if not isinstance(line["step"], int):
                    raise TypeError("a line has no step")
                yield run, line
        except (ValueError, TypeError, KeyError) as error:
            raise _damaged(record.describe(name), error) from error


def _to_table(rows: Sequence[dict[str, Any]], columns: Sequence[tuple[str, Any]], name: str) -> pa.Table:
    try:
        return pa.Table.from_pylist(rows, schema=pa.schema(columns))
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise _damaged(name, error) from error


def _damaged(place: str, error: Exception) -> CorruptRecord:
    return CorruptRecord(
        f"{place} holds what is no record ({error})",
        allowed="the files that strop wrote",
        next_step="mend or move it, or ask the other runs alone",
    )


_ROLLOUT = (
    f"{RUN} AS run, {STEP} AS step, * EXCLUDE ({RUN}, {STEP}, step), turns[1].text AS prompt,"
    " step AS asked_step"
)
TABLES: Mapping[str, Table] = {
    "runs": Table(about="a run; step is its last", read=read_runs),
    "metrics": Table(about="a step, with a column a number", read=read_metrics),
    "rollouts": Table(
        about="a rollout; step is the one that was trained on it, asked_step when it was asked for",
        read=read_rollouts,
        select=_ROLLOUT,
    ),
    "discarded": Table(
        about="a rollout that no step was trained on, as `rollouts`",
        read=partial(read_rollouts, folder=DISCARDED),
        select=_ROLLOUT,
    ),
    "replies": Table(
        about="a rollout that an evaluation after `step` steps kept; greedy ones have temperature 0",
        read=partial(read_rollouts, folder="eval"),
        select=_ROLLOUT,
    ),
    "evals": Table(about="an evaluated example, or a number of lm-eval", read=read_evals),
    "events": Table(about="an event: a gate's check, an alarm, a loss, a checkpoint", read=read_events),
    "timeline": Table(about="what a lane did from when to when", read=read_timeline),
}
