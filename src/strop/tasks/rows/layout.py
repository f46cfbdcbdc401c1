"""Find the files of a data set's two splits, in a folder, a store or on a hub, and read their rows.

The data set's `DataLayout` names the files of both splits on a hub; a folder has the same files, or files
named train* and test* (or validation*), in itself or in `main/` or `data/`. A single file counts as training
data that is still to be split. A path is never looked up on a hub; the name of a folder or file that is here
is a path. A URI such as s3://bucket/gsm8k/ is fetched completely and read like a local one. A folder of the
datasets library's `save_to_disk` counts as one file, or as one per split.

Files are Parquet, CSV and its kin, JSON and JSONL, packed by gzip or not. A missing value is None: null, NaN,
a cell that is empty or says NaN. A column of whole numbers with holes, which pandas writes as 18.0, holds
whole numbers. An encoding is never guessed: text is UTF-8, or says itself what it is.
"""

from __future__ import annotations

import codecs
import csv
import datetime as dt
import gzip
import io
import json
import math
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from strop.errors import DataError, HubUnreachable, RemoteMissing, split_error
from strop.rollout import Split
from strop.spec.offline import DATA_SUFFIXES, is_data_path
from strop.store.data_files import (
    DataFile,
    fetch_data_file,
    fetch_saved_split,
    list_data_files,
    locate_named,
    note_data_file,
)
from strop.store.listed import ARROW_END
from strop.store.uris import is_remote

Files = Mapping[Split, Sequence[Path]]
"""The files of both splits. None held out: some of the training rows are, chosen by their content."""
_FOLDERS = ("", "main", "data")
_STEMS = {Split.TRAIN: ("train",), Split.HELD_OUT: ("test", "validation")}
"""How the names of a split's files begin."""
_STATE = "state.json"
"""In a folder that the datasets library saved: the Arrow files of a split in order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataLayout:
    """The files of a data set's splits, named as on its hub."""

    train: tuple[str, ...] = ()
    """Empty: the data set is for evaluation only, and all of its rows are held out."""
    held_out: tuple[str, ...] = ()
    """Empty: some of the training rows are held out, chosen by their content."""
    is_unknown: bool = False
    """Whether the files are unknown: on a hub, too, they are found by their names."""
    saved_as: str | None = None
    """NAME in the folders NAME_SPLIT of other launchers' stores. None: the end of its hub id."""

    @property
    def splits(self) -> Mapping[Split, tuple[Sequence[str], Sequence[str]]]:
        """The files and the stems of each split, the needed one first."""
        if self.train:
            files = {Split.TRAIN: self.train, Split.HELD_OUT: self.held_out}
            return {split: (files[split], stems) for split, stems in _STEMS.items()}
        # The only split of a data set for evaluation is often called train.
        return {Split.HELD_OUT: (self.held_out, (*_STEMS[Split.HELD_OUT], *_STEMS[Split.TRAIN]))}

    def saved_names(self, source: str, stems: Sequence[str]) -> tuple[str, ...]:
        """Return the folders of a split in such a store, such as gsm8k_train."""
        full = source.rpartition("/")[2]
        short = self.saved_as or full.lower()
        return tuple(dict.fromkeys(f"{name}_{stem}" for stem in stems for name in (short, full)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One row of a data set."""

    values: Mapping[str, Any]
    place: str
    """For messages: file and row number, from 1."""
    index: int = 0
    """Position in the files of its split, from 0; in all of the data if that has no splits."""
    split: Split = Split.TRAIN
    """That of its file."""


def bad_row(fault: str, allowed: str) -> DataError:
    """Return the error for a malformed row; `fault` names row and content."""
    next_step = "mend or remove the row, or correct the setting that names its columns"
    return DataError(fault, allowed=allowed, next_step=next_step)


def read_rows(path: Path, *, split: Split = Split.TRAIN, first_index: int = 0) -> list[Row]:
    """Read all rows of one file, in order, or of a folder that the datasets library saved.

    `first_index`: the index of the first row, after those of other files.
    Raises: DataError if it cannot be read.
    """
    tables = _mend_columns(_read_saved(path)) if path.is_dir() else _read_file(path)
    return [
        Row(values=values, place=f"{path}, row {number + 1}", index=first_index + number, split=split)
        for number, values in enumerate(tables)
    ]


def find_files(source: str, layout: DataLayout) -> Files:
    """Return the files of both splits, fetched if they are not on this disk.

    Raises: DataError if there are none; StoreError if the store fails.
    """
    is_here = is_data_path(source) or is_remote(source)
    found = _find_here(source, layout) if is_here else _find_by_id(source, layout)
    if isinstance(found, Path):
        found = {next(iter(layout.splits)): [found]}
    return {split: found.get(split, ()) for split in Split}


def _find_here(source: str, layout: DataLayout) -> Files | Path:
    folder = locate_named(source)
    if folder.is_file():
        return folder
    if is_saved(folder):
        return _note(source, folder, [folder])[0]
    names = [
        path.relative_to(folder).as_posix() for place in _FOLDERS for path in (folder / place).glob("*.*")
    ]
    found: dict[Split, Sequence[Path]] = {}
    for split, (files, stems) in layout.splits.items():
        paths = find_saved_split(folder, stems) or [folder / file for file in files]
        if not all(path.exists() for path in paths):
            paths = [folder / name for name in _choose(source, names, stems)]
        found[split] = _note(source, folder, paths)
    return found


def _find_by_id(source: str, layout: DataLayout) -> Files | Path:
    """Return the files of a hub's data set, or its only one."""
    saved = {split: layout.saved_names(source, stems) for split, (_, stems) in layout.splits.items()}
    needed = next(iter(saved))
    try:
        if not layout.is_unknown:
            # A saved folder has all files of a split.
            return {
                split: list(dict.fromkeys(fetch_data_file(source, file, saved[split]) for file in files))
                for split, (files, _) in layout.splits.items()
            }
        folders = {split: fetch_saved_split(source, names) for split, names in saved.items()}
        if folders[needed] is not None:
            return {split: [path] for split, path in folders.items() if path is not None}
        names = [name for name in list_data_files(source) if name.endswith(DATA_SUFFIXES)]
        if len(names) == 1:
            return fetch_data_file(source, names[0])
        return {
            split: [
                fetch_data_file(source, name)
                for name in _choose(source, names, stems, is_needed=split is needed)
            ]
            for split, (_, stems) in layout.splits.items()
        }
    except (RemoteMissing, HubUnreachable) as error:
        raise DataError(
            f"task.source={source} is not to be had ({split_error(str(error))[0]})",
            allowed="a data set in the store or on a hub that answers, or a local copy",
            next_step="copy the data set here and name its folder in task.source; or run `strop stage` where"
            " the hub can be reached",
        ) from error


def _choose(source: str, names: Sequence[str], stems: Sequence[str], *, is_needed: bool = True) -> list[str]:
    """Return the files of a split, from the first folder and stem that has some. Raises: DataError."""
    names = [name for name in names if name.endswith(DATA_SUFFIXES)]
    for folder in _FOLDERS:
        inside = [name for name in names if name.rpartition("/")[0] == folder]
        for stem in stems:
            if files := [name for name in inside if name.rpartition("/")[2].startswith(stem)]:
                return sorted(files)
    if not is_needed:
        return []
    raise DataError(
        f"task.source={source} has no file named {' or '.join(f'{stem}*' for stem in stems)}; its data files"
        f" are {', '.join(names[:5]) or 'none'}",
        allowed=f"a file of {', '.join(DATA_SUFFIXES)}, or a folder or hub id with such files, in itself, in"
        f" {' or '.join(_FOLDERS[1:])}",
        next_step="correct task.source, rename the files so, or name a single file, which is then split",
    )


def _note(source: str, folder: Path, paths: Sequence[Path]) -> Sequence[Path]:
    """Record data files for collectors, those of saved folders one by one, and return `paths`."""
    for path in paths:
        for file in [path] if path.is_file() else sorted(filter(Path.is_file, path.rglob("*"))):
            name = file.relative_to(folder).as_posix()
            note_data_file(DataFile(source=source, name=name, path=file, origin="disk"))
    return paths


def is_saved(path: Path) -> bool:
    """Whether a folder is one split that the datasets library saved."""
    return (path / _STATE).is_file()


def find_saved_split(folder: Path, stems: Sequence[str]) -> list[Path]:
    """Return the folder of the first of these splits that the datasets library saved there, if any."""
    return [folder / stem for stem in stems if is_saved(folder / stem)][:1]


def _read_saved(path: Path) -> list[Table]:
    """Return the rows of one split in order, with the columns that were chosen.

    Raises: DataError if a file is missing or truncated, or a file of indices selects the rows.
    """
    import pyarrow as pa

    try:
        state = json.loads((path / _STATE).read_bytes())
        files = [path / entry["filename"] for entry in state["_data_files"]]
        is_choice = bool(state.get("_indices_data_files"))
        columns = None if state.get("_output_all_columns") else state.get("_format_columns")
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise _refuse(path / _STATE, "truncated", f"{type(error).__name__}: {error}") from error
    if is_choice:
        cause = "its rows are a choice, in an order of its own: save it with `flatten_indices()`"
        raise _refuse(path, "format", cause)
    rows: list[Table] = []
    for file in files:
        try:
            data = file.read_bytes()
            # A reader takes a stream that was cut between two batches for a complete one.
            if not data.endswith(ARROW_END):
                raise OSError("it ends before its last row")
            table = pa.ipc.open_stream(data).read_all()
            table = table if columns is None else table.select(columns)
        except (OSError, KeyError, pa.ArrowException) as error:
            raise _refuse(file, "truncated", str(error)) from error
        rows += map(_plain_row, table.to_pylist())
    return rows


# Reading one file.

Table = dict[str, Any]
_PARQUET, _GZIP = b"PAR1", b"\x1f\x8b"
_MARKS = (
    *((codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF32_BE, "utf-32"), (codecs.BOM_UTF8, "utf-8-sig")),
    *((codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16")),
)
_FOREIGN = re.compile(
    rb"\s*(?:version https://git-lfs|<!doctype html|<html)|[^\0]{0,64}[\x01-\x08\x0e-\x1f]", re.IGNORECASE
)
"""Begins of files that are no rows: of pointers, pages, archives, workbooks, pickles."""
_NUM_SHOWN = 24
_BLANK = re.compile(r"[\s\ufeff]*")
_BETWEEN = re.compile(r"[\s\ufeff]*(?:,[\s\ufeff]*|(?=\]))")
"""What stands between two tables of a list, or before its end."""
_LONE = re.compile(r"\\u[dD][89a-fA-F]")
_DELIMITERS = ",;\t|"
_HOLES = ("", "nan", "NaN", "<NA>")
"""Cells by which pandas and NumPy write that there is no value."""
_INDEX = re.compile(r"|__index_level_\d+__|Unnamed: 0")
"""Names of a column that pandas adds, which only numbers the rows."""
_MAX_WHOLE = 2**53
_ALLOWED = (
    "a folder of `save_to_disk`; Parquet; CSV; JSON, one table a line or one list of tables; packed by gzip"
    " or not, in UTF-8, or in UTF-16 with its byte order mark"
)


def _refuse(path: Path, kind: str, cause: str, line: int | None = None) -> DataError:
    """Return the error for a file that cannot be read; `kind` is the cause in a word, for tests."""
    place = "" if line is None else f"line {line}: "
    given = f"data file {path} cannot be read ({place}{cause})"
    next_step = "mend it, or write it in another form; to change an encoding: iconv -f latin1 -t utf-8"
    if kind == "truncated":
        next_step = "fetch or write it again; an interrupted download looks like this"
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
        return _mend_columns(list(_read_json(path, text)))
    rows = _read_csv(path, text, "\t" if name.endswith(".tsv") else _DELIMITERS)
    return _mend_columns(rows, lambda cell: cell[:-2] if re.fullmatch(r"-?\d+\.0", cell) else None)


def _read_parquet(path: Path, data: bytes) -> list[Table]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not data.endswith(_PARQUET):
        raise _refuse(path, "truncated", "it ends before its last row")
    try:
        # A list of times in nanoseconds that Python cannot hold is a ValueError.
        return [_plain_row(row) for row in pq.read_table(pa.BufferReader(data)).to_pylist()]
    except (OSError, ValueError, pa.ArrowException) as error:
        raise _refuse(path, "format", str(error)) from error


def _plain_row(row: Mapping[str, Any]) -> Table:
    """Return a row of Arrow as JSON values, without the columns that number rows; bytes and NaN are None."""
    return {name: _plain(value) for name, value in row.items() if not _INDEX.fullmatch(name)}


def _plain(value: Any) -> Any:
    if isinstance(value, list) and value and all(isinstance(item, tuple) for item in value):
        value = dict(value)  # A map of Arrow.
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, Decimal):
        value = int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, dt.date | dt.time):
        return value.isoformat()
    is_json = isinstance(value, str | bool | int) or (isinstance(value, float) and not math.isnan(value))
    return value if is_json else None


def _to_whole(value: Any) -> int | None:
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < _MAX_WHOLE
    return int(value) if is_whole else None


def _mend_columns(rows: list[Table], to_whole: Callable[[Any], Any] = _to_whole) -> list[Table]:
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
    encoding = next((name for mark, name in _MARKS if data.startswith(mark)), "utf-8")
    begin = f"the file begins with {data[:_NUM_SHOWN]!r}"
    if data and (not can_be_text or (encoding == "utf-8" and _FOREIGN.match(data))):
        raise _refuse(path, "format", begin)
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        cause = f"byte 0x{data[error.start]:02x} is no {encoding.upper()[:6].rstrip('-')}; {begin}"
        is_cut = error.reason in ("unexpected end of data", "truncated data")
        raise _refuse(path, "truncated" if is_cut else "encoding", cause, line) from error
    if (place := text.find("\0")) >= 0:
        line = text.count("\n", 0, place) + 1
        raise _refuse(path, "encoding", f"a NUL, as UTF-16 without its mark has; {begin}", line)
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
                    raise _refuse(path, "duplicate", "a column's name stands twice", reader.line_num)
            elif header and any(cells):
                if len(cells) != len(header):
                    cause = f"{len(cells)} cells below a header of {len(header)}"
                    raise _refuse(path, "columns", cause, reader.line_num)
                row = zip(header, cells, strict=True)
                yield {k: None if v in _HOLES else v for k, v in row if not _INDEX.fullmatch(k)}
            line = reader.line_num
    except csv.Error as error:
        # Where the row begins: a quote that is not closed takes in the rest of the file.
        raise _refuse(path, "columns", f"its quotes: {error}", line + 1) from error


def _read_json(path: Path, text: str) -> Iterator[Table]:
    """Yield the tables of a text: one behind the other, or in one list."""
    decode = json.JSONDecoder(
        object_pairs_hook=_to_table, parse_constant=lambda name: None if name == "NaN" else float(name)
    ).raw_decode
    begin = re.match(r"[\s\ufeff]*(\[?)[\s\ufeff]*", text)
    assert begin is not None
    is_list, at = bool(begin[1]), begin.end()

    def fault(kind: str, cause: str, place: int) -> DataError:
        is_last = "\n" not in text[place:].rstrip() and not text.rstrip().endswith("]" if is_list else "}")
        line = text.count("\n", 0, place) + 1
        return _refuse(path, "truncated" if is_last and kind == "json" else kind, cause, line)

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
    if is_list and text[at:].strip() != "]":
        raise fault("json", "the list does not end the text", at)


def _to_table(pairs: list[tuple[str, Any]]) -> Table:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise KeyError(Counter(name for name, _ in pairs).most_common(1)[0][0])
    return table
