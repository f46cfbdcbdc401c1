"""Existing local folders were taken for a hub's data sets: `rows/`, `g/gsm` and `rows` as `source`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from strop.errors import DataError
from strop.rollout import Split
from strop.spec import load_spec
from strop.store.data_files import only_local_data
from strop.tasks import build_task


def examples_of(folder: Path, source: str) -> int:
    run_file = folder / "run.toml"
    run_file.write_text(
        f'name = "rows"\n[model]\nuri = "toy"\n[task]\nname = "rows"\nsource = "{source}"\n'
        'prompt = "question"\nanswer = "answer"\nreward = "exact"\n'
    )
    with only_local_data() as missing:
        number = len(build_task(load_spec(run_file).spec.task).examples(Split.TRAIN))
    assert not missing
    return number


@pytest.mark.parametrize(
    "source", ["rows/", "rows", "g/gsm", "g/gsm/", "./rows", "g/gsm/train.jsonl", "a/b/c"]
)
def test_a_folder_beside_the_run_file_is_read_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    for place in ("rows", "g/gsm", "a/b/c"):
        (tmp_path / place).mkdir(parents=True)
        for name in ("train", "test"):
            rows = [{"question": f"{name} {number}?", "answer": "4"} for number in range(20)]
            (tmp_path / place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert examples_of(tmp_path, source) >= 18


@pytest.mark.parametrize("source", ["rows/", "a/b/c", "./rows", "rows.jsonl"])
def test_a_path_without_anything_is_refused_by_its_name(tmp_path: Path, source: str) -> None:
    with pytest.raises(DataError) as refusal:
        examples_of(tmp_path, source)
    assert str(tmp_path / source.strip("./")) in str(refusal.value)
