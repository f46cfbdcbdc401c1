"""kill -9 in the middle of runs that imitate, then the same command again: the same curve, bit for bit."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from strop.rollout import Split
from strop.tasks import build_task
from strop.tasks.generated.reverse_text import ReverseTextSpec
from tests.fixtures.attempts import Bench, describe_run
from tests.fixtures.train_here import Moment

DEATHS = (
    r"os\.rename .*/checkpoints/step-000002\.partial-[^/]*/COMPLETE",
    r"os\.rename .*/eval/reverse-text-step-000003\.json",  # right after the metrics of step 3
    r"os\.rename .*/checkpoints/step-000005\.partial-[^/]*$",  # complete, and not in its place
)


def make_bench(folder: Path, model_dir: Path, terms: str) -> Bench:
    task = build_task(ReverseTextSpec(name="reverse-text", num_train=20, num_held_out=4, max_words=1))
    rows = [
        {"prompt": task.render(example)[0].text, "completion": example.answer}
        for example in task.examples(Split.TRAIN)
        if example.answer is not None and len(example.answer) < 12
    ]
    text = describe_run("killed", model_dir).replace("[train]", f'[train]\nterms = "{terms}"')
    bench = Bench(folder, f'{text}[sft]\nsource = "rows.jsonl"\nrows_per_step = 6\n')
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return bench


@pytest.mark.slow
@pytest.mark.parametrize("terms", ["sft", "rl+sft"])
def test_a_killed_run_goes_on_to_the_same_curve(tmp_path: Path, tiny_model_dir: Path, terms: str) -> None:
    whole = make_bench(tmp_path / "whole", tiny_model_dir, terms).finish()
    # Before, between and after; the loss is that of 6 rows, or of them beside 12 rollouts.
    assert len(whole.evals) == 3
    assert [line["num_sft_rows"] for line in whole.metrics] == [6.0] * 5
    bench = make_bench(tmp_path / "killed", tiny_model_dir, terms)
    for death in DEATHS:
        assert bench.end(Moment(death)) == -signal.SIGKILL, bench.log_path.read_text()
    assert bench.finish() == whole
