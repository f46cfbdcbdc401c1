"""Read the rows of a data set in two splits: from files, a folder, or a hub.

The data set's `DataLayout` names the files of both splits on a hub; a folder has the same files, or files
named train* and test* (or validation*), in itself or in `main/` or `data/`. A single file, and a data set
published without splits, is split by the content of its rows, independent of their order. A data set for
evaluation only has no training rows. A path is never looked up on a hub; the name of a folder or file that is
here is a path. A URI such as s3://bucket/gsm8k/ is fetched completely and read like
a local folder or file. A folder of the datasets library's `save_to_disk` (`arrow`) counts as a file, or as
one file per split.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
_TRAIN_STEMS = ("train",)
_SHOT_STEMS = ("dev", "prompt")
_HELD_OUT_STEMS = ("test", "validation")
_HELD_OUT_SHARE = 10
"""One row in this many of a single file is held out, if no number is set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataLayout:
    """The files of a data set's splits, named as on its hub."""

    train: tuple[str, ...]
    """Empty: the data set is for evaluation only, and all of its rows are held out."""
    held_out: tuple[str, ...]
    """Empty: some of the training rows are held out, chosen by their content."""
    is_unknown: bool = False
    """Whether the files are unknown: on a hub, too, they are found by their names."""
    shots: tuple[str, ...] = ()
    """Files of a separate split with solved examples, such as dev or prompt."""
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
    train_files, held_out_files = _find_files(source, layout)
    train, held_out = _read_all(train_files), _read_all(held_out_files)
    if not held_out_files and train:
        train, held_out = _split_by_content(train, num_held_out, split_key)
        if not train:
            raise DataError(
                f"task.source={source} has {len(held_out)} rows, all of which are held out",
                allowed="more different prompts than are held out: the others are trained on",
                next_step="add rows, or lower task.num_held_out",
            )
    if layout.train:
        _require_rows(source, "training", train)
    _require_rows(source, "held-out", held_out)
    return train, held_out


def _read_all(files: Sequence[Path]) -> list[Row]:
    rows: list[Row] = []
    for file in files:
        rows += read_rows(file, first_index=len(rows))
    return rows


def read_shot_rows(source: str, layout: DataLayout) -> tuple[Row, ...]:
    """Read the rows of the data set's split of solved examples.

    Raises: DataError if the source has none, or a file is unreadable.
    """
    if is_data_path(source) or is_remote(source):
        path = locate_named(source)
        if not path.is_dir():
            raise DataError(
                f"task.source={source} is one file, and solved examples have a split of their own",
                allowed=f"a folder with a file named {' or '.join(f'{stem}*' for stem in _SHOT_STEMS)}",
                next_step="name the folder in task.source, or set task.num_few_shot=0",
            )
        files = _note(source, path, _split_files(path, layout.shots, _SHOT_STEMS))
    else:
        files = [_fetch(source, file, layout.saved_names(source, _SHOT_STEMS)) for file in layout.shots]
    rows = [row for file in files for row in read_rows(file)]
    _require_rows(source, "few-shot", rows)
    return tuple(rows)


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
    train_files = _note(source, path, _split_files(path, layout.train, _TRAIN_STEMS))
    return train_files, _note(source, path, _split_files(path, layout.held_out, _HELD_OUT_STEMS))


def _find_by_id(source: str, layout: DataLayout) -> tuple[list[Path], list[Path]]:
    """Return the files of both splits of a hub's data set. Raises: like `_find_files`."""
    saved = {stems: layout.saved_names(source, stems) for stems in (_TRAIN_STEMS, _HELD_OUT_STEMS)}
    if not layout.train:
        # The only split of a data set for evaluation is often called train on its hub.
        saved[_HELD_OUT_STEMS] += saved[_TRAIN_STEMS]
    if not layout.is_unknown:
        train_files, held_out_files = (
            # A saved folder has all files of a split.
            list(dict.fromkeys(_fetch(source, file, saved[stems]) for file in files))
            for files, stems in ((layout.train, _TRAIN_STEMS), (layout.held_out, _HELD_OUT_STEMS))
        )
        return train_files, held_out_files
    with _naming_the_source(source, "its list of files"):
        if (train_path := fetch_saved_split(source, saved[_TRAIN_STEMS])) is not None:
            held_out_path = fetch_saved_split(source, saved[_HELD_OUT_STEMS])
            return [train_path], [held_out_path] if held_out_path is not None else []
        names = [name for name in list_data_files(source) if name.endswith(DATA_SUFFIXES)]
    train, held_out = (_choose_files(names, stems) for stems in (_TRAIN_STEMS, _HELD_OUT_STEMS))
    if not train and len(names) == 1:
        return [_fetch(source, names[0])], []
    if not train:
        raise DataError(
            f"task.source={source} has no file named {_TRAIN_STEMS[0]}*; its data files are"
            f" {', '.join(names[:5]) or 'none'}",
            allowed=f"one file of {', '.join(DATA_SUFFIXES)}, or files named train* and test* or validation*",
            next_step="download the data set, and name the file that you mean in task.source",
        )
    return [_fetch(source, name) for name in train], [_fetch(source, name) for name in held_out]


def _choose_files(names: Sequence[str], stems: Sequence[str]) -> list[str]:
    """Return the files of a split, from the first folder and stem that has some."""
    for folder in _FOLDERS:
        inside = [name for name in names if name.rpartition("/")[0] == folder]
        for stem in stems:
            if files := [name for name in inside if name.rpartition("/")[2].startswith(stem)]:
                return sorted(files)
    return []


def _note(source: str, folder: Path, files: list[Path]) -> list[Path]:
    """Record data files for collectors, those of saved folders one by one, and return `files`."""
    saved = [folder / SPLITS_NAME] if (folder / SPLITS_NAME).is_file() else []
    for path in (*saved, *files):
        for file in [path] if path.is_file() else sorted(filter(Path.is_file, path.rglob("*"))):
            name = file.relative_to(folder).as_posix()
            note_data_file(DataFile(source=source, name=name, path=file, origin="disk"))
    return files


def _fetch(source: str, file: str, saved_as: Sequence[str] = ()) -> Path:
    """Return the local copy of a file of a hub's data set, or of the folder that has its split.

    Raises: DataError if neither store nor hub has it; StoreError if the store fails.
    """
    with _naming_the_source(source, file):
        return fetch_data_file(source, file, saved_as)


@contextmanager
def _naming_the_source(source: str, file: str) -> Iterator[None]:
    """Raise a missing file as a DataError with the source and the next step."""
    try:
        yield
    except (RemoteMissing, HubUnreachable) as error:
        cause, _, _ = split_error(str(error))
        raise DataError(
            f"task.source={source}: {file} is not to be had ({cause})",
            allowed="a data set with this file in the store or on a hub that answers, or a local copy",
            next_step="download the data set elsewhere, copy it here and name its folder in"
            " task.source; or run `strop stage` where the hub can be reached",
        ) from error


def _require_rows(source: str, split: str, rows: Sequence[Row]) -> None:
    if rows:
        return
    raise DataError(
        f"task.source={source} has no {split} rows",
        allowed="at least one row in each split",
        next_step="fetch or write the file again; an interrupted download looks like this",
    )


def _split_files(folder: Path, files: Sequence[str], stems: Sequence[str]) -> list[Path]:
    """Return the files of a split: those of the layout, else all shards of the first place and stem.

    Raises: DataError if there is none.
    """
    if saved := find_saved_split(folder, stems):
        return saved
    mirrored = [folder / file for file in files]
    if all(path.is_file() for path in mirrored):
        return mirrored
    for place in (folder / name for name in _FOLDERS):
        for stem in stems:
            shards = sorted(path for suffix in DATA_SUFFIXES for path in place.glob(f"{stem}*{suffix}"))
            if shards:
                return shards
    patterns = " or ".join(f"{stem}*{suffix}" for stem in stems for suffix in DATA_SUFFIXES)
    raise DataError(
        f"folder {folder} has no file named {patterns}",
        allowed=f"such a file in the folder itself, in {' or in '.join(_FOLDERS[1:])}",
        next_step="rename the files so, or name a single file in task.source to have it split",
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
    held_out_digests = set(sorted(set(digests))[:num_chosen])
    train = [row for row, digest in zip(rows, digests, strict=True) if digest not in held_out_digests]
    held_out = [row for row, digest in zip(rows, digests, strict=True) if digest in held_out_digests]
    return train, held_out


def read_rows(path: Path, *, first_index: int = 0) -> list[Row]:
    """Read all rows of one file of Parquet, CSV, JSON or JSONL, in order, or of a folder of Arrow files.

    `first_index`: the index of the first row, after those of other files.
    Raises: DataError if it cannot be read.
    """
    tables = mend_columns(read_saved(path)) if path.is_dir() else read_file(path)
    return [
        Row(values=values, place=f"{path}, row {number}", index=first_index + number - 1)
        for number, values in enumerate(tables, start=1)
    ]


# Folders of the datasets library's `save_to_disk`: `state.json` names the Arrow files of one split in order,
# `dataset_dict.json` the folders of several.

STATE_NAME = "state.json"
SPLITS_NAME = "dataset_dict.json"


def is_saved(path: Path) -> bool:
    """Whether a folder is one split that the library saved."""
    return (path / STATE_NAME).is_file()


def find_saved_split(folder: Path, stems: Sequence[str]) -> list[Path]:
    """Return the folder of the first of these splits; empty if `folder` is no folder of splits.

    Raises: DataError if it is one, and has no such split.
    """
    if not (folder / SPLITS_NAME).is_file():
        return []
    names = _read_json(folder / SPLITS_NAME).get("splits")
    splits = names if isinstance(names, list) else []
    for stem in stems:
        if stem in splits and is_saved(folder / stem):
            return [folder / stem]
    raise DataError(
        f"{folder} has no split {' or '.join(stems)}; its splits are {', '.join(map(str, splits)) or 'none'}",
        allowed="splits train and test or validation",
        next_step="save it with splits of these names, or name one split's folder, which is then divided",
    )


def read_saved(path: Path) -> list[Table]:
    """Return the rows of one split in order.

    Raises: DataError if a file is missing or truncated, or a file of indices selects the rows.
    """
    import pyarrow as pa

    state = _read_json(path / STATE_NAME)
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise refuse(
            path, "choice", "its rows are a choice, in an order of its own, as old versions saved it"
        )
    names = [
        str(entry.get("filename")) for entry in state.get("_data_files") or () if isinstance(entry, dict)
    ]
    columns = state.get("_format_columns")
    rows: list[Table] = []
    for name in names:
        try:
            with (path / name).open("rb") as file:
                # A reader takes a stream that was cut between two batches for a complete one.
                file.seek(-min(len(ARROW_END), (path / name).stat().st_size), 2)
                if file.read() != ARROW_END:
                    raise OSError("it ends before its last row")
            with pa.memory_map(str(path / name)) as source:
                table = pa.ipc.open_stream(source).read_all()
            if columns is not None and not state.get("_output_all_columns"):
                table = table.select(columns)
        except (OSError, KeyError, pa.ArrowException) as error:
            raise refuse(path / name, "truncated", str(error)) from error
        rows += map(plain_row, table.to_pylist())
    return rows


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise refuse(path, "truncated", str(error)) from error
    if not isinstance(content, dict):
        raise refuse(path, "truncated", f"it holds a {type(content).__name__}")
    return content
