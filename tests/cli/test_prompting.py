"""System prompt, prompt template and stop strings of a run file, by the commands that ask a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from strop.evaluate import read_result
from tests.fixtures.commands import Run

ASK = ("model.dtype=float32", "placement.threads=1")
SETTINGS = {
    "arithmetic": ("system_prompt=Be brief.", "prompt_template={a} {op} {b} =", 'stop=["\\n", "."]'),
    "gsm8k": (
        "max_reply_tokens=16",
        "source=./rows.jsonl",
        "system_prompt=Be brief.",
        "prompt_template=Solve: {question}",
        "stop=[]",
    ),
}
ASKED = {"arithmetic": " + ", "gsm8k": "Solve: What is "}
CHAT = "<|start|>system\nBe brief.<|end|>\n<|start|>user\n"


@pytest.fixture
def rows(folder: Path) -> Path:
    rows = [{"question": f"What is {n} + 1?", "answer": f"It is.\n#### {n + 1}"} for n in range(20)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize("task", SETTINGS)
@pytest.mark.parametrize("prompt_format", ["chat", "base"])
def test_plan_sample_and_eval_ask_as_the_run_says(
    task: str, prompt_format: str, run: Run, rows: Path, tiny_model_dir: Path
) -> None:
    opening = CHAT if prompt_format == "chat" else "Be brief.\n\n"
    format_ = f"model.prompt_format={prompt_format}"
    own = [f"task.{word}" for word in (f"name={task}", *SETTINGS[task])]
    planned = json.loads(run("plan", "run.toml", format_, *own, "eval.num_examples=2", "--json").out)[
        "prompt"
    ]
    assert planned["text"].startswith(opening)
    assert ASKED[task] in planned["text"]
    assert planned["stops"][1:] == (["\n", "."] if task == "arithmetic" else [])
    words = ("--task", task, *SETTINGS[task], *ASK, format_)
    ended = run("sample", tiny_model_dir, *words, "num=1", "--json")
    assert ended.code == 0, ended.err
    (sample,) = json.loads(ended.out)
    assert sample["prompt"].startswith(opening)
    # A random model goes on to its limit: the result is called invalid, and is there.
    run("eval", tiny_model_dir, *words, "--split", "held_out", "--limit", "2", "--out", "results")
    result = read_result(rows / "results" / f"{task}-step-000000.json")
    assert (result.first_prompt or "").startswith(opening)
    assert ASKED[task] in (result.first_prompt or "")
    assert result.stop_strings == (["\n", "."] if task == "arithmetic" else [])
    # Another wording is another task version: its replies are not taken for these.
    others = [word for word in words if not str(word).startswith("system_prompt")]
    refused = run("eval", tiny_model_dir, *others, "--split", "held_out", "--limit", "2", "--out", "results")
    assert refused.code == 76
    assert "belongs to another evaluation: task_version" in refused.err


def test_a_wrong_field_is_refused_by_name(run: Run, rows: Path, tiny_model_dir: Path) -> None:
    words = ("name=gsm8k", "source=./rows.jsonl", "prompt_template=Solve: {problem}")
    own = [f"task.{word}" for word in words]
    for ended in (
        run("plan", "run.toml", *own),
        run("train", "run.toml", *own),
        run("eval", tiny_model_dir, "--task", "gsm8k", *words[1:], *ASK, "--split", "held_out"),
    ):
        assert (ended.code, ended.out) == (2, ""), ended.err
        assert "task.prompt_template names {problem}" in ended.err
        assert "question, solution" in ended.err
        assert "Traceback" not in ended.err


def test_kept_replies_are_judged_anew_under_the_same_words(
    run: Run, folder: Path, tiny_model_dir: Path
) -> None:
    """Incident: a text with a character that JSON writes plainly and TOML does not came back in quotes."""
    words = ("--task", "arithmetic", "system_prompt=Be\x7f\nbrief.", 'stop=["\\u007f", "\\n"]', *ASK)
    ended = run("eval", tiny_model_dir, *words, "--split", "held_out", "--limit", "2", "--out", "results")
    result = read_result(folder / "results" / "arithmetic-step-000000.json")
    assert result.stop_strings == ["\x7f", "\n"], ended.err
    (entry,) = json.loads(run("eval", "results", "--rescore", "--json").out)
    assert entry["result"]["task_version"] == result.task_version
