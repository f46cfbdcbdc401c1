"""The commands on a task whose replies are chosen by their likelihood."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from strop.evaluate import read_result
from tests.fixtures.commands import Run

PROBE = """name = "probe"
[model]
uri = "{model}"
dtype = "float32"
[task]
name = "mixture"
[task.parts.sums]
name = "arithmetic"
max_value = 5
num_held_out = 4
max_reply_tokens = 8
[task.parts.facts]
name = "mmlu-choice"
source = "{source}"
[train]
steps = 2
prompts_per_step = 2
group_size = 2
accept = "weights: a random model for a test"
[eval]
num_samples = "none"
[placement]
threads = 1
"""


@pytest.fixture
def source(folder: Path) -> Path:
    (folder / "facts").mkdir()
    rows = [
        {"question": f"Which is {n}?", "subject": "law", "choices": ["w", "x", "y", "z"], "answer": n % 4}
        for n in range(8)
    ]
    (folder / "facts" / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "facts"


def test_the_same_letters_are_chosen_again_and_by_an_engine_apart(
    run: Run, folder: Path, source: Path, tiny_model_dir: Path
) -> None:
    words = ["eval", tiny_model_dir, "--task", "mmlu-choice", "--split", "held_out", f"source={source}"]
    words += ["model.dtype=float32", "model.prompt_format=base"]
    for kind in ("inline", "process"):
        ended = run(*words, f"placement.kind={kind}", "--out", kind)
        assert ended.code == 0, ended.err
    here, apart = (
        read_result(folder / kind / "mmlu-choice-step-000000.json") for kind in ("inline", "process")
    )
    assert here.greedy == apart.greedy
    assert (here.greedy.num_rollouts, here.greedy.num_unscored, here.greedy.truncated_frac) == (8, 0, 0.0)
    # Kept replies are judged again as they are.
    assert run("eval", folder / "inline" / "mmlu-choice-step-000000", "--rescore").code == 0


def test_a_reply_shows_that_it_was_chosen(run: Run, source: Path, tiny_model_dir: Path) -> None:
    words = ("sample", tiny_model_dir, "--task", "mmlu-choice", "num=1", "--json")
    ended = run(*words, f"source={source}", "model.dtype=float32")
    assert ended.code == 0, ended.err
    (found,) = json.loads(ended.out)
    assert found["finish_reason"] == "chosen"
    assert found["reply"] in ("A", "B", "C", "D")


@pytest.mark.slow
def test_in_a_mixture_it_is_evaluated_beside_what_is_trained(
    run: Run, folder: Path, source: Path, tiny_model_dir: Path
) -> None:
    (folder / "run.toml").write_text(PROBE.format(model=tiny_model_dir, source=source))
    ended = run("train", "run.toml")
    assert ended.code == 0, ended.err
    results = [read_result(path) for path in sorted((folder / "runs").glob("*/eval/mixture-*.json"))]
    assert [result.step for result in results] == [0, 2]
    for result in results:
        facts = result.parts["facts"]
        assert (facts.task, facts.greedy.num_rollouts, facts.greedy.num_unscored) == ("mmlu-choice", 8, 0)
        assert facts.greedy.truncated_frac == 0.0
    (folder / "run.toml").write_text(PROBE.format(model=tiny_model_dir, source=source).replace('"none"', "2"))
    ended = run("train", "run.toml", "--new")
    assert ended.code != 0
    assert "2 sampled rollouts per example of task mixture, whose replies are chosen" in ended.err
