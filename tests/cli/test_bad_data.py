"""Data, by the commands that meet it: what is wrong has a message that names the place, and no result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.commands import Ended, Run
from tests.store.test_listed import sync

Row = dict[str, Any]
GOOD: list[Row] = [{"question": f"What is {n} + 1?", "answer": f"It is.\n#### {n + 1}"} for n in range(20)]
ASK = ("model.dtype=float32", "placement.threads=1", "--split", "held_out")


def write(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))


def evaluate(run: Run, model: Path, *words: object) -> Ended:
    return run("eval", model, "--task", "gsm8k", "source=./rows.jsonl", *ASK, "--limit", "2", *words)


@pytest.mark.parametrize(
    ("rows", "piece"),
    [
        ([*GOOD, "{not JSON\n"], "rows.jsonl cannot be read (line 21: "),
        ([*GOOD, "7\n"], "rows.jsonl cannot be read (line 21 is a int)"),
        ([*GOOD, {"question": "1 + 1?"}], "rows.jsonl, row 21 has columns {'question': 'str'}"),
        ([*GOOD, {"question": "1 + 1?", "answer": None}], "row 21 has columns {'question': 'str', 'answer'"),
        ([*GOOD, {"question": "1 + 1?", "answer": "two"}], "rows.jsonl, row 21"),
        ([], "has no training rows"),
    ],
    ids=["no JSON", "no table", "missing column", "null", "no readable answer", "empty"],
)
def test_malformed_data_is_refused_by_its_place(
    rows: list[Any], piece: str, run: Run, folder: Path, tiny_model_dir: Path
) -> None:
    write(folder / "rows.jsonl", rows)
    before = {path.name for path in folder.iterdir()}
    for ended in (
        evaluate(run, tiny_model_dir),
        run("plan", "run.toml", "task.name=gsm8k", "task.source=./rows.jsonl"),
        run("train", "run.toml", "task.name=gsm8k", "task.source=./rows.jsonl"),
    ):
        assert (ended.code, ended.out) == (2, ""), ended.err
        assert piece in ended.err
        assert "Allowed: " in ended.err
        assert "Traceback" not in ended.err
    assert {path.name for path in folder.iterdir()} - before <= {"evals", "runs"}
    assert list(folder.rglob("*.json")) == []


def test_a_question_that_stands_twice_is_one_example(run: Run, folder: Path, tiny_model_dir: Path) -> None:
    write(folder / "rows.jsonl", [*GOOD, *GOOD])
    ended = evaluate(run, tiny_model_dir, "--limit", "99")
    assert ended.code == 2
    # 20 different rows, of which a tenth of all 40 is held out.
    assert "99 examples of the held_out split of task gsm8k. Allowed: 1 to 4" in ended.err


@pytest.mark.parametrize(
    ("lines", "piece"),
    [(["feedfeedfeedfeed"], "1 of 1 ids in "), (["ID", "ID"], "a second time")],
    ids=["unmatched", "duplicate"],
)
def test_a_curriculum_with_wrong_ids_is_refused(lines: list[str], piece: str, run: Run, folder: Path) -> None:
    from strop.rollout import Split
    from strop.tasks import build_task
    from strop.tasks.generated.arithmetic import ArithmeticSpec

    real = build_task(ArithmeticSpec()).examples(Split.TRAIN)[0].example_id
    write(folder / "order.jsonl", [{"example_id": real if line == "ID" else line} for line in lines])
    for command in ("plan", "train"):
        ended = run(command, "run.toml", "task.order_file=./order.jsonl")
        assert (ended.code, ended.out) == (2, ""), ended.err
        assert piece in ended.err
        assert "Traceback" not in ended.err


@pytest.mark.usefixtures("away_from_home")
def test_data_that_another_tool_sent_has_a_notice_in_every_command(
    s3_root: str, run: Run, folder: Path, tiny_model_dir: Path
) -> None:
    data = folder / "data"
    data.mkdir()
    write(data / "train.jsonl", GOOD)
    write(data / "test.jsonl", GOOD[:4])
    sync(data, f"{s3_root}/data")
    setting = f"source={s3_root}/data"
    lines = [f'task.source = "{s3_root}/data"', "eval.num_examples = 2", 'eval.num_samples = "none"']
    lines += ['name = "n"', 'task.name = "gsm8k"', 'model.dtype = "float32"']
    (folder / "n.toml").write_text("\n".join(lines))
    commands: list[tuple[object, ...]] = [
        ("tasks", "check", "gsm8k", setting, "num=2"),
        ("sample", tiny_model_dir, "--task", "gsm8k", setting, "model.dtype=float32", "num=1"),
        ("eval", tiny_model_dir, "--task", "gsm8k", setting, *ASK, "--limit", "2", "--out", "a"),
        ("eval", tiny_model_dir, "--config", "n.toml", "--out", "b"),
    ]
    for words in commands:
        ended = run(*words)
        told = [line for line in ended.err.splitlines() if line.startswith("notice: ")]
        assert len([line for line in told if f"{s3_root}/data has no COMPLETE" in line]) == 1, (
            words,
            ended.err,
        )
