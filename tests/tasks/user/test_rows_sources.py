"""Where the user's rows may lie: a folder, any data set of a hub, all below a prefix of an object store."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from strop.errors import DataError
from strop.rollout import Split
from strop.tasks import Task, build_task
from strop.tasks.rows.judged_rows import PresetSpec, RowsSpec
from tests.fixtures.judging import verdict
from tests.fixtures.tiny_hub import tiny_hub
from tests.store.contract_suite import write_files
from tests.store.test_listed import sync


def lines(numbers: Sequence[int]) -> bytes:
    return "".join(json.dumps({"q": f"What is {n}?", "a": str(n)}) + "\n" for n in numbers).encode()


def task_of(source: str) -> Task:
    return build_task(RowsSpec(name="rows", source=source, prompt="q", answer="a", reward="exact"))


def answers(task: Task) -> dict[Split, list[str | None]]:
    return {split: [example.answer for example in task.examples(split)] for split in Split}


HELD_OUT_APART = {Split.TRAIN: ["1", "2", "3"], Split.HELD_OUT: ["4", "5"]}


@pytest.mark.parametrize(
    ("train", "held_out"),
    [
        ("train.jsonl", "test.jsonl"),
        ("data/train-00000-of-00001.jsonl", "data/validation-00000-of-00001.jsonl"),
        ("main/train.jsonl", "main/test.jsonl"),
    ],
)
@pytest.mark.usefixtures("away_from_home")
def test_any_data_set_of_a_hub_is_read_by_the_names_of_its_files(
    monkeypatch: pytest.MonkeyPatch, train: str, held_out: str
) -> None:
    files = {train: lines([1, 2, 3]), held_out: lines([4, 5]), "README.md": b"rows"}
    with tiny_hub(files, "org/rows", is_dataset=True) as address:
        use_hub(monkeypatch, address)
        assert answers(task_of("org/rows")) == HELD_OUT_APART
    # What was fetched is there without the hub.
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert answers(task_of("org/rows")) == HELD_OUT_APART


@pytest.mark.usefixtures("away_from_home")
def test_a_data_set_of_one_file_is_split_and_others_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tiny_hub({"questions.jsonl": lines(range(20))}, "org/one", is_dataset=True) as address:
        use_hub(monkeypatch, address)
        assert {split: len(found) for split, found in answers(task_of("org/one")).items()} == {
            Split.TRAIN: 18,
            Split.HELD_OUT: 2,
        }
        with pytest.raises(DataError, match=r"task\.source=org/absent is not to be had"):
            task_of("org/absent").examples(Split.TRAIN)
    files = {"a.jsonl": lines([1]), "b.jsonl": lines([2])}
    with tiny_hub(files, "org/two", is_dataset=True) as address:
        use_hub(monkeypatch, address)
        with pytest.raises(
            DataError, match=r"org/two has no file named train\*; its data files are a\.jsonl, b"
        ):
            task_of("org/two").examples(Split.TRAIN)


def use_hub(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    monkeypatch.setattr(
        "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
        address + "/{repo_id}/resolve/{revision}/{filename}",
    )


@pytest.mark.usefixtures("away_from_home")
def test_all_below_a_prefix_is_fetched(s3_root: str, tmp_path: Path) -> None:
    mine = write_files(tmp_path / "mine", {"train.jsonl": lines([1, 2, 3]), "test.jsonl": lines([4, 5])})
    sync(mine, f"{s3_root}/mine")
    assert answers(task_of(f"{s3_root}/mine/")) == HELD_OUT_APART
    sync(write_files(mine, {"train.jsonl": lines([1, 2, 3, 6])}), f"{s3_root}/mine")
    assert answers(task_of(f"{s3_root}/mine/"))[Split.TRAIN] == ["1", "2", "3", "6"]
    sync(write_files(tmp_path / "one", {"one.jsonl": lines(range(20))}), s3_root)
    assert len(answers(task_of(f"{s3_root}/one.jsonl"))[Split.TRAIN]) == 18


@pytest.mark.usefixtures("away_from_home")
def test_another_data_set_for_evaluation_is_read_whatever_its_file_is_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = b'{"Problem": "1 + 1?", "Answer": 2}\n{"Problem": "1 + 2?", "Answer": "003"}\n'
    with tiny_hub({"aime_2024_problems.jsonl": rows}, "org/AIME_2024", is_dataset=True) as address:
        use_hub(monkeypatch, address)
        task = build_task(PresetSpec(name="aime", source="org/AIME_2024"))
        examples = task.examples(Split.HELD_OUT)
        right = [verdict(task, one, reply).is_correct for one in examples for reply in ("2", "3", "003")]
        assert right == [True, False, False, False, True, True]
