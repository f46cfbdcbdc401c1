"""Read folders of the datasets library's `save_to_disk` without that library.

A folder of one split has `state.json`, which names its Arrow files in order; a folder of several has
`dataset_dict.json`, which names the folders of the splits. Columns chosen with `set_format` are respected.
Old versions of the library saved a selection of rows as a separate file of indices: such folders are refused,
because the order of the rows would be wrong.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from strop.errors import DataError
from strop.store.listed import ARROW_END
from strop.tasks.rows.files import Table, plain_row, refuse

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
