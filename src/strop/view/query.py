"""Read-only SQL over the records of runs, by DuckDB: one SELECT over the runs' files.

DuckDB may read the files that the tables need, and nothing else: no other file, no address, no extension; and
a question cannot change these settings. Texts of answers are as recorded; their printer makes them harmless.

Importing this module imports DuckDB (`pip install strop[query]`) and pyarrow.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.parquet as pq

from strop.errors import ConfigError, CorruptRecord
from strop.record.files import LineFollower, RecordFiles
from strop.record.rollouts import SCHEMA
from strop.record.run_dir import DISCARDED, STATE_NAME
from strop.spec.display import dotted, walk_values
from strop.view.terminal import make_harmless

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
"""Each table: a pattern of the names of its files in a run, and what it selects from `$files`."""


LIST_COLUMNS = (
    'SELECT table_name AS "table", column_name AS name, data_type AS kind FROM duckdb_columns()'
    f" WHERE table_name IN ({', '.join(map(repr, TABLES))}) ORDER BY table_name, column_index"
)
"""The question about the columns of all tables."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Rows in columns. Names are unique: a second `a`, at position 1, is `a_1`."""

    columns: tuple[str, ...]
    rows: Iterator[tuple[Any, ...]]
    """Read lazily; iteration raises like `RunsDatabase.ask`."""


class RunsDatabase:
    """Tables over the files of some runs, for one question inside a `with` block."""

    def __init__(self, records: Mapping[str, RecordFiles]) -> None:
        """`records`: the record of each run, by its name in the column `run`."""
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
            raise _refuse(error) from error
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
            raise _refuse(error) from error
        names = [column[0] for column in result.description or ()]
        columns = (f"{name}_{i}" if name in names[:i] else name for i, name in enumerate(names))
        return Answer(columns=tuple(columns), rows=_fetch(result))

    def _open(self, names: list[str]) -> None:
        """Make the tables, and close DuckDB to everything but the files of those that are views."""
        allowed: list[str] = []
        for name in names:
            pattern, columns = TABLES[name]
            files = {"": self._find_none(name), **self._find_files(pattern)}
            selects = ["SELECT NULL::VARCHAR AS run, NULL::BIGINT AS step WHERE false"]
            selects += [
                f"SELECT {_literal(run)} AS run, {columns.replace('$files', _literal(paths))}"
                for run, paths in files.items()
                if paths
            ]
            # Rollouts may be many gigabytes; all else is read here, so that what is damaged is found here.
            kind = "VIEW" if columns is _ROLLOUTS else "TABLE"
            try:
                self._connection.execute(f"CREATE {kind} {name} AS {' UNION ALL BY NAME '.join(selects)}")
            except duckdb.Error as error:
                raise _damaged(make_harmless(str(error))) from error
            allowed += (path for paths in files.values() for path in paths)
        self._connection.execute(f"SET allowed_paths = {_literal(allowed)}")
        self._connection.execute("SET enable_external_access = false")
        self._connection.execute("SET lock_configuration = true")

    def _find_none(self, name: str) -> list[str]:
        """Return a file without a row, which gives a table its columns where no run has a file."""
        path = Path(self._folder.name, f"step-0.{name}")
        if TABLES[name][1] is _ROLLOUTS:
            pq.write_table(SCHEMA.empty_table(), path)
        elif name != "metrics":
            path.touch()
        return [str(path)] if path.exists() else []

    def _find_files(self, pattern: str) -> dict[str, list[str]]:
        """Return the files of a table, by run: where they are, or a copy of what is complete of them."""
        folder, _, file = pattern.rpartition("/")
        found: dict[str, list[str]] = {}
        for number, (run, record) in enumerate(self._records.items()):
            names = record.list(folder.partition("/")[0]) if folder else [file.replace("\\", "")]
            paths = found[run] = []
            for name in names:
                path = record.describe(name)
                # A link, which may lead out of the run, is no file of it.
                if not re.fullmatch(pattern, name) or Path(path).is_symlink():
                    continue
                if name.endswith(".parquet") and "://" not in path and not _GLOB.search(path):
                    paths.append(path)
                    continue
                data = _describe_run(record) if name == STATE_NAME else record.read(name) or b""
                copy = Path(self._folder.name, str(number), name)
                copy.parent.mkdir(parents=True, exist_ok=True)
                # A kill may have torn the last line of a log.
                copy.write_bytes(data[: data.rfind(b"\n") + 1] if name.endswith(".jsonl") else data)
                if copy.stat().st_size:
                    paths.append(str(copy))
        return found


def _fetch(result: duckdb.DuckDBPyConnection) -> Iterator[tuple[Any, ...]]:
    try:
        while rows := result.fetchmany(_FETCHED_ROWS):
            yield from rows
    except duckdb.Error as error:
        raise _refuse(error) from error


def _refuse(error: Exception) -> ConfigError | CorruptRecord:
    """Translate an error of DuckDB."""
    # The message may quote model text.
    message = make_harmless(str(error).strip())
    if isinstance(error, duckdb.IOException):
        return _damaged(message)
    return ConfigError(
        f"the question has no answer ({message})",
        allowed=f"the tables {', '.join(TABLES)} alone; `strop query` lists their columns",
        next_step="mend the question",
    )


def _damaged(message: str) -> CorruptRecord:
    return CorruptRecord(
        f"a file of the record cannot be read ({message})",
        allowed="the files that strop wrote",
        next_step="ask again if a run was just resumed; else remove the file, or ask the other runs",
    )


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
        raise _damaged(f"{record.describe(STATE_NAME)}: {error}") from error
    return json.dumps(row).encode()


def _literal(value: str | list[str]) -> str:
    """Write a text, or a list of them, in SQL."""
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    return "'" + value.replace("'", "''") + "'"


def to_json(value: Any) -> Any:
    """Convert a value of an answer to JSON: NaN and infinities become null, other types their text."""
    if isinstance(value, float | Decimal):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): to_json(part) for key, part in value.items()}
    if isinstance(value, list):
        return list(map(to_json, value))
    return value if value is None or isinstance(value, bool | int) else str(value)


def shorten(value: Any, num_characters: int) -> Any:
    """Shorten a value for a table: of a long text or list the beginning and its length."""
    if value is None or isinstance(value, bool | int | float):
        return value
    text = str(value)
    return text if len(text) <= num_characters else f"{text[:num_characters]} ... {len(text)} characters"
