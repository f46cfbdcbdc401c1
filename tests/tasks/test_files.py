"""Data files as people write them: `forms/files.jsonl` has the rows of each, or why it is refused."""

from __future__ import annotations

import gzip
import json
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strop.errors import DataError
from strop.tasks.rows.layout import read_rows
from tests.fixtures.row_files import write_parquet

LINES = Path(__file__).with_name("forms").joinpath("files.jsonl").read_text("utf-8").splitlines()
DEEP = f'{{"a": {"[" * 200_000}{"]" * 200_000}}}'
LONG: dict[str, Any] = {"@deep": DEEP, "@longcsv": f"q,a\n{'x' * 200_000},18\n", "@long": "x" * 200_000}
LONG |= {"@nan": math.nan, "@inf": math.inf, "@float32": np.float32(0.1)}


def revive(value: Any) -> Any:
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        made = {key: revive(item) for key, item in items}
        return made if isinstance(value, dict) else list(made.values())
    return LONG.get(value, value) if isinstance(value, str) else value


@pytest.mark.parametrize(
    "form", [json.loads(line) for line in LINES], ids=lambda form: f"{form['file']}: {form['why']}"
)
def test_a_file_is_read_or_refused_for_its_true_cause(tmp_path: Path, form: dict[str, Any]) -> None:
    path = tmp_path / form["file"]
    if "parquet" in form:
        write_parquet(path, revive(form["parquet"]))
        data = path.read_bytes()
    elif "hex" in form:
        data = bytes.fromhex(form["hex"])
    else:
        data = revive(form["text"]).encode(form.get("encoding", "utf-8"))
    data = gzip.compress(data) if form.get("gzip") else data
    path.write_bytes(data[: len(data) - form.get("cut", 0)])
    if "rows" in form:
        # As JSON, because 18 is not 18.0.
        assert json.dumps([row.values for row in read_rows(path)]) == json.dumps(revive(form["rows"]))
        return
    with pytest.raises(DataError) as refusal:
        read_rows(path)
    assert [refusal.value.kind, refusal.value.line] == form["refused"]
    copy = pickle.loads(pickle.dumps(refusal.value))
    assert (copy.kind, copy.line, str(copy)) == (*form["refused"], str(refusal.value))
