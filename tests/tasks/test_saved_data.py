"""Data that the datasets library saved: folders here, and the layout of other launchers' buckets."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from strop.errors import DataError
from strop.evaluate.harness import LM_EVAL
from strop.io.notices import listen
from strop.rollout import Split
from strop.run.stage import stage_run
from strop.spec import load_spec
from strop.store import follow_store
from strop.tasks import build_task
from strop.tasks.rows.layout import read_rows
from tests.conftest import require_system_part
from tests.fixtures.row_files import write_rows
from tests.fixtures.saved_data import save_split, save_splits
from tests.fixtures.sources import follow
from tests.store.test_listed import sync
from tests.store.test_models import write_model

pytestmark = pytest.mark.usefixtures("away_from_home")
# The environment of lm-eval has the library. Read here: every test has a cache of its own.
HAS_DATASETS = LM_EVAL.python
TRAIN = [{"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(20)]
TEST = [{"question": f"{n} + 2?", "answer": f"#### {n + 2}"} for n in range(5)]


def read_ids(*words: str) -> dict[Split, list[str]]:
    task = build_task(load_spec(None, ["name=x", "task.name=gsm8k", *words]).spec.task)
    return {split: [one.example_id for one in task.examples(split)] for split in Split}


def test_a_folder_of_splits_or_of_one_is_read_as_its_rows_are(tmp_path: Path) -> None:
    saved = save_splits({"train": TRAIN, "test": TEST}, tmp_path / "saved")
    for name, rows in (("train", TRAIN), ("test", TEST)):
        write_rows(tmp_path / "lines" / f"{name}.jsonl", rows)
    assert read_ids(f"task.source={saved}") == read_ids(f"task.source={tmp_path}/lines")
    # One split is divided like a single file.
    saved = save_split(TRAIN, tmp_path / "one", num_files=3)
    lines = write_rows(tmp_path / "all.jsonl", TRAIN)
    assert read_ids(f"task.source={saved}") == read_ids(f"task.source={lines}")
    assert read_rows(saved)[4].place == f"{saved}, row 5"


SAVE = """
import json, sys
from datasets import Dataset
Dataset.from_list(json.loads(sys.argv[1])).select([3, 1, 2]).save_to_disk(sys.argv[2])
"""


@pytest.mark.slow
def test_the_library_itself_writes_what_is_read(tmp_path: Path) -> None:
    require_system_part("the environment of lm-eval (make harness-deps)", found=HAS_DATASETS.is_file())
    saved = tmp_path / "saved"
    subprocess.run([HAS_DATASETS, "-c", SAVE, json.dumps(TRAIN), saved], check=True, timeout=240)
    assert [row.values for row in read_rows(saved)] == [TRAIN[3], TRAIN[1], TRAIN[2]]
    mine = json.loads((save_split(TRAIN, tmp_path / "mine") / "state.json").read_bytes())
    assert mine.keys() == json.loads((saved / "state.json").read_bytes()).keys()


def test_bad_folders_are_refused_by_name(tmp_path: Path) -> None:
    saved = save_split(TRAIN, tmp_path / "chosen", _indices_data_files=[{"filename": "indices.arrow"}])
    with pytest.raises(DataError, match="its rows are a choice"):
        read_rows(saved)
    saved = save_split(TRAIN, tmp_path / "cut", num_files=2)
    last = saved / "data-00001-of-00002.arrow"
    last.write_bytes(last.read_bytes()[:-8])
    with pytest.raises(
        DataError, match=r"data-00001-of-00002\.arrow cannot be read .*it ends before its last"
    ):
        read_rows(saved)
    last.unlink()
    with pytest.raises(DataError, match=r"data-00001-of-00002.arrow cannot be read"):
        read_rows(saved)
    (saved / "state.json").write_text("[]")
    with pytest.raises(DataError, match=r"state\.json"):
        read_rows(saved)
    splits = save_splits({"train": TRAIN, "dev": TEST}, tmp_path / "splits")
    with pytest.raises(DataError, match=r"test\* or validation\*"):
        read_ids(f"task.source={splits}")


# Buckets of other launchers: datasets/NAME_SPLIT.


@pytest.mark.parametrize("order", ["store-first", "store-only"])
def test_saved_splits_in_a_bucket_stand_for_the_hubs_files(s3_root: str, tmp_path: Path, order: str) -> None:
    for name, rows in (("train", TRAIN), ("test", TEST)):
        sync(save_split(rows, tmp_path / name), f"{s3_root}/datasets/gsm8k_{name}")
    notices: list[str] = []
    with follow_store(follow(s3_root, order)), listen(notices.append):
        found = read_ids()
    assert {split: len(ids) for split, ids in found.items()} == {Split.TRAIN: 20, Split.HELD_OUT: 5}
    assert [one.partition(" has no COMPLETE")[0] for one in notices] == [
        f"{s3_root}/datasets/gsm8k_train",
        f"{s3_root}/datasets/gsm8k_test",
    ]


def test_saved_splits_in_a_directory_are_read_where_they_stand(tmp_path: Path) -> None:
    for name, rows in (("train", TRAIN), ("test", TEST)):
        save_split(rows, tmp_path / "store" / "datasets" / f"gsm8k_{name}")
    with follow_store(follow(str(tmp_path / "store"), "store-only")):
        assert {split: len(ids) for split, ids in read_ids().items()} == {Split.TRAIN: 20, Split.HELD_OUT: 5}


def test_a_split_that_the_bucket_lacks_is_named_beside_the_hub(s3_root: str, tmp_path: Path) -> None:
    sync(save_split(TRAIN, tmp_path / "train"), f"{s3_root}/datasets/gsm8k_train")
    with follow_store(follow(s3_root)), pytest.raises(DataError) as caught:
        read_ids()
    for key in ("datasets/openai/gsm8k", "gsm8k_test, gsm8k_validation", "unreachable"):
        assert key in str(caught.value)
    # By its own name it is divided.
    assert len(read_ids(f"task.source={s3_root}/datasets/gsm8k_train")[Split.TRAIN]) == 18


def test_an_arrow_file_that_the_state_names_is_missed(s3_root: str, tmp_path: Path) -> None:
    for name, rows in (("train", TRAIN), ("test", TEST)):
        saved = save_split(rows, tmp_path / name, num_files=2)
        sync(saved, f"{s3_root}/datasets/gsm8k_{name}", without="data-00001-of-00002.arrow")
    with (
        follow_store(follow(s3_root, "store-only")),
        pytest.raises(DataError, match=r"data-00001-of-00002\.arrow"),
    ):
        read_ids()


def test_rows_of_ones_own_and_mathematics_are_found_by_short_names(s3_root: str, tmp_path: Path) -> None:
    for name, rows in (("train", TRAIN), ("test", TEST)):
        sync(save_split(rows, tmp_path / name), f"{s3_root}/datasets/words_{name}")
        problems = [{"problem": row["question"], "solution": f"\\boxed{{{i}}}"} for i, row in enumerate(rows)]
        problems = [row | {"level": "Level 1", "type": "Algebra"} for row in problems]
        sync(save_split(problems, tmp_path / f"math-{name}"), f"{s3_root}/datasets/math_{name}")
    with follow_store(follow(s3_root, "store-only")):
        words = ["name=x", "task.name=rows", "task.source=org/Words", "task.prompt=question"]
        spec = load_spec(None, [*words, "task.answer=answer", "task.reward=exact"]).spec.task
        assert [len(build_task(spec).examples(split)) for split in Split] == [20, 5]
        spec = load_spec(None, ["name=x", "task.name=math"]).spec.task
        assert [len(build_task(spec).examples(split)) for split in Split] == [20, 5]


def test_a_saved_folder_is_staged_whole(tmp_path: Path) -> None:
    saved = save_splits({"train": TRAIN, "test": TEST}, tmp_path / "saved")
    run = tmp_path / "run.toml"
    run.write_text(
        f'name = "x"\nmodel.uri = "{write_model(tmp_path / "model")}"\n[task]\nname = "gsm8k"\n'
        f'source = "{saved}"\n[store]\nuri = "{tmp_path}/store"\n'
    )
    (staged,) = (one for one in stage_run(load_spec(str(run))) if one.kind == "data")
    assert read_ids(f"task.source={staged.uri}") == read_ids(f"task.source={saved}")
