"""Tests of the gsm8k task and its data, in the real schema, on rows written for these tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import pytest

from strop.errors import DataError
from strop.rollout import Split, make_example
from strop.tasks import Task, build_task
from strop.tasks.mathematics.gsm8k import Gsm8k, Gsm8kSpec
from tests.fixtures.judging import run_self_test, verdict
from tests.fixtures.row_files import write_parquet, write_rows

Mode = Literal["auto", "strict", "hash", "flex"]
MODES: tuple[Mode, ...] = ("auto", "strict", "hash", "flex")
Rows = Sequence[dict[str, object]]

TRAIN: Rows = [
    {"question": "Ida has 3 hens and buys 4. How many has she?", "answer": "3 + 4 = <<3+4=7>>7\n#### 7"},
    {"question": "A shed costs $1,200. Two cost?", "answer": "2 x 1200 = 2400\n#### 2,400"},
    {"question": "It was 2 degrees and fell by 7. Now?", "answer": "2 - 7 = -5\n#### -5"},
]
TEST: Rows = [{"question": "Half of 9 liters?", "answer": "9 / 2 = 4.5\n#### 4.5"}]


def gsm8k(source: Path | str, num_train: int | None = None, num_held_out: int | None = None) -> Task:
    return build_task(
        Gsm8kSpec(name="gsm8k", source=str(source), num_train=num_train, num_held_out=num_held_out)
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


GOLD_IN = {"72": "72", "1234": "1,234", "5": "5", "18": "18"}


@pytest.mark.parametrize(
    ("text", "gold", "strict", "hash_", "flex", "auto"),
    [
        ("The answer is 72.", "72", "72", None, "72.", "72"),
        # The dot of the pattern matches any character, so it eats a digit where no period follows.
        ("The answer is 72", "72", "7", None, "72", "72"),
        ("#### 1,234", "1234", None, "1,234", "1,234", "1,234"),
        ("so 5 apples ... done", "5", None, None, "...", "5"),
        ("It is 10-5", "5", None, None, "-5", "5"),
        ("Total: $18.00", "18", None, None, "$18.00", "$18.00"),
        ("The answer is 5. Q: I have 9 pens", "5", "5.", None, "9", "5"),
        ("The answer is 5 for each.\n#### 5", "5", "5", "5", "5", "5"),
        ("so \\boxed{5} for all 3", "5", None, None, "3", "5"),
        ("<think>The answer is 9.</think>5", "5", "9.", None, "5", "5"),
        ("", "5", None, None, None, None),
    ],
)
def test_modes_read_numbers_their_own_way(
    text: str, gold: str, strict: str | None, hash_: str | None, flex: str | None, auto: str | None
) -> None:
    example = make_example("gsm8k", {"question": "?", "solution": f"so\n#### {GOLD_IN[gold]}"}, gold)
    wanted = {"strict": strict, "hash": hash_, "flex": flex, "auto": auto}
    found = {
        mode: verdict(Gsm8k(Gsm8kSpec(name="gsm8k", source="unused.jsonl", mode=mode)), example, text)
        for mode in MODES
    }
    assert {mode: outcome.extracted for mode, outcome in found.items()} == wanted
    # lm-eval compares texts, without commas, money and a last period; strop compares numbers.
    right = {
        mode: text is not None and text.replace(",", "").replace("$", "").removesuffix(".") == gold
        for mode, text in wanted.items()
    }
    right["auto"] = auto is not None and "10-5" not in text
    assert {mode: outcome.is_correct for mode, outcome in found.items()} == right


@pytest.mark.parametrize("mode", MODES)
def test_self_test_passes(tmp_path: Path, task: Task, mode: Mode) -> None:
    examples = task.examples(Split.TRAIN)
    moded = Gsm8k(Gsm8kSpec(name="gsm8k", source=str(tmp_path), mode=mode))
    # lm-eval's metric compares texts and knows '-5' as well as '5'.
    assert run_self_test(moded, examples) == []
    assert (moded.version == task.version) is (mode == "auto")


def test_overlapping_splits_are_refused(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.jsonl", TRAIN)
    # The same question with other white space and another worked answer is the same question.
    again: dict[str, object] = {
        "question": "Ida has  3 hens\nand buys 4. How many has she?",
        "answer": "#### 7",
    }
    write_rows(tmp_path / "test.jsonl", [*TEST, again])
    with pytest.raises(DataError, match="1 of 2"):
        gsm8k(tmp_path).examples(Split.TRAIN)


@pytest.mark.parametrize(("name", "said"), [("missing.jsonl", r"missing\.jsonl"), ("", r"train\*\.parquet")])
def test_files_that_are_not_there_are_refused(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        gsm8k(tmp_path / name).examples(Split.TRAIN)


@pytest.mark.parametrize("empty", ["train", "test"])
def test_an_empty_split_is_refused(tmp_path: Path, empty: str) -> None:
    for name, rows in (("train", TRAIN), ("test", TEST)):
        write_rows(tmp_path / f"{name}.jsonl", [] if name == empty else rows)
    with pytest.raises(DataError, match="interrupted download"):
        gsm8k(tmp_path).examples(Split.TRAIN)
