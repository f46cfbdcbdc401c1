"""`strop train` and `strop plan` on run files with demonstrations."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from strop.record import RunDir
from strop.record.rollouts import read_rollouts, write_rollouts
from strop.rollout import FinishReason, Outcome, Split
from strop.tasks import build_task
from strop.tasks.generated.arithmetic import ArithmeticSpec
from strop.tokenizer import Tokenizer
from tests.fixtures.commands import Run

SFT = '[sft]\nsource = "rows.jsonl"\nrows_per_step = 4\n'


@pytest.fixture
def sft_file(folder: Path) -> Path:
    """A run file beside eight sums that are right."""
    task = build_task(ArithmeticSpec())
    rows = [
        {"prompt": task.render(example)[0].text, "completion": example.answer}
        for example in task.examples(Split.TRAIN)[:8]
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = (folder / "run.toml").read_text().replace("[train]\n", '[train]\nterms = "sft"\n')
    path = folder / "sft.toml"
    path.write_text(text + SFT)
    return path


def test_a_model_is_fine_tuned_evaluated_and_reported(folder: Path, run: Run, sft_file: Path) -> None:
    # All rows in each step, so that the second one is measured on what the first has learned.
    ended = run("train", "sft.toml", "sft.rows_per_step=8")
    assert ended.code == 0, ended.err
    lines = ended.out.splitlines()
    assert [line.split()[0] for line in lines[:6]] == [
        *("before", "after", "change", "gained", "pace", "report")
    ]
    (path,) = (found.parent for found in (folder / "runs").glob("*/run.json"))
    record = RunDir.open(path)
    assert record.is_finished
    assert len(str(record.state.facts["made_of"]["demonstrations"])) == 64
    losses = [line["loss"] for line in record.metrics.read()]
    assert losses[1] < losses[0]
    assert "8 demonstrations from" in ended.err
    assert "step 2/2  loss " in ended.err
    assert "sft" in (path / "report.html").read_text()
    # And a finished run says so.
    assert run("train", "sft.toml", "sft.rows_per_step=8", f"output.dir={path}").code == 76


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("sft.source=gone.jsonl", "gone.jsonl does not exist"),
        ("sft.sorce=rows.jsonl", "did you mean sft.source?"),
        ("sft.rows_per_step=9", "sft.rows_per_step=9 and there are 8 demonstrations"),
        ("sft.subset=x", "chose none of its rows, 8 of source none"),
    ],
)
def test_what_cannot_be_imitated_is_refused(
    folder: Path, run: Run, sft_file: Path, word: str, words: str
) -> None:
    ended = run("train", "sft.toml", word)
    assert ended.code == 2
    assert words in ended.err
    assert ended.out == ""
    # Seen before a run directory is made.
    assert not (folder / "runs").exists()


def test_settings_of_rollouts_are_named_as_unused(folder: Path, run: Run, sft_file: Path) -> None:
    ended = run("plan", "sft.toml", "algorithm.name=dapo")
    notices = [line for line in ended.err.splitlines() if line.startswith("notice: ")]
    # Of the file, both sizes of a step of rollouts; the file's name is theirs, not the default's.
    assert [line.split()[1].partition("=")[0] for line in notices] == [
        "algorithm.name",
        "train.prompts_per_step",
        "train.group_size",
    ]
    assert notices[0].endswith("='dapo' (override) is not used: train.terms='sft' (sft.toml:8)")


def test_a_plan_counts_the_demonstrations(folder: Path, run: Run, sft_file: Path) -> None:
    ended = run("plan", "sft.toml", "--json")
    assert ended.code == 0, ended.err
    planned = json.loads(ended.out)
    schedule = planned["schedule"]
    # 2 steps of 4 of 8 rows are one pass.
    assert (schedule["given_per_step"], schedule["num_given_epochs"]) == (4, 1.0)
    assert (schedule["rollouts_per_step"], schedule["num_epochs"]) == (0, None)
    assert schedule["given"].startswith("8 demonstrations from")
    assert planned["time"] is not None
    assert {part["name"] for part in planned["time"]["step_parts"]} >= {"learn"}
    names = {value["name"] for value in planned["algorithm"]}
    assert {"train.terms", "sft.source", "weight of a demonstrated token"} <= names
    assert "algorithm.name" not in names
    shown = run("plan", "sft.toml", "--all")
    assert "demonstrations per step" in shown.out
    assert "rollouts per step" not in shown.out


def test_a_mixed_plan_has_room_for_the_sum_of_both_gradients(folder: Path, run: Run, sft_file: Path) -> None:
    plans = [json.loads(run("plan", "sft.toml", f"train.terms={t}", "--json").out) for t in ("sft", "rl+sft")]
    parts = [{part["name"]: part["amount"] for part in plan["memory"]["parts"]} for plan in plans]
    name = "sum of the terms' gradients (fp32)"
    assert name not in parts[0]
    assert parts[1][name] == parts[1]["gradients (fp32)"]


def test_a_plan_without_the_data_says_what_it_does_not_know(folder: Path, run: Run, sft_file: Path) -> None:
    ended = run("plan", "sft.toml", "sft.source=gone.jsonl", "--json")
    assert ended.code == 0, ended.err
    planned = json.loads(ended.out)
    assert planned["time"]["step_s"] > 0
    assert "given_tokens_mean" in {one["name"] for one in planned["assumptions"]}
    assert any("gone.jsonl is not on this machine" in text for text in planned["unknown"])


def end_one(run_path: Path) -> None:
    """Let one reply of a run be whole and wrong, and all others be cut, whatever a random model says."""
    tokenizer = Tokenizer.load(run_path / "checkpoints" / "step-000002" / "model")
    paths = sorted((run_path / "rollouts").iterdir())
    for path in paths:
        rollouts = [replace(r, outcome=replace(r.outcome, truncated=True)) for r in read_rollouts(path)]
        if path == paths[0]:
            asked, said = rollouts[0].turns
            spoken_ids = tokenizer.encode("no")
            ended = replace(
                said,
                text="no",
                token_ids=np.append(spoken_ids, np.int32(tokenizer.eos_id)),
                logprobs=np.full(len(spoken_ids) + 1, -1.0, dtype=np.float32),
                finish_reason=FinishReason.EOS,
            )
            outcome = Outcome(parts={"correct": 0.0}, is_correct=False)
            rollouts[0] = replace(rollouts[0], turns=(asked, ended), outcome=outcome)
        write_rollouts(path, rollouts)


def test_a_run_is_imitated(folder: Path, run: Run, finished_run: Path, sft_file: Path) -> None:
    end_one(finished_run)
    word = f"sft.source={finished_run}"
    # Nothing cut is imitated.
    whole = ("sft.min_reward=0.0", "sft.rows_per_step=1")
    ended = run("train", "sft.toml", word, *whole)
    assert ended.code == 0, ended.err
    assert "1 demonstrations from" in ended.err
    assert "(7 rollouts without a whole reply)" in ended.err
    # None of them is right.
    ended = run("train", "sft.toml", word)
    assert ended.code == 2
    assert "gives no demonstration: 8 rollouts are recorded, " in ended.err
    assert "1 rollouts below sft.min_reward" in ended.err
