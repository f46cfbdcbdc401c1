"""kill -9 in the middle of runs that imitate, then the same command again: the same curve, bit for bit.

Attempts are processes of their own, forked from a server that has imported what they need.
"""

from __future__ import annotations

import json
import multiprocessing
import signal
from pathlib import Path

import pytest

from strop.record import list_runs
from strop.rollout import Split
from strop.spec import ReverseTextSpec
from strop.tasks import build_task
from tests.fixtures.tiny_run import Curve, read_curve
from tests.fixtures.train_here import train_in_child

RUN_FILE = """
name = "killed"
seed = 3
[model]
uri = "{model}"
dtype = "float32"
[task]
name = "reverse-text"
num_train = 20
num_held_out = 4
max_words = 1
max_reply_tokens = 12
[optimizer]
lr = 1e-3
[train]
terms = "{terms}"
steps = 5
prompts_per_step = 3
rollouts_per_prompt = 4
checkpoint_every = 2
accept = "weights: a random model for a test"
[sft]
source = "rows.jsonl"
rows_per_step = 6
[eval]
every = 3
num_examples = 2
num_samples = 2
[placement]
threads = 1
"""
DEATHS = (
    r"os\.rename .*/checkpoints/step-000002\.partial-[^/]*/COMPLETE",
    r"os\.rename .*/eval/reverse-text-step-000003\.json",  # right after the metrics of step 3
    r"os\.rename .*/checkpoints/step-000005\.partial-[^/]*$",  # complete, and not in its place
)


def write_run(folder: Path, model_dir: Path, terms: str) -> Path:
    folder.mkdir()
    task = build_task(ReverseTextSpec(name="reverse-text", num_train=20, num_held_out=4, max_words=1))
    rows = [
        {"prompt": task.render(example)[0].content, "completion": example.answer}
        for example in task.examples(Split.TRAIN)
        if example.answer is not None and len(example.answer) < 12
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_file = folder / "run.toml"
    run_file.write_text(RUN_FILE.format(model=model_dir, terms=terms))
    return run_file


def train(run_file: Path, die_at: str | None = None) -> int | None:
    """Give the command once; return how it ended."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["strop.train.loop", "strop.launch.local"])
    arguments = [str(run_file), f"output.root={run_file.parent / 'runs'}"]
    process = context.Process(
        target=train_in_child, args=(arguments, str(run_file.parent / "log.txt"), die_at)
    )
    process.start()
    process.join(120)
    return process.exitcode


def finish(run_file: Path) -> Curve:
    assert train(run_file) == 0, (run_file.parent / "log.txt").read_text()
    (run,) = list_runs(run_file.parent / "runs")
    assert run.is_finished
    return read_curve(run.path)


@pytest.mark.slow
@pytest.mark.parametrize("terms", ["sft", "rl+sft"])
def test_a_killed_run_goes_on_to_the_same_curve(tmp_path: Path, tiny_model_dir: Path, terms: str) -> None:
    whole = finish(write_run(tmp_path / "whole", tiny_model_dir, terms))
    # Before, between and after; the loss is that of 6 rows, or of them beside 12 rollouts.
    assert len(whole.evals) == 3
    assert [line["num_sft_rows"] for line in whole.metrics] == [6.0] * 5
    run_file = write_run(tmp_path / "killed", tiny_model_dir, terms)
    for death in DEATHS:
        assert train(run_file, death) == -signal.SIGKILL, (run_file.parent / "log.txt").read_text()
    assert finish(run_file) == whole
