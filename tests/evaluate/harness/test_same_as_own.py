"""One real model, asked by lm-eval 0.4.13 and by strop on the same rows: prompts and replies.

Equal weights, prompts, stops and budget; greedy, in float32 on CPU. lm-eval's data are in a folder, and
nothing is fetched.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from strop.cli import main
from strop.record.rollouts import read_rollouts
from strop.rollout import FinishReason, Rollout
from tests.evaluate.harness.asking import ask, samples_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("harness_python")]
PAIRS = ((3, 4), (10, 6), (7, 7))


def write_repository(folder: Path, rows: Mapping[str, Sequence[Any]]) -> None:
    """Write gsm8k as the hub has it; `rows`: by split."""
    (folder / "main").mkdir(parents=True)
    text = "configs:\n- config_name: main\n  data_files:\n"
    for split, of_split in rows.items():
        text += f"  - split: {split}\n    path: main/{split}.jsonl\n"
        (folder / f"main/{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in of_split))
    (folder / "README.md").write_text(f"---\n{text}---\n")


def ask_own(model: Path, out: Path, *words: str) -> list[Rollout]:
    """Return the rollouts of strop's task."""
    asked = ["eval", str(model), "--split", "held_out", "--out", str(out), *words]
    # A random cut makes it invalid, and the replies are there.
    main([*asked, "model.dtype=float32", "model.prompt_format=base"])
    (kept,) = out.glob("*/*.parquet")
    return read_rollouts(kept)


def test_sums_in_words(tmp_path: Path, smollm2_dir: Path) -> None:
    asked = "Tom has {} apples and buys {} more. How many apples does he have now?"
    rows = {
        "test": [
            {"question": asked.format(a, b), "answer": f"{a} + {b} = {a + b}\n#### {a + b}"} for a, b in PAIRS
        ],
        "train": [{"question": "And?", "answer": "#### 1"}],
    }
    write_repository(tmp_path / "openai/gsm8k", rows)
    words = (f"harness.include={tmp_path}", "harness.engine=hf", "model.dtype=float32")
    limits = ("harness.num_few_shot=0", "harness.max_reply_tokens=32")
    result = ask(smollm2_dir, tmp_path / "out", "gsm8k", *words, *limits)
    own = ("--task", "gsm8k", f"source={tmp_path}/openai/gsm8k/main", "max_reply_tokens=32")
    ours = {str(one.example.fields["question"]): one for one in ask_own(smollm2_dir, tmp_path / "out", *own)}
    samples = [one for one in samples_of(tmp_path / "out", "gsm8k") if one["filter"] == "strict-match"]
    assert len(samples) == len(PAIRS)
    num_cut = 0
    for sample in samples:
        rollout = ours[sample["doc"]["question"]]
        prompt, reply = rollout.turns
        asked_with = sample["arguments"]["gen_args_0"]
        assert asked_with["arg_0"] == prompt.text
        text = reply.text
        for stop in asked_with["arg_1"]["until"]:
            text = text.partition(stop)[0]
        assert sample["resps"] == [[text]]
        num_cut += reply.finish_reason is FinishReason.LENGTH
    assert result.truncated_frac == num_cut / len(PAIRS)
