"""Tests of the gsm8k task and its data, in the real schema, on rows written for these tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from strop.errors import DataError
from strop.rollout import Split
from strop.tasks import Task, build_task
from strop.tasks.rows.judged_rows import PresetSpec
from tests.fixtures.judging import run_self_test
from tests.fixtures.row_files import write_parquet, write_rows

Rows = Sequence[dict[str, object]]

TRAIN: Rows = [
    {"question": "Ida has 3 hens and buys 4. How many has she?", "answer": "3 + 4 = <<3+4=7>>7\n#### 7"},
    {"question": "A shed costs $1,200. Two cost?", "answer": "2 x 1200 = 2400\n#### 2,400"},
    {"question": "It was 2 degrees and fell by 7. Now?", "answer": "2 - 7 = -5\n#### -5"},
]
TEST: Rows = [{"question": "Half of 9 liters?", "answer": "9 / 2 = 4.5\n#### 4.5"}]


def gsm8k(source: Path | str, num_train: int | None = None, num_held_out: int | None = None) -> Task:
    return build_task(
        PresetSpec(name="gsm8k", source=str(source), num_train=num_train, num_held_out=num_held_out)
    )


@pytest.fixture
def task(tmp_path: Path) -> Task:
    write_rows(tmp_path / "train.jsonl", TRAIN)
    write_rows(tmp_path / "test.jsonl", TEST)
    return gsm8k(tmp_path)


@pytest.mark.parametrize("folder", ["", "main", "data"])
def test_parquet_shards_are_read_as_lines_are(tmp_path: Path, task: Task, folder: str) -> None:
    top = tmp_path / "p"
    write_parquet(top / folder / "train-00000-of-00002.parquet", TRAIN[:2])
    write_parquet(top / folder / "train-00001-of-00002.parquet", TRAIN[2:])
    write_parquet(top / folder / "test-00000-of-00001.parquet", TEST)
    other = gsm8k(top)
    assert [example.answer for example in task.examples(Split.TRAIN)] == ["7", "2400", "-5"]
    assert [example.answer for example in task.examples(Split.HELD_OUT)] == ["4.5"]
    assert list(other.examples(Split.TRAIN)) == list(task.examples(Split.TRAIN))
    assert other.version == task.version
    assert len(gsm8k(top, num_train=2).examples(Split.TRAIN)) == 2
    assert gsm8k(top, num_train=2).version != task.version
    # A question that is there twice is kept once.
    write_parquet(top / folder / "train-00001-of-00002.parquet", [*TRAIN[2:], TRAIN[0]])
    assert len(gsm8k(top).examples(Split.TRAIN)) == 3


def test_one_file_is_split_by_content(tmp_path: Path) -> None:
    rows: Rows = [{"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(40)]
    write_rows(tmp_path / "all.jsonl", rows)
    write_rows(tmp_path / "turned.jsonl", rows[::-1])
    first, turned = gsm8k(tmp_path / "all.jsonl"), gsm8k(tmp_path / "turned.jsonl")
    held_out = {example.example_id for example in first.examples(Split.HELD_OUT)}
    assert (len(first.examples(Split.TRAIN)), len(held_out)) == (36, 4)  # a tenth of 40
    assert {example.example_id for example in turned.examples(Split.HELD_OUT)} == held_out
    assert len(gsm8k(tmp_path / "all.jsonl", num_held_out=7).examples(Split.HELD_OUT)) == 7


def test_self_test_passes(task: Task) -> None:
    assert run_self_test(task, task.examples(Split.TRAIN)) == []


def test_training_questions_that_are_held_out_too_are_left_out(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.jsonl", TRAIN)
    # The same question with other white space and another worked answer is the same question.
    again = {"question": "Ida has  3 hens\nand buys 4. How many has she?", "answer": "#### 7"}
    write_rows(tmp_path / "test.jsonl", [*TEST, again])
    task = gsm8k(tmp_path)
    assert [example.answer for example in task.examples(Split.TRAIN)] == ["2400", "-5"]
    assert task.counts == {"rows left out, held out too": 1}


@pytest.mark.parametrize(("name", "said"), [("missing.jsonl", r"missing\.jsonl"), ("", r"train\*")])
def test_files_that_are_not_there_are_refused(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        gsm8k(tmp_path / name).examples(Split.TRAIN)


@pytest.mark.parametrize("empty", ["train", "test"])
def test_an_empty_split_is_refused(tmp_path: Path, empty: str) -> None:
    for name, rows in (("train", TRAIN), ("test", TEST)):
        write_rows(tmp_path / f"{name}.jsonl", [] if name == empty else rows)
    with pytest.raises(DataError, match=r" 0 training| 0 held-out"):
        gsm8k(tmp_path).examples(Split.TRAIN)
