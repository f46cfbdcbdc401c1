"""Read one data file as tables: Parquet, CSV and its kin, JSON and JSONL, packed by gzip or not.

A missing value is None: null, NaN, a cell that is empty or says NaN. A column of whole numbers with holes,
which pandas writes as 18.0, holds whole numbers. An encoding is never guessed: text is UTF-8, or says itself
what it is.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from strop.errors import DataError

Table = dict[str, Any]
_PARQUET, _GZIP = b"PAR1", b"\x1f\x8b"
_MARKS = (
    *((b"\xff\xfe\0\0", "utf-32"), (b"\0\0\xfe\xff", "utf-32"), (b"\xef\xbb\xbf", "utf-8-sig")),
    *((b"\xff\xfe", "utf-16"), (b"\xfe\xff", "utf-16")),
)
_FOREIGN: Mapping[bytes, str] = MappingProxyType(
    {
        b"version https://git-lfs": "a pointer of Git LFS, whose file was not fetched",
        b"<!doctype html": "a page of HTML",
        b"<html": "a page of HTML",
        b"PK\x03\x04": "a ZIP archive or a workbook",
        b"\xd0\xcf\x11\xe0": "a workbook",
        b"\x28\xb5\x2f\xfd": "packed by zstd",
        b"\xfd7zXZ": "packed by xz",
        b"BZh": "packed by bzip2",
        b"ARROW1": "an Arrow file",
        b"\x93NUMPY": "an array of NumPy",
        b"SQLite format 3": "a data base",
        b"\x80\x04\x95": "a pickle",
    }
)
"""Begins of files that are not read, in lower case where they are text."""
_BLANK = re.compile(r"[\s\ufeff]*")
_BETWEEN = re.compile(r"[\s\ufeff]*(?:,[\s\ufeff]*|(?=\]))")
"""What stands between two tables of a list, or before its end."""
_LONE = re.compile(r"\\u[dD][89a-fA-F]")
_DELIMITERS = ",;\t|"
_HOLES = ("", "nan", "NaN", "<NA>")
"""Cells by which pandas and NumPy write that there is no value."""
_INDEX = re.compile(r"|__index_level_\d+__|Unnamed: 0")
"""Names of a column that pandas adds, which only numbers the rows."""
_WHOLE = re.compile(r"-?\d+\.0")
_MAX_WHOLE = 2**53


_REMEDIES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "missing": ("a file that this user may read", "correct its name or its rights"),
        "format": (
            "Parquet, CSV, JSON or JSONL, packed by gzip or not",
            "fetch the file itself, or write it as one of these",
        ),
        "truncated": ("a whole file", "fetch or write it again; an interrupted download looks like this"),
        "choice": (
            "a folder of its rows in their order",
            "load it once with the library, and save it with `flatten_indices().save_to_disk(...)`",
        ),
        "encoding": (
            "text in UTF-8, or in UTF-16 with its byte order mark",
            "convert it, for example: iconv -f latin1 -t utf-8",
        ),
        "json": ("one JSON table a line, or one list of tables", "mend or remove it"),
        "table": ("one JSON table a line, or one list of tables", "write one table for each row"),
        "columns": ("as many cells in every row as the header has", "mend the row, or quote its cells"),
        "duplicate": ("each name once", "rename or remove one of the two: which one counts is not known"),
    }
)
"""What is allowed, and the next step, by the kind of the error."""


def refuse(path: Path, kind: str, cause: str, line: int | None = None) -> DataError:
    """Return the error for a file that cannot be read, of one of the kinds of `_REMEDIES`."""
    allowed, next_step = _REMEDIES[kind]
    place = "" if line is None else f"line {line}: "
    given = f"data file {path} cannot be read ({place}{cause})"
    return DataError(given, allowed=allowed, next_step=next_step, kind=kind, line=line)


def read_file(path: Path) -> list[Table]:
    """Read the rows of a file in order; what it holds decides how, beside the name.

    Cells of CSV are texts. Raises: DataError.
    """
    data = _read_bytes(path)
    name = path.name.lower().removesuffix(".gz")
    if data.startswith(_PARQUET):
        return mend_columns(_read_parquet(path, data))
    begin = data[:64].lstrip().lower()
    for magic, what in _FOREIGN.items():
        if data.startswith(magic) or begin.startswith(magic):
            raise refuse(path, "format", f"it is {what}")
    if data and name.endswith(".parquet"):
        raise refuse(path, "format", "it is no Parquet")
    text = _decode(path, data)
    if name.endswith((".csv", ".tsv")):
        return mend_columns(
            _read_csv(path, text, "\t" if name.endswith(".tsv") else _DELIMITERS), is_text=True
        )
    return mend_columns(list(_read_json(path, text)))


def _read_bytes(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if data.startswith(_GZIP) else data
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise refuse(path, "truncated", str(error)) from error
    except OSError as error:
        raise refuse(path, "missing", str(error)) from error


def _read_parquet(path: Path, data: bytes) -> list[Table]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not data.endswith(_PARQUET):
        raise refuse(path, "truncated", "it ends before its last row")
    try:
        # A list of times in nanoseconds that Python cannot hold is a ValueError.
        return [plain_row(row) for row in pq.read_table(pa.BufferReader(data)).to_pylist()]
    except (OSError, ValueError, pa.ArrowException) as error:
        raise refuse(path, "format", str(error)) from error


def plain_row(row: Mapping[str, Any]) -> Table:
    """Return a row of Arrow without the columns that number rows, and with None for NaN."""
    return {name: _plain(value) for name, value in row.items() if not _INDEX.fullmatch(name)}


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return None if math.isnan(value) else value
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        # A map of Arrow is a list of pairs.
        is_map = bool(value) and all(isinstance(item, tuple) for item in value)
        return _plain(dict(value)) if is_map else [_plain(item) for item in value]
    return value


def mend_columns(rows: list[Table], *, is_text: bool = False) -> list[Table]:
    """Write whole numbers as such in columns that have holes and nothing else; return the rows."""
    filled = [(row, name, value) for row in rows for name, value in row.items() if value is not None]
    counts = Counter(name for _, name, _ in filled)
    others = {name for _, name, value in filled if not _is_whole(value, is_text)}
    for row, name, value in filled:
        if name not in others and counts[name] < len(rows):
            row[name] = value[:-2] if is_text else int(value)
    return rows


def _is_whole(value: Any, is_text: bool) -> bool:
    if is_text:
        return _WHOLE.fullmatch(value) is not None
    return isinstance(value, float) and value.is_integer() and abs(value) < _MAX_WHOLE


def _decode(path: Path, data: bytes) -> str:
    encoding = next((name for mark, name in _MARKS if data.startswith(mark)), "utf-8")
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        cause = f"byte 0x{data[error.start]:02x} is no {encoding.upper()[:6].rstrip('-')}"
        is_cut = error.reason in ("unexpected end of data", "truncated data")
        raise refuse(path, "truncated" if is_cut else "encoding", cause, line) from error
    if (place := text.find("\0")) >= 0:
        line = text.count("\n", 0, place) + 1
        raise refuse(path, "encoding", "a NUL, as UTF-16 without its mark has", line)
    return text


def _read_csv(path: Path, text: str, delimiters: str) -> list[Table]:
    """Read the rows by the first delimiter that divides the header, and all rows alike."""
    # No cell is longer; the module's own limit is that of 1997.
    csv.field_size_limit(max(len(text), 1))
    is_marked = re.match(r"sep=.\r?\n", text) is not None  # Excel's own first line.
    chosen = text[4] if is_marked else delimiters
    chosen = "".join(one for one in chosen if len(next(_cells(text, one), [])) > 1) or chosen[0]
    faults: list[DataError] = []
    for delimiter in chosen:
        try:
            return list(_cut_rows(path, text, delimiter, num_skipped=int(is_marked)))
        except DataError as fault:
            faults.append(fault)
    raise faults[0]


def _cells(text: str, delimiter: str, *, strict: bool = False) -> Any:
    return csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=strict)


def _cut_rows(path: Path, text: str, delimiter: str, *, num_skipped: int) -> Iterator[Table]:
    reader = _cells(text, delimiter, strict=True)
    header: list[str] = []
    line = 0
    try:
        for number, cells in enumerate(reader):
            if not header and number >= num_skipped:
                header = [name.strip() for name in cells]
                names = [name for name in header if not _INDEX.fullmatch(name)]
                if len(set(names)) < len(names):
                    raise refuse(path, "duplicate", "a column's name stands twice", reader.line_num)
            elif header and any(cells):
                if len(cells) != len(header):
                    cause = f"{len(cells)} cells below a header of {len(header)}"
                    raise refuse(path, "columns", cause, reader.line_num)
                row = zip(header, cells, strict=True)
                yield {k: None if v in _HOLES else v for k, v in row if not _INDEX.fullmatch(k)}
            line = reader.line_num
    except csv.Error as error:
        # Where the row begins: a quote that is not closed takes in the rest of the file.
        raise refuse(path, "columns", f"its quotes: {error}", line + 1) from error


def _read_json(path: Path, text: str) -> Iterator[Table]:
    """Yield the tables of a text: one behind the other, or in one list."""
    decode = json.JSONDecoder(object_pairs_hook=_to_table, parse_constant=_read_constant).raw_decode
    at = _skip(text, 0)
    is_list = text.startswith("[", at)
    at = _skip(text, at + 1) if is_list else at

    def fault(kind: str, cause: str, place: int) -> DataError:
        is_last = "\n" not in text[place:].rstrip() and not text.rstrip().endswith("]" if is_list else "}")
        line = text.count("\n", 0, place) + 1
        return refuse(path, "truncated" if is_last and kind == "json" else kind, cause, line)

    while at < len(text) and not (is_list and text[at] == "]"):
        try:
            value, end = decode(text, at)
            if _LONE.search(text, at, end):
                json.dumps(value, ensure_ascii=False).encode()
        except json.JSONDecodeError as error:
            raise fault("json", error.msg, error.pos) from error
        except KeyError as error:
            raise fault("duplicate", f"the key {error} stands twice", at) from error
        except (ValueError, RecursionError) as error:
            raise fault("json", str(error), at) from error
        if not isinstance(value, dict):
            raise fault("table", f"{type(value).__name__} instead of a table", at)
        yield value
        gap = (_BETWEEN if is_list else _BLANK).match(text, end)
        if gap is None:
            raise fault("json", "no , and no ] behind a table", end)
        at = gap.end()
    if is_list and (at >= len(text) or _skip(text, at + 1) < len(text)):
        raise fault("json", "the list does not end the text", at)


def _skip(text: str, at: int) -> int:
    blank = _BLANK.match(text, at)
    assert blank is not None
    return blank.end()


def _to_table(pairs: list[tuple[str, Any]]) -> Table:
    table = dict(pairs)
    if len(table) < len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise KeyError(name)
    return table


def _read_constant(name: str) -> float | None:
    return None if name == "NaN" else float(name)
