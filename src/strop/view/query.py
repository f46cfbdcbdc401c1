"""Read-only SQL over the records of runs, by DuckDB: one SELECT over views of the runs' files.

DuckDB may read the files that the views need, and nothing else: no other file, no address, no extension; and
a question cannot change these settings. Texts of answers are as recorded; their printer makes them harmless.

Importing this module imports DuckDB (`pip install strop[query]`) and pyarrow.
"""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, NoReturn

import duckdb
import pyarrow.parquet as pq

from strop.errors import ConfigError, CorruptRecord
from strop.record.files import LineFollower, RecordFiles
from strop.record.rollouts import SCHEMA
from strop.record.run_dir import DISCARDED, STATE_NAME
from strop.spec.display import dotted, walk_values
from strop.view.terminal import make_harmless

Records = Mapping[str, RecordFiles]
"""The record of each run, by its name in the column `run`."""
_SETTINGS: Mapping[str, str] = {
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "allow_community_extensions": "false",
    "python_enable_replacements": "false",
    "temp_directory": "",
}
_FETCHED_ROWS = 1000
_GLOB = re.compile(r"[*?\[]")
"""Characters that DuckDB takes for a pattern in a path."""
_PLACE = re.compile(r"step-\d+[\w./-]*\.parquet|\w+\.jsonl|\S+-step-\d+\S*\.json")
_NOTHING = "SELECT NULL::VARCHAR AS run, NULL::BIGINT AS step WHERE false"
_ROLLOUTS = """
    regexp_extract(filename, 'step-([0-9]+)[^/]*(/[^/]+)?$', 1)::BIGINT AS step,
    * EXCLUDE (step, filename), turns[1].text AS prompt, step AS asked_step
    FROM read_parquet($files, union_by_name = true, filename = true)
"""
TABLES: Mapping[str, tuple[str, str]] = {
    "runs": (
        re.escape(STATE_NAME),
        """* FROM read_json($files, format = 'newline_delimited', columns = {
            step: 'BIGINT', name: 'VARCHAR', created_at: 'DOUBLE', finished_at: 'DOUBLE',
            num_attempts: 'BIGINT', seed: 'BIGINT', settings: 'MAP(VARCHAR, VARCHAR)', facts: 'JSON'})""",
    ),
    "metrics": (
        r"metrics\.jsonl",
        "step, * EXCLUDE (step) FROM read_json($files, format = 'newline_delimited', sample_size = -1)",
    ),
    "rollouts": (r"rollouts/step-\d+\.parquet", _ROLLOUTS),
    "discarded": (rf"{DISCARDED}/step-\d+\.parquet", _ROLLOUTS),
    "replies": (r"eval/[^/]+-step-\d+/[^/]+\.parquet", _ROLLOUTS),
    "evals": (
        r"eval/[^/]+\.json",
        """step, task, split, one.replies AS replies, each.key AS example_id,
            each.value->>'problem' AS problem, (each.value->>'num_judged')::BIGINT AS num_judged,
            (each.value->>'solved_frac')::DOUBLE AS solved_frac,
            (each.value->>'format_ok_frac')::DOUBLE AS format_ok_frac,
            (each.value->>'reward_mean')::DOUBLE AS reward_mean, (each.value->>'value')::DOUBLE AS value,
            protocol_digest AS protocol, validity
        FROM (SELECT *, unnest([
                {'replies': 'greedy', 'rows': greedy->'by_example'},
                {'replies': 'sampled', 'rows': sampled->'by_example'},
                {'replies': 'lm-eval', 'rows': metrics}]) AS one
            FROM read_json($files, maximum_object_size = 1073741824, columns = {
                step: 'BIGINT', task: 'VARCHAR', split: 'VARCHAR', protocol_digest: 'VARCHAR',
                validity: 'VARCHAR', greedy: 'JSON', sampled: 'JSON', metrics: 'JSON'})),
            json_each(one.rows) AS each""",
    ),
    "events": (
        r"events\.jsonl",
        """* FROM read_json($files, format = 'newline_delimited', columns = {
            step: 'BIGINT', kind: 'VARCHAR', cause: 'VARCHAR', detail: 'VARCHAR', trace: 'VARCHAR',
            example_ids: 'VARCHAR[]', num_examples: 'BIGINT', occurrence: 'BIGINT', "at": 'DOUBLE'})""",
    ),
    "timeline": (
        r"timeline\.jsonl",
        """step, span.lane AS lane, span.name AS name, span.start AS started_at, span."end" AS ended_at,
            ended_at - started_at AS seconds, span.detail AS detail
        FROM (SELECT step, unnest(spans) AS span
            FROM read_json($files, format = 'newline_delimited', columns = {
                step: 'BIGINT',
                spans: 'STRUCT(lane VARCHAR, name VARCHAR, start DOUBLE, "end" DOUBLE, detail JSON)[]'}))""",
    ),
}
"""Each table: a pattern of the names of its files in a run, and what its view selects from `$files`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """One column of a table."""

    table: str
    name: str
    kind: str
    """DuckDB's type, for example 'DOUBLE'."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Rows in columns. Names are unique: the second `a` is `a_1`."""

    columns: tuple[str, ...]
    rows: Iterator[tuple[Any, ...]]
    """Read lazily; iteration raises like `RunsDatabase.ask`."""


class RunsDatabase:
    """Views over the files of some runs, for one question or one listing inside a `with` block."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._folder = tempfile.TemporaryDirectory(prefix="strop-query-")
        self._connection = duckdb.connect(":memory:", config=dict(_SETTINGS))

    def __enter__(self) -> RunsDatabase:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._folder.cleanup()

    def ask(self, sql: str) -> Answer:
        """Answer one SELECT.

        Raises: ConfigError with DuckDB's message if the question is no SELECT, is wrong, or reads something
            else; StoreError or CorruptRecord if a record cannot be read.
        """
        try:
            statements = self._connection.extract_statements(sql)
        except (duckdb.Error, ValueError) as error:
            self._refuse(error)
        if [statement.type for statement in statements] != [duckdb.StatementType.SELECT]:
            raise ConfigError(
                f"{sql.strip()[:80]!r} is not one SELECT",
                allowed="one question that begins with SELECT, FROM, WITH, DESCRIBE or SUMMARIZE; records are"
                " read, never changed",
                next_step="ask one question at a time",
            )
        # By the question's text: a table that occurs only in a literal costs time, nothing else.
        self._open([name for name in TABLES if re.search(rf"\b{name}\b", sql, re.IGNORECASE)])
        try:
            result = self._connection.execute(statements[0])
        except duckdb.Error as error:
            self._refuse(error)
        names = [column[0] for column in result.description or ()]
        return Answer(columns=_make_unique(names), rows=self._fetch(result))

    def list_columns(self) -> list[Column]:
        """Return the columns of all tables. Raises: StoreError or CorruptRecord if one cannot be read."""
        self._open(list(TABLES))
        rows = self._connection.execute(
            "SELECT table_name, column_name, data_type FROM duckdb_columns() WHERE NOT internal"
            " ORDER BY column_index"
        ).fetchall()
        order = list(TABLES)
        return [
            Column(table=table, name=name, kind=kind)
            for table, name, kind in sorted(rows, key=lambda row: order.index(row[0]))
        ]

    def _open(self, names: list[str]) -> None:
        """Make views, and close DuckDB to everything but their files."""
        selects: dict[str, list[str]] = {name: [_NOTHING] for name in names}
        allowed = []
        for name in names:
            for run, paths in {"": self._find_none(name), **self._find_files(name)}.items():
                if paths:
                    columns = TABLES[name][1].replace("$files", _literal(paths))
                    selects[name].append(f"SELECT {_literal(run)} AS run, {columns}")
                    allowed += paths
        self._connection.execute(f"SET allowed_paths = {_literal(allowed)}")
        self._connection.execute("SET enable_external_access = false")
        self._connection.execute("SET lock_configuration = true")
        for name in names:
            try:
                union = " UNION ALL BY NAME ".join(selects[name])
                self._connection.execute(f"CREATE VIEW {name} AS {union}")
            except duckdb.Error as error:
                self._refuse(error)

    def _find_none(self, name: str) -> list[str]:
        """Return a file without a row, which gives a table its columns where no run has a file."""
        path = Path(self._folder.name, f"step-0.{name}")
        if TABLES[name][1] is _ROLLOUTS:
            pq.write_table(SCHEMA.empty_table(), path)
        elif name != "metrics":
            path.touch()
        return [str(path)] if path.exists() else []

    def _find_files(self, name: str) -> dict[str, list[str]]:
        """Return the files of a table, by run.

        A run's directory keeps its own, but a log's complete lines are copied; a store's are fetched.
        """
        pattern = TABLES[name][0]
        found: dict[str, list[str]] = {}
        folder = pattern.partition("/")[0] if "/" in pattern else None
        for number, (run, record) in enumerate(self._records.items()):
            files = [pattern.replace("\\", "")] if folder is None else record.list(folder)
            paths = found[run] = []
            for file in files:
                path = _path_inside(record, file)
                if re.fullmatch(pattern, file) is None or path is None:
                    continue
                if folder is not None and "://" not in path and not _GLOB.search(path):
                    paths.append(path)
                    continue
                data = _describe_run(record) if name == "runs" else record.read(file) or b""
                data = data[: data.rfind(b"\n") + 1] if folder is None else data
                if data:
                    paths.append(self._copy(f"{number}/{file}", data))
        return found

    def _copy(self, name: str, data: bytes) -> str:
        path = Path(self._folder.name, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return str(path)

    def _fetch(self, result: duckdb.DuckDBPyConnection) -> Iterator[tuple[Any, ...]]:
        while True:
            try:
                rows = result.fetchmany(_FETCHED_ROWS)
            except duckdb.Error as error:
                self._refuse(error)
            if not rows:
                return
            yield from rows

    def _refuse(self, error: Exception) -> NoReturn:
        """Translate an error of DuckDB into one of strop, and raise it."""
        # The message may quote model text.
        message = make_harmless(str(error).strip())
        if isinstance(error, duckdb.PermissionException):
            raise ConfigError(
                f"the question reaches for more than the record ({message.splitlines()[0]})",
                allowed=f"the tables {', '.join(TABLES)}",
                next_step="ask these alone",
            ) from error
        if isinstance(error, duckdb.IOException) or _PLACE.search(message):
            raise CorruptRecord(
                f"a file of the record cannot be read ({message})",
                allowed="the files that strop wrote",
                next_step="ask again if a run was just resumed; else remove the file, or ask the other runs",
            ) from error
        raise ConfigError(
            f"the question has no answer ({message})",
            allowed=f"the tables {', '.join(TABLES)}; `strop query` lists their columns",
            next_step="mend the question",
        ) from error


def _describe_run(record: RecordFiles) -> bytes:
    """Return a run's row of the table `runs`. Raises: CorruptRecord."""
    try:
        state = json.loads(record.read(STATE_NAME) or b"")
        spec = tomllib.loads((record.read("spec.toml") or b"").decode())
        settings = {dotted(key): value for key, value in walk_values(spec)}
        lines = LineFollower(record, "metrics.jsonl").read_new().lines
        row = {name: state[name] for name in ("name", "created_at", "finished_at", "num_attempts", "facts")}
        row["step"] = max((json.loads(line)["step"] for line in lines[-1:]), default=0)
        row["seed"] = settings.get("seed", 0)
        row["settings"] = {
            key: value if isinstance(value, str) else json.dumps(value) for key, value in settings.items()
        }
    except (ValueError, TypeError, KeyError) as error:
        raise CorruptRecord(
            f"{record.describe(STATE_NAME)} holds what is no record ({error})",
            allowed="the files that strop wrote",
            next_step="mend or move it, or ask the other runs alone",
        ) from error
    return json.dumps(row).encode() + b"\n"


def _path_inside(record: RecordFiles, name: str) -> str | None:
    """Return the path or URI of a run's file; None if it is a link, which may lead elsewhere."""
    if "://" in (place := record.describe(name)):
        return place
    path = os.path.join(os.path.realpath(record.describe("")), name)
    return path if os.path.realpath(path) == path else None


def _literal(value: str | list[str]) -> str:
    """Write a text, or a list of them, in SQL."""
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    return "'" + value.replace("'", "''") + "'"


def _make_unique(names: list[str]) -> tuple[str, ...]:
    seen: dict[str, int] = {}
    unique = []
    for name in names:
        number = seen.get(name, 0)
        seen[name] = number + 1
        unique.append(f"{name}_{number}" if number else name)
    return tuple(unique)


def to_json(value: Any) -> Any:
    """Convert a value of an answer to JSON: NaN and infinities become null, other types their text."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float | Decimal):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): to_json(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return list(map(to_json, value))
    return str(value)


def shorten(value: Any, num_characters: int) -> Any:
    """Shorten a value for a table: long texts and lists are cut, with a note of their length."""
    if isinstance(value, list) and len(value) > num_characters // 8:
        return f"{str(value[: num_characters // 8])[:-1]}, ... {len(value)} values]"
    if value is None or isinstance(value, bool | int | float):
        return value
    text = str(value)
    if len(text) <= num_characters:
        return text
    return f"{text[:num_characters]} ... {len(text)} characters"
