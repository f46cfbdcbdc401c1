"""Read-only SQL over the records of runs, by DuckDB: one SELECT at a time.

DuckDB itself opens no file and no connection; it gets the tables of `strop.view.tables`. So a question can
neither write nor read anything else. Texts of answers are as recorded; their printer makes them harmless.

Importing this module imports DuckDB (`pip install strop[query]`) and pyarrow.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NoReturn

import duckdb

from strop.errors import ConfigError, CorruptRecord, StoreError, StropError
from strop.view.tables import TABLES, Records
from strop.view.terminal import make_harmless

_SETTINGS: Mapping[str, str] = {
    # No file, no address, no extensions; and a question cannot change these settings.
    "enable_external_access": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "allow_community_extensions": "false",
    "python_enable_replacements": "false",
    "temp_directory": "",
    "lock_configuration": "true",
}
_MAX_LISTED_COLUMNS = 24
_FETCHED_ROWS = 1000
_PLACE = re.compile(r"[^\s'\"]*step-\d+\.parquet")


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
    """The tables of some runs. Each is read at its first use and kept."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._loaded: set[str] = set()
        self._connection = duckdb.connect(":memory:", config=dict(_SETTINGS))

    def ask(self, sql: str) -> Answer:
        """Answer one SELECT.

        Raises: ConfigError, with DuckDB's message and the tables' columns, if the question is no SELECT, is
            wrong, or reads something else; StoreError or CorruptRecord if a record cannot be read.
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
        self._load([name for name in TABLES if re.search(rf"\b{name}\b", sql, re.IGNORECASE)] or TABLES)
        try:
            result = self._connection.execute(statements[0])
        except duckdb.Error as error:
            self._refuse(error)
        names = [column[0] for column in result.description or ()]
        return Answer(columns=_make_unique(names), rows=self._fetch(result))

    def list_columns(self) -> list[Column]:
        """Return the columns of all tables. Raises: StoreError or CorruptRecord if one cannot be read."""
        self._load(TABLES)
        rows = self._connection.execute(
            "SELECT table_name, column_name, data_type FROM duckdb_columns() WHERE NOT internal"
            " AND table_name NOT LIKE '\\_%' ESCAPE '\\' ORDER BY column_index"
        ).fetchall()
        order = list(TABLES)
        return [
            Column(table=table, name=name, kind=kind)
            for table, name, kind in sorted(rows, key=lambda row: order.index(row[0]))
        ]

    def _load(self, names: Iterable[str]) -> None:
        for name in names:
            if name in self._loaded:
                continue
            self._connection.register(f"_{name}", TABLES[name].read(self._records))
            self._connection.execute(f'CREATE VIEW {name} AS SELECT {TABLES[name].select} FROM "_{name}"')
            self._loaded.add(name)

    def _fetch(self, result: duckdb.DuckDBPyConnection) -> Iterator[tuple[Any, ...]]:
        while True:
            try:
                rows = result.fetchmany(_FETCHED_ROWS)
            except (duckdb.Error, OSError) as error:
                self._refuse(error)
            if not rows:
                return
            yield from rows

    def _refuse(self, error: Exception) -> NoReturn:
        """Translate an error of DuckDB or Arrow into one of strop, and raise it."""
        # The message may quote model text.
        message = make_harmless(str(error).strip())
        place = _PLACE.search(message)
        if place is not None or isinstance(error, OSError):
            where = place[0] if place else "a file of rollouts"
            if any(words in message for words in ("No such file", "PATH_NOT_FOUND", "does not exist")):
                raise StoreError(
                    f"{where} went while it was asked ({message})",
                    allowed="a record that stands still",
                    next_step="ask again: a run that resumes writes its last steps anew",
                ) from error
            raise CorruptRecord(
                f"{where} cannot be read ({message})",
                allowed="a Parquet file written by strop",
                next_step="remove the file, or leave its step out: WHERE step < ...",
            ) from error
        if isinstance(error, duckdb.PermissionException):
            raise ConfigError(
                f"the question reaches for more than the record ({message.splitlines()[0]})",
                allowed=f"the tables {', '.join(TABLES)}",
                next_step="ask these alone",
            ) from error
        raise ConfigError(
            f"the question has no answer ({message})",
            allowed=self._describe(),
            next_step="mend the question",
        ) from error

    def _describe(self) -> str:
        """Return the tables with their columns, as far as they can be read."""
        try:
            columns = self.list_columns()
        except StropError:
            return f"the tables {', '.join(TABLES)}"
        described = []
        for table in TABLES:
            names = [column.name for column in columns if column.table == table]
            shown, more = ", ".join(names[:_MAX_LISTED_COLUMNS]), len(names) - _MAX_LISTED_COLUMNS
            rest = f" and {more} more, see `strop query`" if more > 0 else ""
            described.append(f"{table} ({shown}{rest})")
        return "; ".join(described)


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
