"""Read the rows of a data set in two splits: from files, a folder, or a hub.

The data set's `DataLayout` names the files of both splits on a hub; a folder has the same files, or files
named train* and test* (or validation*), in itself or in `main/` or `data/`. A single file, and a data set
published without splits, is split by the content of its rows, independent of their order. A path is never
looked up on a hub; the name of a folder or file that is here is a path. A URI such as s3://bucket/gsm8k/ is
fetched completely and read like a local one. A folder of the datasets library's `save_to_disk` counts as one
file, or as one per split.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.errors import DataError, HubUnreachable, RemoteMissing, split_error
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
from strop.tasks.rows.files import Table, mend_columns, plain_row, read_file, refuse

_FOLDERS = ("", "main", "data")
_TRAIN, _HELD_OUT = ("train",), ("test", "validation")
"""How the names of a split's files begin."""
_HELD_OUT_SHARE = 10
"""One row in this many of a single file is held out, if no number is set."""
_STATE, _SPLITS = "state.json", "dataset_dict.json"
"""In folders that the datasets library saved: the Arrow files of a split in order; the folders of several."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataLayout:
    """The files of a data set's splits, named as on its hub."""

    train: tuple[str, ...]
    """Empty: the data set is for evaluation only, and all of its rows are held out."""
    held_out: tuple[str, ...]
    """Empty: some of the training rows are held out, chosen by their content."""
    is_unknown: bool = False
    """Whether the files are unknown: on a hub, too, they are found by their names."""
    saved_as: str | None = None
    """NAME in the folders NAME_SPLIT of other launchers' stores. None: the end of its hub id."""

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


def bad_row(fault: str, allowed: str) -> DataError:
    """Return the error for a malformed row; `fault` names row and content."""
    return DataError(fault, allowed=allowed, next_step="mend or remove the row")


def read_split_rows(
    source: str,
    layout: DataLayout,
    *,
    num_held_out: int | None = None,
    split_key: Callable[[Row], str] | None = None,
) -> tuple[list[Row], list[Row]]:
    """Return the training and the held-out rows; none for training if the data set is for evaluation only.

    `num_held_out` and `split_key` are used if the data has no splits.
    Raises: DataError if a file is missing, unreadable or empty; any exception of `split_key`.
    """
    files = _find_files(source, layout)
    train, held_out = (_read_all(paths) for paths in files)
    if not files[1] and train:
        train, held_out = _split_by_content(train, num_held_out, split_key)
        if not train:
            raise DataError(
                f"task.source={source} has {len(held_out)} rows, all of which are held out",
                allowed="more different prompts than are held out: the others are trained on",
                next_step="add rows, or lower task.num_held_out",
            )
    for split, rows in (("training", train), ("held-out", held_out)):
        if not rows and (layout.train or split == "held-out"):
            raise DataError(
                f"task.source={source} has no {split} rows",
                allowed="at least one row in each split",
                next_step="fetch or write the file again; an interrupted download looks like this",
            )
    return train, held_out


def _read_all(files: Sequence[Path]) -> list[Row]:
    rows: list[Row] = []
    for file in files:
        rows += read_rows(file, first_index=len(rows))
    return rows


def _find_files(source: str, layout: DataLayout) -> tuple[list[Path], list[Path]]:
    """Return the files of both splits, fetched if they are not on this disk.

    Raises: DataError if there are none; StoreError if the store fails.
    """
    if not is_data_path(source) and not is_remote(source):
        return _find_by_id(source, layout)
    path = locate_named(source)
    if path.is_file() or is_saved(path):
        if path.is_dir():
            _note(source, path, [path])
        return ([path], []) if layout.train else ([], [path])
    if not path.is_dir():
        raise DataError(
            f"task.source={source} does not exist",
            allowed="a folder or a file of Parquet or JSONL, or a hub id such as openai/gsm8k",
            next_step="correct the path in task.source",
        )
    train = _split_files(source, path, layout.train, _TRAIN) if layout.train else []
    return _note(source, path, train), _note(
        source, path, _split_files(source, path, layout.held_out, _HELD_OUT)
    )


def _split_files(source: str, folder: Path, files: Sequence[str], stems: Sequence[str]) -> list[Path]:
    """Return a folder's files of a split: as saved, those of the layout, or by their names."""
    if saved := find_saved_split(folder, stems):
        return saved
    if all((folder / file).is_file() for file in files):
        return [folder / file for file in files]
    names = [
        path.relative_to(folder).as_posix() for place in _FOLDERS for path in (folder / place).glob("*.*")
    ]
    return [folder / name for name in _choose_files(source, names, stems)]


def _find_by_id(source: str, layout: DataLayout) -> tuple[list[Path], list[Path]]:
    """Return the files of both splits of a hub's data set. Raises: like `_find_files`."""
    saved = {stems: layout.saved_names(source, stems) for stems in (_TRAIN, _HELD_OUT)}
    if not layout.train:
        # The only split of a data set for evaluation is often called train on its hub.
        saved[_HELD_OUT] += saved[_TRAIN]
    if not layout.is_unknown:
        train, held_out = (
            # A saved folder has all files of a split.
            list(dict.fromkeys(_fetch(source, file, saved[stems]) for file in files))
            for files, stems in ((layout.train, _TRAIN), (layout.held_out, _HELD_OUT))
        )
        return train, held_out
    try:
        found = [
            fetch_saved_split(source, saved[stems]) if stems is _HELD_OUT or layout.train else None
            for stems in (_TRAIN, _HELD_OUT)
        ]
        if found[0 if layout.train else 1] is not None:
            train, held_out = ([path] if path is not None else [] for path in found)
            return train, held_out
        names = [name for name in list_data_files(source) if name.endswith(DATA_SUFFIXES)]
    except (RemoteMissing, HubUnreachable) as error:
        raise _not_there(source, "its list of files", error) from error
    if len(names) == 1:
        only = [_fetch(source, names[0])]
        return (only, []) if layout.train else ([], only)
    if layout.train:
        files = _choose_files(source, names, _TRAIN), _choose_files(source, names, _HELD_OUT, is_needed=False)
    else:
        files = [], _choose_files(source, names, (*_HELD_OUT, *_TRAIN))
    train, held_out = ([_fetch(source, name) for name in one] for one in files)
    return train, held_out


def _choose_files(
    source: str, names: Sequence[str], stems: Sequence[str], *, is_needed: bool = True
) -> list[str]:
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
        allowed=f"one file of {', '.join(DATA_SUFFIXES)}, or such files in the folder itself, in"
        f" {' or '.join(_FOLDERS[1:])}",
        next_step="rename the files so, or name a single file in task.source to have it split",
    )


def _note(source: str, folder: Path, files: list[Path]) -> list[Path]:
    """Record data files for collectors, those of saved folders one by one, and return `files`."""
    saved = [folder / _SPLITS] if (folder / _SPLITS).is_file() else []
    for path in (*saved, *files):
        for file in [path] if path.is_file() else sorted(filter(Path.is_file, path.rglob("*"))):
            name = file.relative_to(folder).as_posix()
            note_data_file(DataFile(source=source, name=name, path=file, origin="disk"))
    return files


def _fetch(source: str, file: str, saved_as: Sequence[str] = ()) -> Path:
    """Return the local copy of a file of a hub's data set, or of the folder that has its split.

    Raises: DataError if neither store nor hub has it; StoreError if the store fails.
    """
    try:
        return fetch_data_file(source, file, saved_as)
    except (RemoteMissing, HubUnreachable) as error:
        raise _not_there(source, file, error) from error


def _not_there(source: str, what: str, error: Exception) -> DataError:
    return DataError(
        f"task.source={source}: {what} is not to be had ({split_error(str(error))[0]})",
        allowed="a data set with this file in the store or on a hub that answers, or a local copy",
        next_step="copy the data set here and name its folder in task.source; or run `strop stage` where the"
        " hub can be reached",
    )


def _split_by_content(
    rows: list[Row], num_held_out: int | None, split_key: Callable[[Row], str] | None
) -> tuple[list[Row], list[Row]]:
    """Hold out the rows with the smallest content hashes; both parts keep the order of the file.

    With `split_key`, keys are hashed instead: rows of one key stay together.
    """
    key_of = split_key or (lambda row: json.dumps(row.values, sort_keys=True, default=str))
    digests = [hashlib.sha256(key_of(row).encode()).hexdigest() for row in rows]
    num_rows = len(rows) if split_key is None else len(set(digests))
    num_chosen = max(1, num_rows // _HELD_OUT_SHARE) if num_held_out is None else num_held_out
    chosen = set(sorted(set(digests))[:num_chosen])
    train = [row for row, digest in zip(rows, digests, strict=True) if digest not in chosen]
    return train, [row for row, digest in zip(rows, digests, strict=True) if digest in chosen]


def read_rows(path: Path, *, first_index: int = 0) -> list[Row]:
    """Read all rows of one file of Parquet, CSV, JSON or JSONL, in order, or of a folder of Arrow files.

    `first_index`: the index of the first row, after those of other files.
    Raises: DataError if it cannot be read.
    """
    tables = mend_columns(_read_saved(path)) if path.is_dir() else read_file(path)
    return [
        Row(values=values, place=f"{path}, row {number}", index=first_index + number - 1)
        for number, values in enumerate(tables, start=1)
    ]


def is_saved(path: Path) -> bool:
    """Whether a folder is one split that the datasets library saved."""
    return (path / _STATE).is_file()


def find_saved_split(folder: Path, stems: Sequence[str]) -> list[Path]:
    """Return the folder of the first of these splits; empty if `folder` is no folder of splits.

    Raises: DataError if it is one, and has no such split.
    """
    if not (folder / _SPLITS).is_file():
        return []
    splits = _read_state(folder / _SPLITS).get("splits")
    names = [str(name) for name in splits] if isinstance(splits, list) else []
    for stem in stems:
        if stem in names and is_saved(folder / stem):
            return [folder / stem]
    raise DataError(
        f"{folder} has no split {' or '.join(stems)}; its splits are {', '.join(names) or 'none'}",
        allowed="splits train and test or validation",
        next_step="save it with splits of these names, or name one split's folder, which is then divided",
    )


def _read_saved(path: Path) -> list[Table]:
    """Return the rows of one split in order, with the columns that were chosen.

    Raises: DataError if a file is missing or truncated, or a file of indices selects the rows.
    """
    import pyarrow as pa

    state = _read_state(path / _STATE)
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise refuse(path, "choice", "its rows are a choice, in an order of its own")
    columns = None if state.get("_output_all_columns") else state.get("_format_columns")
    rows: list[Table] = []
    for entry in state.get("_data_files") or ():
        file = path / str(entry.get("filename") if isinstance(entry, dict) else entry)
        try:
            data = file.read_bytes()
            # A reader takes a stream that was cut between two batches for a complete one.
            if not data.endswith(ARROW_END):
                raise OSError("it ends before its last row")
            table = pa.ipc.open_stream(data).read_all()
            table = table if columns is None else table.select(columns)
        except (OSError, KeyError, pa.ArrowException) as error:
            raise refuse(file, "truncated", str(error)) from error
        rows += map(plain_row, table.to_pylist())
    return rows


def _read_state(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise refuse(path, "truncated", str(error)) from error
    if not isinstance(content, dict):
        raise refuse(path, "truncated", f"it holds a {type(content).__name__}")
    return content
