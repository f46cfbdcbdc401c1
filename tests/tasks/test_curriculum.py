"""Order files: the examples they name, in their order, and nothing silently lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from strop.errors import DataError
from strop.rollout import Split
from strop.spec import load_spec
from strop.spec.task import TaskSection
from strop.tasks import build_task
from strop.tasks.generated import ArithmeticSpec
from strop.tasks.mixture import Curriculum
from strop.tasks.task import describe_counts
from strop.train.batch import ExampleSchedule
from tests.fixtures.judging import verdict

SUMS = ArithmeticSpec(min_value=1, max_value=4, num_held_out=4)
TRAIN = list(build_task(SUMS).examples(Split.TRAIN))


def write_order(path: Path, lines: list[Any]) -> str:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return str(path)


def entry(index: int, solved_frac: float | None = None) -> dict[str, Any]:
    line: dict[str, Any] = {"example_id": TRAIN[index].example_id}
    return line if solved_frac is None else line | {"solved_frac": solved_frac, "num_samples": 8}


def ordered(path: Path, lines: list[Any]) -> Curriculum:
    file = write_order(path / "order.jsonl", lines)
    task = build_task(SUMS.model_copy(update={"order_file": file}))
    assert isinstance(task, Curriculum)
    return task


def test_the_run_trains_on_the_named_examples_in_their_order_in_every_epoch(tmp_path: Path) -> None:
    task = ordered(tmp_path, [entry(5), entry(0, 0.5), "", entry(7)])
    assert list(task.examples(Split.TRAIN)) == [TRAIN[5], TRAIN[0], TRAIN[7]]
    schedule = ExampleSchedule(
        task.examples(Split.TRAIN), seed=3, prompts_per_step=2, epoch_order=task.epoch_order
    )
    # 5 0 7 | 5 0 7: the second step takes the end of the first epoch and the begin of the second.
    assert [schedule.examples(step) for step in range(3)] == [
        [TRAIN[5], TRAIN[0]],
        [TRAIN[7], TRAIN[5]],
        [TRAIN[0], TRAIN[7]],
    ]


def test_held_out_examples_version_and_judgements_are_those_of_the_task(tmp_path: Path) -> None:
    plain, task = build_task(SUMS), ordered(tmp_path, [entry(2), entry(1)])
    assert list(task.examples(Split.HELD_OUT)) == list(plain.examples(Split.HELD_OUT))
    assert (task.version, task.name, task.limits) == (plain.version, plain.name, plain.limits)
    for text in (*plain.gold_replies(TRAIN[2]), "asdf"):
        assert verdict(task, TRAIN[2], text) == verdict(plain, TRAIN[2], text)
    assert task.render(TRAIN[2]) == plain.render(TRAIN[2])
    assert task.gold_replies(TRAIN[2]) == plain.gold_replies(TRAIN[2])


def test_dat_1_an_id_that_matches_no_example_is_refused(tmp_path: Path) -> None:
    """Incident: 4,691 ids listed, 2,731 matched, the others skipped in silence."""
    misspelt = TRAIN[3].example_id[:-1] + ("0" if TRAIN[3].example_id[-1] != "0" else "1")
    lines = [entry(0), {"example_id": misspelt}, entry(1)]
    with pytest.raises(DataError) as caught:
        ordered(tmp_path, lines).examples(Split.TRAIN)
    assert f"{tmp_path / 'order.jsonl'} names 1 ids of 3" in str(caught.value)
    assert misspelt in str(caught.value)


def test_dat_1_a_held_out_example_cannot_be_ordered_into_training(tmp_path: Path) -> None:
    held_out = build_task(SUMS).examples(Split.HELD_OUT)[0]
    with pytest.raises(DataError, match=f"no training examples of the task: {held_out.example_id}"):
        ordered(tmp_path, [{"example_id": held_out.example_id}]).examples(Split.TRAIN)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["{"], r"line 1 \{\."),
        (["[1]"], r"line 1 \[1\]"),
        ([entry(0), {"id": "x"}], 'line 2 {"id": "x"}'),
        ([entry(0), {"example_id": 1}], 'line 2 {"example_id": 1}'),
        ([entry(0), entry(0)], "line 2 .*none twice"),
        ([], "names no example"),
    ],
)
def test_a_malformed_order_file_is_refused(tmp_path: Path, lines: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        ordered(tmp_path, lines).examples(Split.TRAIN)


def test_a_line_ends_where_json_lines_end(tmp_path: Path) -> None:
    # A text may hold U+2028 as it is, which splits lines elsewhere.
    lines = [json.dumps({**entry(0), "note": "a\u2028b"}, ensure_ascii=False), entry(1)]
    assert list(ordered(tmp_path, lines).examples(Split.TRAIN)) == TRAIN[:2]


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.jsonl"):
        build_task(SUMS.model_copy(update={"order_file": str(tmp_path / "none.jsonl")})).examples(Split.TRAIN)


# Files of other launchers: one id, one row number or one value of a column a line.


@pytest.fixture
def rows_task(tmp_path: Path) -> TaskSection:
    """Eight training rows with a column of names; the sixth asks what the second asks."""
    rows = [{"id": f"q-{n}", "question": f"{n % 5} + 1?", "answer": f"#### {n % 5 + 1}"} for n in range(6)]
    rows[5] |= {"question": "1 + 1?", "answer": "#### 2"}
    for name, split in (("train", rows), ("test", [{"id": "t", "question": "9 + 9?", "answer": "#### 18"}])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in split))
    return load_spec(None, ["name=x", "task.name=gsm8k", f"task.source={tmp_path}"]).spec.task


def ask_order(section: TaskSection, path: Path) -> list[str]:
    task = build_task(section.model_copy(update={"order_file": str(path)}))
    return [str(example.fields["question"]) for example in task.examples(Split.TRAIN)]


def test_row_numbers_are_read_as_they_are(rows_task: TaskSection, tmp_path: Path) -> None:
    order = tmp_path / "order.txt"
    order.write_text("3\n0\n\n005\n")
    assert ask_order(rows_task, order) == ["3 + 1?", "0 + 1?", "1 + 1?"]
    order.write_text("3\n6\n")
    with pytest.raises(DataError, match=r"1 ids of 2 .*: row 6"):
        ask_order(rows_task, order)
    order.write_text("5\n1\n")
    task = build_task(rows_task.model_copy(update={"order_file": str(order)}))
    assert len(task.examples(Split.TRAIN)) == 1
    assert describe_counts(task) == "of the order file, rows that ask what another row asks: 1"


def test_ids_one_a_line_are_read_as_they_are(tmp_path: Path) -> None:
    order = tmp_path / "order.txt"
    order.write_text(f"{TRAIN[4].example_id}\n{TRAIN[1].example_id}\n")
    task = build_task(SUMS.model_copy(update={"order_file": str(order)}))
    assert list(task.examples(Split.TRAIN)) == [TRAIN[4], TRAIN[1]]
    order.write_text("3\n")
    with pytest.raises(DataError, match="row "):
        build_task(SUMS.model_copy(update={"order_file": str(order)})).examples(Split.TRAIN)


@pytest.mark.parametrize("text", ["a b\n", "a\na\n"])
def test_a_malformed_plain_file_is_refused(rows_task: TaskSection, tmp_path: Path, text: str) -> None:
    (tmp_path / "order.txt").write_text(text)
    with pytest.raises(DataError, match=r"line [12] "):
        ask_order(rows_task, tmp_path / "order.txt")
