"""A data set: where the files of its two splits are, and reading their rows.

A `DataSet` may name its files; those of any other folder or hub's data set are named train* and test* (or
validation*), in itself or in `main/` or `data/`. A single file counts as training data that is still to be
split. A path is never looked up on a hub; the name of a folder or file that is here is a path. A URI such as
s3://bucket/gsm8k/ is fetched completely and read like a local one. A folder of the datasets library's
`save_to_disk` counts as one file, or as one per split.

Files are Parquet, CSV and its kin, JSON and JSONL, packed by gzip or not. A missing value is None: null, NaN,
Infinity, a cell that is empty or says NaN. A column of whole numbers with holes, which pandas writes as 18.0,
holds whole numbers. An encoding is never guessed: text is UTF-8, or says itself that it is UTF-16.
"""

from __future__ import annotations

import codecs
import csv
import datetime as dt
import gzip
import io
import itertools
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from strop.errors import DataError, HubUnreachable, RemoteMissing, given_of
from strop.rollout import Split
from strop.spec.offline import DATA_SUFFIXES, is_data_path
from strop.store.data_files import (
    DataFile,
    fetch_data_files,
    fetch_saved_split,
    list_data_files,
    locate_named,
    note_data_file,
)
from strop.store.policy import read_policy
from strop.store.uris import is_remote
from strop.tasks.answers import to_whole

Files = Mapping[Split, Sequence[Path]]
"""The files of both splits. None held out: some of the training rows are, chosen by their content."""
_FOLDERS = ("", "main", "data")
_STEMS = {Split.TRAIN: ("train",), Split.HELD_OUT: ("test", "validation")}
"""How the names of a split's files begin."""
_ARROW_END = bytes(4)  # An empty message ends an Arrow stream ('Encapsulated message format').
_STATE = "state.json"
"""In a folder that the datasets library saved: the Arrow files of a split in order."""


class DataSet(BaseModel):
    """Where the files of a data set are, how its rows are asked, and which replies are right."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str | None = None
    """The hub id of a published data set; None: rows of the user's own."""
    saved_as: str | None = None
    """NAME in the folders NAME_SPLIT of other launchers' stores. None: the end of its hub id."""
    train: tuple[str, ...] = ()
    held_out: tuple[str, ...] = ()
    """The files of its splits, as its hub names them. Only held-out ones: it is for evaluation. Only training
    ones: some of their rows are held out, chosen by content. None at all: they are found by their names."""
    choices: str | None = None
    """Column with a list of four choices, which prompts call a, b, c and d."""
    topic: str | None = None
    """Column with the subject of a question; may be empty. In prompts, {about} is ' about ' and its words."""
    answer: str | None = None
    """Column of the right answer."""
    answer_in: Literal["all", "behind ####", "the last box"] = "all"
    """Where in the column it stands."""
    reward: Literal["number", "marked-number", "math", "letter", "python-tests"] | None = None
    """How it is compared, if the run names no rewards."""
    tests: tuple[str, ...] = ()
    """Statements that test a program: a text with columns, or a column with a list. The first are shown."""
    head: str = ""
    setup: str = ""
    """Texts with columns: code that begins the program, and code beside the tests."""
    prompt: str = "{prompt}"
    """What is asked in a chat: a column of texts or of messages, or a template of fields."""
    base_prompt: str | None = None
    """What is asked in plain text, if not that."""
    stop: tuple[str, ...] = ()
    base_stop: tuple[str, ...] = ()
    gold: tuple[str, ...] = ()
    """Right replies, the form that the prompt asks for first."""
    functions: Mapping[str, Mapping[str, str]] = {}
    """Instructions by the name that rows have for them: the `id`, and names of arguments that differ."""
    max_reply_tokens: int = Field(ge=1)

    @property
    def splits(self) -> Mapping[Split, tuple[Sequence[str], Sequence[str]]]:
        """The files and the stems of each split, the needed one first."""
        if self.train or not self.held_out:
            files = {Split.TRAIN: self.train, Split.HELD_OUT: self.held_out}
            return {split: (files[split], stems) for split, stems in _STEMS.items()}
        # The only split of a data set for evaluation is often called train.
        return {Split.HELD_OUT: (self.held_out, (*_STEMS[Split.HELD_OUT], *_STEMS[Split.TRAIN]))}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One row of a data set."""

    values: Mapping[str, Any]
    place: str
    """For messages: file and row number, from 1."""
    split: Split = Split.TRAIN
    """That of its file."""


def bad_row(fault: str, allowed: str) -> DataError:
    """Return the error for a malformed row; `fault` names row and content."""
    next_step = "mend or remove the row, or correct the setting that names its columns"
    return DataError(fault, allowed=allowed, next_step=next_step)


def read_rows(path: Path, split: Split = Split.TRAIN) -> list[Row]:
    """Read all rows of one file, in order, or of a folder that the datasets library saved.

    Raises: DataError if it cannot be read.
    """
    tables = _mend_columns(_read_saved(path)) if path.is_dir() else _read_file(path)
    return [
        Row(values=values, place=f"{path}, row {number}", split=split)
        for number, values in enumerate(tables, start=1)
    ]


def find_files(source: str, data: DataSet) -> Files:
    """Return the files of both splits, fetched if they are not on this disk.

    Raises: DataError if there are none; StoreError if the store fails.
    """
    found: Files = {}
    if not (is_data_path(source) or is_remote(source)):
        found = _fetch(source, data)
    elif (folder := locate_named(source)).is_file() or is_saved(folder):
        found = {next(iter(data.splits)): [folder if folder.is_file() else note_files(source, folder)]}
    else:
        paths = (path for pattern in ("*", "*/*") for path in folder.glob(pattern))
        fitting = [path for path in paths if _is_data(path.name) or is_saved(path)]
        names = [path.relative_to(folder).as_posix() for path in fitting]
        chosen = _choose(source, data, names)
        found = {split: [note_files(source, folder, one) for one in ones] for split, ones in chosen.items()}
    return {split: found.get(split, ()) for split in Split}


def _fetch(source: str, data: DataSet) -> Files:
    """Return the files of a data set that the store or a hub has."""
    name = source.rpartition("/")[2]
    shown = dict.fromkeys((data.saved_as or name.lower(), name))
    # Such as gsm8k_train.
    saved_as = {
        split: [f"{one}_{stem}" for stem in stems for one in shown]
        for split, (_, stems) in data.splits.items()
    }

    def find_saved() -> Files:
        found = {split: fetch_saved_split(source, names) for split, names in saved_as.items()}
        is_whole = next(iter(found.values())) is not None and (all(found.values()) or not data.held_out)
        return {split: [path] for split, path in found.items() if path is not None and is_whole}

    def find_named() -> Files:
        # Another data set for evaluation has other files.
        known = [*data.train, *data.held_out] if data.train or source == data.source else []
        chosen = _choose(source, data, known or [*filter(_is_data, list_data_files(source))])
        return {split: fetch_data_files(source, files) for split, files in chosen.items()}

    faults = ["no file or folder of that name is here"]
    for find in (find_saved, find_named) if read_policy().asks_store_first else (find_named, find_saved):
        try:
            if found := find():
                return found
        except (RemoteMissing, HubUnreachable) as error:
            faults.append(given_of(error))
    raise DataError(
        f"task.source={source} is not to be had ({'; '.join(faults)})",
        allowed=f"a data set in the store, perhaps as {', '.join(itertools.chain(*saved_as.values()))}; or on"
        " a hub that answers; or a local copy",
        next_step="copy the data set here and name its folder in task.source; or run `strop stage` where the"
        " hub can be reached",
    )


def _is_data(name: str) -> bool:
    return name.endswith(DATA_SUFFIXES)


def _choose(source: str, data: DataSet, names: Sequence[str]) -> Mapping[Split, Sequence[str]]:
    """Choose from names the files of both splits: those that the data set names, else by their stems.

    Raises: DataError if a split that has to be there has none.
    """
    needed, chosen = next(iter(data.splits)), dict[Split, Sequence[str]]()
    if len(names) == 1 and not (data.train and data.held_out):
        return {needed: names}
    for split, (files, stems) in data.splits.items():
        starts = [f"{folder}/{stem}".lstrip("/") for folder in _FOLDERS for stem in stems]
        # From the first folder and stem that has some.
        found = (sorted(one for one in names if re.fullmatch(rf"{start}[^/]*", one)) for start in starts)
        is_known = bool(files) and {*files} <= {*names}
        chosen[split] = files if is_known else next(filter(None, found), ())
        if not chosen[split] and (split is needed or data.held_out):
            raise DataError(
                f"task.source={source} {'has' if names else 'is not here, or has'} no file named"
                f" {' or '.join(f'{stem}*' for stem in stems)}; its data files are"
                f" {', '.join(names[:5]) or 'none'}",
                allowed=f"a file of {', '.join(DATA_SUFFIXES)}, or a folder or hub id with such files, in"
                f" itself, in {' or '.join(_FOLDERS[1:])}",
                next_step="correct task.source, rename the files, or name a single file, which is then split",
            )
    return chosen


def is_saved(path: Path) -> bool:
    """Whether a folder is one split that the datasets library saved."""
    return (path / _STATE).is_file()


def note_files(source: str, folder: Path, name: str = "") -> Path:
    """Record a data file in a folder for collectors, all those of a saved split; return its path."""
    path = folder / name
    for file in [path] if path.is_file() else sorted(filter(Path.is_file, path.rglob("*"))):
        file_name = file.relative_to(folder).as_posix()
        note_data_file(DataFile(source=source, name=file_name, path=file))
    return path


def _read_saved(path: Path) -> list[Table]:
    """Return the rows of one split in order.

    Raises: DataError if a file is missing or truncated, or a file of indices selects the rows.
    """
    import pyarrow as pa

    file = path / _STATE
    rows: list[Table] = []
    try:
        state = json.loads(file.read_bytes())
        if state.get("_indices_data_files"):
            cause = "its rows are a choice, in an order of its own: save it with `flatten_indices()`"
            raise _refuse(path, "format", cause)
        for entry in state["_data_files"]:
            file = path / entry["filename"]
            data = file.read_bytes()
            # A reader takes a stream that was cut between two batches for a complete one.
            if not data.endswith(_ARROW_END):
                raise OSError("it ends before its last row")
            rows += _to_tables(pa.ipc.open_stream(data).read_all())
    except (OSError, ValueError, TypeError, LookupError, AttributeError, pa.ArrowException) as error:
        raise _refuse(file, "truncated", f"{type(error).__name__}: {error}") from error
    return rows


# Reading one file.

Table = dict[str, Any]
_PARQUET, _GZIP = b"PAR1", b"\x1f\x8b"
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_FOREIGN = re.compile(
    rb"\s*(?:version https://git-lfs|<!doctype html|<html)|[^\0]{0,64}[\x01-\x08\x0e-\x1f]", re.IGNORECASE
)
"""Begins of files that are no rows: of pointers, pages, archives, workbooks, pickles."""
_FILLED = re.compile(r"[^\s\ufeff]")
"""What is no white space, and no mark of files that were joined."""
_LONE = re.compile(r"\\u[dD][89a-fA-F]")
_DELIMITERS = ",;\t|"
_HOLES = ("", "nan", "NaN", "<NA>")
"""Cells by which pandas and NumPy write that there is no value."""
_INDEX = re.compile(r"|__index_level_\d+__|Unnamed: 0")
"""Names of a column that pandas adds, which only numbers the rows."""
_ALLOWED = (
    "a folder of `save_to_disk`; Parquet; CSV; JSON, one table a line or one list of tables; packed by gzip"
    " or not, in UTF-8, or in UTF-16 with its byte order mark"
)


def _refuse(path: Path, kind: str, cause: str, line: int | None = None) -> DataError:
    """Return the error for a file that cannot be read; `kind` is the cause in a word, for tests."""
    place = "" if line is None else f"line {line}: "
    given = f"data file {path} cannot be read ({place}{cause})"
    known = {"truncated": "fetch or write it again; an interrupted download looks like this"}
    known |= {"encoding": "write it in UTF-8, for example by iconv -f latin1 -t utf-8"}
    next_step = known.get(kind, "mend it, or write it in another form")
    return DataError(given, allowed=_ALLOWED, next_step=next_step, kind=kind, line=line)


def _read_file(path: Path) -> list[Table]:
    """Read the rows of a file in order; what it holds decides how, beside the name.

    Cells of CSV are texts. Raises: DataError.
    """
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if data.startswith(_GZIP) else data
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _refuse(path, "truncated", str(error)) from error
    except OSError as error:
        raise _refuse(path, "missing", str(error)) from error
    if data.startswith(_PARQUET):
        return _mend_columns(_read_parquet(path, data))
    name = path.name.lower().removesuffix(".gz")
    text = _decode(path, data, can_be_text=not name.endswith(".parquet"))
    if not name.endswith((".csv", ".tsv")):
        return _mend_columns(_read_json(path, text))
    rows = _read_csv(path, text, "\t" if name.endswith(".tsv") else _DELIMITERS)
    return _mend_columns(rows, lambda cell: cell[:-2] if re.fullmatch(r"-?\d+\.0", cell) else None)


def _read_parquet(path: Path, data: bytes) -> list[Table]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not data.endswith(_PARQUET):
        raise _refuse(path, "truncated", "it ends before its last row")
    try:
        return _to_tables(pq.read_table(pa.BufferReader(data)))
    except (OSError, ValueError, TypeError, LookupError, pa.ArrowException) as error:
        raise _refuse(path, "format", str(error)) from error


def _to_tables(table: Any) -> list[Table]:
    """Return the rows of an Arrow table as JSON values, without the columns that number rows."""
    kept = table.select([name for name in table.column_names if not _INDEX.fullmatch(name)])
    for index, column in enumerate(kept.schema):
        if column.type == "float":  # The shortest decimal: 0.1, and not 0.10000000149011612.
            numbers = kept.column(index).cast("string").cast("double")
            kept = kept.set_column(index, column.name, numbers)
    text = json.dumps(kept.to_pylist(maps_as_pydicts="strict"), default=_spell)
    rows: list[Table] = json.loads(text, parse_constant=lambda _: None)
    return rows


def _spell(value: Any) -> Any:
    """Return a value of Arrow that JSON lacks; bytes and durations are None."""
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    return value.isoformat() if isinstance(value, dt.date | dt.time) else None


def _mend_columns(rows: list[Table], to_whole: Callable[[Any], Any] = to_whole) -> list[Table]:
    """Write whole numbers as such in columns that have holes and nothing else; return the rows."""
    filled: dict[str, list[tuple[Table, Any]]] = {}
    for row in rows:
        for name, value in row.items():
            if value is not None:
                filled.setdefault(name, []).append((row, to_whole(value)))
    for name, cells in filled.items():
        if len(cells) < len(rows) and all(whole is not None for _, whole in cells):
            for row, whole in cells:
                row[name] = whole
    return rows


def _decode(path: Path, data: bytes, *, can_be_text: bool) -> str:
    encoding, begin = "utf-16" if data.startswith(_UTF16) else "utf-8-sig", f"the file begins {data[:24]!r}"
    if data and (not can_be_text or (encoding != "utf-16" and _FOREIGN.match(data))):
        raise _refuse(path, "format", begin)
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        is_cut = error.reason in ("unexpected end of data", "truncated data")
        kind, cause = "truncated" if is_cut else "encoding", f"byte 0x{data[error.start]:02x}; {begin}"
        raise _refuse(path, kind, cause, line) from error
    if (place := text.find("\0")) >= 0:
        cause = f"a NUL, as UTF-16 without its mark has; {begin}"
        raise _refuse(path, "encoding", cause, text.count("\n", 0, place) + 1)
    return text


def _read_csv(path: Path, text: str, delimiters: str) -> list[Table]:
    """Read the rows, by the delimiter that divides the header most."""
    # No cell is longer; the module's own limit is that of 1997.
    csv.field_size_limit(max(len(text), 1))
    if named := re.match(r"sep=(.)(?=\r?\n)", text):  # Excel's own first line.
        delimiters, text = named[1], text[named.end() :]
    head = text.lstrip().partition("\n")[0]
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=max(delimiters, key=head.count), strict=True)
    header: list[str] = []
    rows: list[Table] = []
    line = 0
    try:
        for cells in reader:
            if not header:
                header = [name.strip() for name in cells]
                names = [name for name in header if not _INDEX.fullmatch(name)]
                if len(set(names)) < len(names):
                    raise _refuse(path, "duplicate", "a column's name stands twice", reader.line_num)
            elif any(cells):
                if len(cells) != len(header):
                    cause = f"{len(cells)} cells below a header of {len(header)}"
                    raise _refuse(path, "columns", cause, reader.line_num)
                row = zip(header, cells, strict=True)
                rows.append({k: None if v in _HOLES else v for k, v in row if not _INDEX.fullmatch(k)})
            line = reader.line_num
    except csv.Error as error:
        # Where the row begins: a quote that is not closed takes in the rest of the file.
        raise _refuse(path, "columns", f"its quotes: {error}", line + 1) from error
    return rows


def _read_json(path: Path, text: str) -> list[Table]:
    """Return the tables of a text: one behind the other, or in one list."""
    decode = json.JSONDecoder(object_pairs_hook=_to_table, parse_constant=lambda _: None).raw_decode
    rows: list[Table] = []
    at = end = 0
    try:
        while (found := _FILLED.search(text, end)) is not None:
            value, end = decode(text, at := found.start())
            if _LONE.search(text, at, end):
                json.dumps(value, ensure_ascii=False).encode()
            tables = value if isinstance(value, list) and not rows else [value]
            if others := [type(table).__name__ for table in tables if not isinstance(table, dict)]:
                raise TypeError(f"{others[0]} instead of a table")
            rows += tables
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        kind, place = {KeyError: "duplicate", TypeError: "table"}.get(type(error)), getattr(error, "pos", at)
        closing = "]" if re.match(r"[\s\ufeff]*\[", text) else "}"
        is_cut = "\n" not in text[place:].rstrip() and not text.rstrip().endswith(closing)
        cause = f"the key {error} stands twice" if kind == "duplicate" else str(error)
        kind = kind or ("truncated" if is_cut else "json")
        raise _refuse(path, kind, cause, text.count("\n", 0, place) + 1) from error
    return rows


def _to_table(pairs: list[tuple[str, Any]]) -> Table:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise KeyError(Counter(name for name, _ in pairs).most_common(1)[0][0])
    return table
