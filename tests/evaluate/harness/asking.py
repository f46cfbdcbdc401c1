"""A task of the user's own for lm-eval, and `strop eval --harness lm-eval` on it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from strop.cli import main
from strop.evaluate.harness import HarnessResult
from strop.tokenizer import Tokenizer
from tests.fixtures.tiny_model import chain_model
from tests.fixtures.tiny_tokenizer import EOS_TEXT, tiny_tokenizer

TASK = """task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    train: {folder}/rows.jsonl
    test: {folder}/rows.jsonl
training_split: train
test_split: test
fewshot_split: train
doc_to_text: "{{{{question}}}}"
metadata:
  version: 1.0
metric_list:
  - metric: {metric}
    aggregation: mean
    higher_is_better: true
"""
GENERATED = """output_type: generate_until
doc_to_target: "the"
generation_kwargs:
  until: ["."]
  max_gen_toks: {budget}
"""
CHOSEN = """output_type: multiple_choice
doc_to_choice: ["7", "42", "none"]
doc_to_target: 0
"""
GROUP = """group: both
task: [hats, caps]
aggregate_metric_list:
  - metric: acc
    weight_by_size: true
"""
CUT, STOPPED, ENDED = "What is cut?", "What is stopped!", "What has ended;"
"""Questions for `talking_model`: it writes 'the' without an end, the stop string, or its terminator."""


def talking_model(folder: Path) -> Path:
    """Return a model that writes 't', 'h', 'e' again and again, which encode as fewer tokens together."""
    tokens = tiny_tokenizer(folder / "tokenizer")
    (t, h, e, stop, question, mark, semicolon) = (
        int(Tokenizer.load(tokens).encode(text)[0]) for text in ("t", "h", "e", ".", "?", "!", ";")
    )
    (end,) = Tokenizer.load(tokens).encode(EOS_TEXT).tolist()
    after = {t: h, h: e, e: t, question: t, mark: stop, semicolon: int(end), stop: t}
    return chain_model(folder / "model", after, t)


def write_tasks(folder: Path, questions: Sequence[str], *, budget: int = 16) -> Path:
    """Write the tasks 'hats', which generates, and 'caps', which chooses, and the group of 'both'."""
    folder.mkdir(exist_ok=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps({"question": one}) + "\n" for one in questions))
    for name, metric, form in (("hats", "exact_match", GENERATED), ("caps", "acc", CHOSEN)):
        text = TASK.format(name=name, folder=folder, metric=metric) + form.format(budget=budget)
        (folder / f"{name}.yaml").write_text(text)
    (folder / "both.yaml").write_text(GROUP)
    return folder


def ask(model: Path | str, out: Path, task: str, *words: str) -> HarnessResult:
    """Evaluate, and return the result."""
    asked = ["eval", str(model), "--harness", "lm-eval", "--task", task, "--out", str(out)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STROP_OFFLINE", "1")
        assert main([*asked, *words]) == 0
    return HarnessResult.model_validate_json((out / f"lm-eval-{task}-step-000000.json").read_bytes())


def samples_of(out: Path, task: str) -> list[dict[str, Any]]:
    """Return lm-eval's samples."""
    lines = (out / f"lm-eval-{task}-step-000000.samples.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]
