"""Demonstrations as a task of rows: one file to imitate and to judge by, refused by file and row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from strop.rollout import Split
from strop.tasks import Task, build_task
from strop.tasks.rows.judged_rows import RowsSpec
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


def task_of(tmp_path: Path, train: Sequence[Any] = TRAIN, test: Sequence[Any] = TEST, **words: Any) -> Task:
    write_rows(tmp_path / "rows" / "train.jsonl", train)
    write_rows(tmp_path / "rows" / "test.jsonl", test)
    given = {"prompt": "prompt", "answer": "gold", "reward": "number", **words}
    return build_task(RowsSpec(name="rows", source=str(tmp_path / "rows"), **given))


def test_rows_are_judged_and_imitated(tmp_path: Path) -> None:
    task = task_of(tmp_path, gold="{completion}")
    example = task.examples(Split.TRAIN)[0]
    assert [(said.role, said.text) for said in task.render(example)] == [("user", "What is 2 + 2?")]
    found = [verdict(task, example, text) for text in ("It is 4.", "5", "", "<think>4")]
    assert [one.reward for one in found] == [1, 0, 0, 0]
    assert run_self_test(task, task.examples(Split.TRAIN)) == []
    model_dir = tiny_tokenizer(tmp_path / "model")
    members = read(tmp_path / "rows" / "train.jsonl", make_framing(model_dir, task)).members
    assert len(members) == len(task.examples(Split.TRAIN)) == 6


def test_a_conversation_is_posed_up_to_its_last_reply(tmp_path: Path) -> None:
    talk = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "What is 1 + 2?"},
        {"role": "assistant", "content": "3"},
    ]
    test = [{"messages": talk[:1], "gold": "1"}]
    task = task_of(tmp_path, [{"messages": talk, "gold": "3"}], test, prompt="messages")
    (example,) = task.examples(Split.TRAIN)
    assert [message.text for message in task.render(example)] == ["Hello", "Hi", "What is 1 + 2?"]
    assert verdict(task, example, "3").is_correct


def test_a_demonstration_that_misses_its_gold_fails_the_self_test(tmp_path: Path) -> None:
    rows = [{"prompt": "1 + 1?", "completion": "3", "gold": "2"}, *TRAIN]
    task = task_of(tmp_path, rows, gold="{completion}")
    (finding,) = run_self_test(task, task.examples(Split.TRAIN)[:1])
    (entry,) = finding.evidence
    assert (finding.probe, entry.reply, entry.reward) == ("gold", "3", 0.0)
