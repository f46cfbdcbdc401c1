"""Demonstrations, judges and prompts of a run file, by the commands that meet them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from strop.evaluate import read_result
from strop.record import RunDir
from strop.rollout import Split
from strop.tasks import build_task
from strop.tasks.generated import ArithmeticSpec
from tests.fixtures.commands import Run
from tests.fixtures.judge_server import judge_server, scored, shown_reply
from tests.fixtures.judged import ROWS
from tests.fixtures.row_files import write_rows

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


TASK = """name = "rows"
prompt = "prompt"
answer = "gold"
reward = "judge"
pass_score = 0.5
source = "rows.jsonl"
num_held_out = 4
rubric = "correctness"
judge_url = "{url}"
judge_model = "scripted"
judge_revision = "1"
max_reply_tokens = 8
"""


def compare(question: str) -> str:
    gold = question.partition("Reference answer:\n")[2].partition("\n")[0]
    return scored(float(shown_reply(question).strip() == gold))


def praise(question: str) -> str:
    return scored(1.0)


@pytest.fixture
def judged_file(folder: Path) -> Path:
    """A run file with a place for the judge's address, and questions."""
    write_rows(folder / "rows.jsonl", ROWS)
    path = folder / "judged.toml"
    path.write_text((folder / "run.toml").read_text().replace('name = "arithmetic"\n', TASK))
    return path


def point(path: Path, url: str) -> None:
    path.write_text(path.read_text().replace("{url}", url))


@pytest.mark.slow
def test_a_run_is_judged_by_a_model(run: Run, folder: Path, judged_file: Path) -> None:
    with judge_server(compare) as server:
        point(judged_file, server.url)
        ended = run("train", "judged.toml")
        assert ended.code == 0, ended.err
    (path,) = (found.parent for found in (folder / "runs").glob("*/run.json"))
    probes = {
        probe["probe"]: probe["status"] for probe in json.loads((path / "audit.json").read_text())["probes"]
    }
    assert probes["judge_injection"] == "pass"
    for line in RunDir.open(path).metrics.read():
        assert line["judge_unparsable_frac"] == 0.0
        assert line["failed_frac"] == 0.0


ASK = ("model.dtype=float32", "placement.threads=1")
SETTINGS = {
    "arithmetic": ("system_prompt=Be brief.", "prompt_template={a} + {b} =", 'stop=["\\n", "."]'),
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
    assert "belongs to another evaluation, there and now: task_version" in refused.err


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
