"""Demonstrations as a task: one reader for imitation and judgement, and what is refused by file and row."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from strop.errors import DataError
from strop.rollout import Split
from strop.tasks import Task, build_task
from strop.tasks.user.rows import SftJsonlSpec
from tests.fixtures.demonstrations import make_framing, read
from tests.fixtures.judging import run_self_test, verdict
from tests.fixtures.row_files import write_rows
from tests.fixtures.tiny_tokenizer import tiny_tokenizer

TRAIN: Sequence[dict[str, Any]] = [
    {"prompt": f"What is {n} + {n}?", "completion": f"{n} + {n} is {2 * n}.", "gold": str(2 * n)}
    for n in range(2, 8)
]
TEST: Sequence[dict[str, Any]] = [
    {"prompt": "What is 50 + 50?", "completion": "It is 100.", "gold": "100", "source": "b"},
    {"prompt": "What is 60 + 60?", "completion": "It is 120.", "gold": 120, "source": "a"},
]


def task_of(
    tmp_path: Path, train: Sequence[Any] = TRAIN, test: Sequence[Any] = TEST, **settings: Any
) -> Task:
    write_rows(tmp_path / "rows" / "train.jsonl", train)
    write_rows(tmp_path / "rows" / "test.jsonl", test)
    return build_task(SftJsonlSpec(name="sft-jsonl", source=str(tmp_path / "rows"), **settings))


def test_rows_are_posed_and_judged(tmp_path: Path) -> None:
    task = task_of(tmp_path)
    example = task.examples(Split.TRAIN)[0]
    assert [(said.role, said.text) for said in task.render(example)] == [("user", "What is 2 + 2?")]
    assert [(verdict(task, example, text).reward) for text in ("It is 4.", "5", "", "<think>4")] == [
        1,
        0,
        0,
        0,
    ]
    assert [(verdict(task, example, text).format_ok) for text in ("5", "none")] == [True, False]
    assert run_self_test(task, task.examples(Split.TRAIN)) == []


def test_the_same_rows_are_imitated(tmp_path: Path) -> None:
    task = task_of(tmp_path)
    model_dir = tiny_tokenizer(tmp_path / "model")
    found = read(tmp_path / "rows" / "train.jsonl", make_framing(model_dir, task))
    assert len(found.members) == len(task.examples(Split.TRAIN)) == 6


def test_a_conversation_is_posed_up_to_its_last_reply(tmp_path: Path) -> None:
    talk = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "What is 1 + 2?"},
        {"role": "assistant", "content": "3"},
    ]
    task = task_of(tmp_path, [{"messages": talk, "gold": "3", "problem": "1 + 2", "weight": 2.0}, *TRAIN])
    example = task.examples(Split.TRAIN)[0]
    assert [message.text for message in task.render(example)] == ["Hello", "Hi", "What is 1 + 2?"]
    assert example.fields["problem"] == "1 + 2"


def test_a_single_file_is_split_and_no_prompt_is_on_both_sides(tmp_path: Path) -> None:
    rows = [{**row, "completion": f"{row['completion']} {again}"} for row in TRAIN for again in ("4", "x")]
    rows = [{**row, "completion": str(row["gold"]) + "." * number} for number, row in enumerate(rows)]
    write_rows(tmp_path / "all.jsonl", rows)
    task = build_task(SftJsonlSpec(name="sft-jsonl", source=str(tmp_path / "all.jsonl"), num_held_out=3))
    prompts = {split: {task.render(e)[0].text for e in task.examples(split)} for split in Split}
    assert not prompts[Split.TRAIN] & prompts[Split.HELD_OUT]
    assert len(prompts[Split.TRAIN] | prompts[Split.HELD_OUT]) == 6


def test_rows_of_other_sources_and_without_gold_are_counted(tmp_path: Path) -> None:
    train = [{**row, "source": "a" if number < 4 else "b"} for number, row in enumerate(TRAIN)]
    train.append({"prompt": "Hm?", "completion": "Hm.", "source": "a"})
    task = task_of(tmp_path, train, subset="a")
    assert [len(task.examples(split)) for split in Split] == [4, 1]
    # Two training rows and one held-out row are of source b.
    assert task.counts == {"rows left out, of other sources": 3, "rows left out, without an answer": 1}


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        (TRAIN, {"subset": "c"}, "0 training and 0 held-out .*8 of other sources"),
        ([{"prompt": "a", "completion": "b"}], {}, "0 training and 2 held-out .*1 without an answer"),
    ],
)
def test_nothing_left_is_refused_with_what_was_seen(
    tmp_path: Path, rows: list[Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        task_of(tmp_path, rows, **settings).examples(Split.TRAIN)


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"completion": "4", "gold": "4"}, "prompt"),
        ({"prompt": "a", "gold": "4"}, "assistant"),
        *(
            ({"prompt": "a", "completion": "4", "gold": gold}, re.escape(repr(gold)))
            for gold in ([4], "four")
        ),
        *(
            (TRAIN[0] | {"prompt": "a", **more}, next(iter(more)))
            for more in ({"weight": 0}, {"answer": "4"})
        ),
        (TRAIN[0] | {"prompt": "a", "train_on": "half"}, "half"),
        ({"prompt": "What is 2 + 2?", "completion": "5", "gold": "5"}, "row 1 asks"),
    ],
)
def test_malformed_rows_are_refused_by_file_and_row(tmp_path: Path, row: dict[str, Any], named: str) -> None:
    with pytest.raises(DataError, match=rf"train\.jsonl, row 7 .*{named}"):
        task_of(tmp_path, [*TRAIN, row]).examples(Split.TRAIN)


def test_one_id_for_two_prompts_is_refused(tmp_path: Path) -> None:
    rows = [{**row, "prompt_id": "same"} for row in TRAIN[:2]]
    with pytest.raises(DataError, match=r"prompt_id='same' names different prompts in .*row 1 and .*row 2"):
        task_of(tmp_path, rows).examples(Split.TRAIN)


def test_a_demonstration_that_misses_its_gold_fails_the_self_test(tmp_path: Path) -> None:
    task = task_of(tmp_path, [{"prompt": "1 + 1?", "completion": "3", "gold": "2"}, *TRAIN])
    (finding,) = run_self_test(task, task.examples(Split.TRAIN)[:1])
    (entry,) = finding.evidence
    assert (finding.probe, entry.reply, entry.reward) == ("gold", "3", 0.0)


@pytest.mark.parametrize(
    ("answer", "gold", "right", "wrong"),
    [
        ("number", "1,200", "So it costs $1200.", "So it costs 1201."),
        ("math", r"\frac{1}{2}", r"Thus \boxed{0.5}", r"Thus \boxed{0.51}"),
        ("exact", "The Sea", "The  Sea\n", "the sea of green"),
    ],
)
def test_answers_are_compared_as_asked(
    tmp_path: Path, answer: str, gold: str, right: str, wrong: str
) -> None:
    task = task_of(
        tmp_path,
        [{"prompt": "One?", "completion": right, "gold": gold}],
        [{"prompt": "Other?", "completion": right, "gold": gold}],
        reward=answer,
    )
    (example,) = task.examples(Split.TRAIN)
    assert [verdict(task, example, text).reward for text in (gold, right, wrong)] == [1.0, 1.0, 0.0]
