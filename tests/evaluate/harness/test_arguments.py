"""What a user asks of lm-eval takes effect or is refused: shots, engine, batch, lengths, memory, any task."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from strop.cli import main
from strop.engine.vllm.environment import VLLM
from strop.errors import StropError
from strop.evaluate.harness import FreeJob, HarnessJob, HarnessResult
from strop.evaluate.harness.engine import choose_engine, engine_words
from strop.evaluate.harness.run import harness_command, stage_rows
from strop.run import harness as harness_room
from strop.spec.harness import HarnessSpec
from tests.conftest import require_system_part
from tests.fixtures.tiny_model import tiny_model

Planned = Callable[..., list[HarnessJob | FreeJob]]


def write_rows(folder: Path) -> Path:
    for name, first, number in (("train", 0, 12), ("test", 50, 3)):
        rows = [
            {"question": f"Ann has {n} hats and buys {n}. How many?", "answer": f"{n} + {n}\n#### {2 * n}"}
            for n in range(first, first + number)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def planned(tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Planned:
    """Return what `strop eval --harness lm-eval` would run, without running it."""
    found: list[HarnessJob | FreeJob] = []

    def note(job: HarnessJob | FreeJob, out_dir: Path, **_: Any) -> None:
        found.append(job)

    monkeypatch.setattr(harness_room, "run_harness", note)
    monkeypatch.setattr(harness_room, "ensure_environment", lambda environment, say: environment.python)
    # Large enough for any budget here; the tiny model has few positions.
    monkeypatch.setattr(harness_room, "refuse_small_model", lambda job: None)

    def plan(task: str, *words: str) -> list[HarnessJob | FreeJob]:
        found.clear()
        asked = ["eval", str(tiny_model_dir), "--harness", "lm-eval", "--task", task, "--split", "held_out"]
        main([*asked, *words])
        return list(found)

    return plan


def words_of(job: HarnessJob | FreeJob, folder: Path) -> list[str]:
    if isinstance(job, HarnessJob):
        stage_rows(job, folder)
    return harness_command(job, folder)


def value_of(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


@pytest.mark.parametrize("word", ["num_few_shot=8", "gsm8k.num_few_shot=8", "harness.num_few_shot=8"])
def test_eight_shots_that_are_asked_for_are_eight_shots(planned: Planned, tmp_path: Path, word: str) -> None:
    """Accepted was `num_few_shot=8`, and five shots ran."""
    (job,) = planned("gsm8k", f"source={write_rows(tmp_path)}", word, "harness.engine=hf")
    assert value_of(words_of(job, tmp_path), "--num_fewshot") == "8"


def test_every_setting_is_handed_over(planned: Planned, tmp_path: Path) -> None:
    (job,) = planned(
        "gsm8k",
        f"source={write_rows(tmp_path)}",
        *("harness.engine=hf", "harness.batch_size=16", "harness.max_model_tokens=48", "max_reply_tokens=99"),
        *(
            "harness.seed=7",
            "harness.chat_template=true",
            "harness.system_prompt=Be brief.",
            "model.dtype=float32",
        ),
        *("harness.gen_kwargs=temperature=0.6,top_p=0.9", "harness.model_args=trust_remote_code=true"),
        *('harness.arguments=["--fewshot_as_multiturn", "true"]', "placement.threads=1"),
    )
    words = words_of(job, tmp_path)
    for flag, value in (
        ("--batch_size", "16"),
        ("--seed", "7"),
        ("--system_instruction", "Be brief."),
        ("--fewshot_as_multiturn", "true"),
        ("--gen_kwargs", '{"temperature": 0.6, "top_p": 0.9, "max_gen_toks": 99}'),
    ):
        assert value_of(words, flag) == value
    assert "--apply_chat_template" in words
    arguments = json.loads(value_of(words, "--model_args"))
    assert (arguments["max_length"], arguments["trust_remote_code"], arguments["dtype"]) == (
        48,
        True,
        "float32",
    )
    assert job.threads == 1
    # A score that was asked otherwise says so, and is compared with no published one.
    assert "system_prompt=Be brief." in job.arguments
    assert len(job.arguments) == 6


def test_vllm_takes_memory_lengths_and_parallelism(tmp_path: Path) -> None:
    engine = choose_engine(HarnessSpec(engine="hf"), None)
    for kind, settings, expected in (
        (
            "vllm",
            HarnessSpec(gpu_memory_frac=0.5, tensor_parallel=2, max_model_tokens=64),
            "tensor_parallel_size",
        ),
        ("hf", HarnessSpec(tensor_parallel=2), "parallelize"),
    ):
        asked = type(engine)(kind=kind, python=tmp_path)  # type: ignore[arg-type]
        words = engine_words(asked, settings, model_path=tmp_path, dtype="float32", max_positions=128)
        arguments = json.loads(value_of(words, "--model_args"))
        assert arguments[expected] == (2 if kind == "vllm" else True)
        if kind == "vllm":
            assert (arguments["gpu_memory_utilization"], arguments["max_model_len"]) == (0.5, 64)
            assert value_of(words, "--batch_size") == "auto"


def test_any_task_of_the_harness_is_asked_as_it_has_it(planned: Planned, tmp_path: Path) -> None:
    (job,) = planned("hellaswag", "--num-examples", "7", "harness.engine=hf", f"harness.include={tmp_path}")
    assert isinstance(job, FreeJob)
    words = words_of(job, tmp_path)
    assert value_of(words, "--tasks") == "hellaswag"
    assert (value_of(words, "--limit"), value_of(words, "--include_path")) == ("7", str(tmp_path))
    assert "--num_fewshot" not in words
    assert "--gen_kwargs" not in words


@pytest.mark.parametrize(
    ("task", "words", "message"),
    [
        ("gsm8k", ["mode=strict"], "with task.mode. Allowed: settings that choose examples"),
        ("gsm8k", ["sampling.temperature=0.6"], "with sampling.temperature=0.6. Allowed: model.dtype"),
        ("gsm8k", ["model.prompt_format=chat"], "with model.prompt_format='chat'"),
        ("gsm8k", ["seed=3"], "with seed=3"),
        (
            "gsm8k",
            ["num_few_shot=8", "harness.num_few_shot=4"],
            "task.num_few_shot=8 and harness.num_few_shot=4",
        ),
        ("gsm8k_cot", ["num_few_shot=9"], "harness.num_few_shot=9 with task gsm8k_cot. Allowed: 0 to 8"),
        ("gsm8k", ["harness.engine=hf", "harness.gpu_memory_frac=0.5"], "harness.gpu_memory_frac=0.5 with"),
        ("gsm8k", ["harness.batch_size=many"], "harness.batch_size='many'"),
        ("gsm8k", ["harness.num_fewshot=8"], "unknown key harness.num_fewshot"),
        ("gsm8k", ['harness.arguments=["--num_fewshot", "8"]'], "strop gives it itself"),
        ("gsm8k", ["harness.engine=hf", "harness.model_args=dtype=float16"], "with 'dtype=float16'"),
        ("hellaswag", ["harness.engine=hf", "num_examples=3"], "num_examples"),
        ("hellaswag", ["harness.engine=hf", "harness.gen_kwargs=max_gen_toks=3"], "with 'max_gen_toks=3'"),
        ("hellaswag", ["harness.engine=hf", "harness.model_args=max_gen_toks=3"], "with 'max_gen_toks=3'"),
        ("hellaswag", ["harness.engine=hf", "engine.kind=vllm"], "engine.kind='vllm' with harness.engine"),
    ],
)
def test_what_would_not_take_effect_is_refused(
    planned: Planned,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    task: str,
    words: list[str],
    message: str,
) -> None:
    data = [f"source={write_rows(tmp_path)}"] if task.startswith("gsm8k") else []
    for job in planned(task, *data, *words):
        # Said where the command line is made, for what only lm-eval's engines know.
        with pytest.raises(StropError) as caught:
            words_of(job, tmp_path)
        assert message in str(caught.value)
        return
    assert message in " ".join(capsys.readouterr().err.split())


# The real lm-eval 0.4.13 from here on, in its own environment.

OWN_TASK = """task: hats
dataset_path: json
dataset_kwargs:
  data_files:
    train: {folder}/train.jsonl
    test: {folder}/test.jsonl
training_split: train
test_split: test
fewshot_split: train
output_type: generate_until
doc_to_text: "Q: {{{{question}}}}\\nA:"
doc_to_target: "{{{{answer}}}}"
generation_kwargs:
  until: ["\\n"]
  max_gen_toks: 4
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
metadata:
  version: 1.0
"""


def ask(model: Path, out: Path, task: str, *words: str) -> HarnessResult:
    asked = ["eval", str(model), "--harness", "lm-eval", "--task", task, "--split", "held_out"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STROP_OFFLINE", "1")
        assert main([*asked, "--out", str(out), "model.dtype=float32", *words]) == 0
    return HarnessResult.read((out / f"lm-eval-{task}-step-000000.json").read_bytes())


def end_half_way(model: Path, out: Path, task: str, *words: str) -> None:
    """Start an evaluation, and end it when its first reply is kept."""
    asked = ["eval", str(model), "--harness", "lm-eval", "--task", task, "--split", "held_out"]
    command = [sys.executable, "-m", "strop.cli", *asked, "--out", str(out), "model.dtype=float32", *words]
    child = subprocess.Popen(command, env={**os.environ, "STROP_OFFLINE": "1"})
    while child.poll() is None and not count_kept(out):
        time.sleep(0.01)
    child.terminate()
    assert child.wait(60) == -signal.SIGTERM


def count_kept(out: Path) -> int:
    with contextlib.suppress(sqlite3.OperationalError):
        for path in out.glob("*.replies-*/part-0_rank0.db"):
            with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as kept:
                return int(kept.execute("SELECT count(*) FROM unnamed").fetchone()[0])
    return 0


def samples_of(out: Path, task: str, stem: str = "lm-eval") -> list[dict[str, Any]]:
    lines = (out / f"{stem}-{task}-step-000000.samples.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.slow
@pytest.mark.usefixtures("harness_python")
def test_a_task_that_the_harness_does_not_know_is_told_in_its_words(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["eval", str(tiny_model_dir), "--harness", "lm-eval", "--task", "hatz", "--split", "held_out"]
    assert main([*asked, "--out", str(tmp_path), "harness.engine=hf"]) == 1
    assert "lm-eval ended with" in (said := capsys.readouterr().err)
    assert "hatz" in said.partition("lm-eval ended with")[2]


@pytest.mark.slow
@pytest.mark.usefixtures("harness_python")
def test_shots_that_a_task_does_not_allow_are_refused_by_name(tmp_path: Path, tiny_model_dir: Path) -> None:
    text = OWN_TASK.format(folder=write_rows(tmp_path)) + "num_fewshot: 0\n"
    (tmp_path / "hats.yaml").write_text(text)
    asked = ["eval", str(tiny_model_dir), "--harness", "lm-eval", "--task", "hats", "--split", "held_out"]
    words = ("harness.num_few_shot=2", "harness.engine=hf", f"harness.include={tmp_path}")
    assert main([*asked, "--out", str(tmp_path / "out"), *words]) == 1
    log = (tmp_path / "out" / "lm-eval-hats-step-000000.log").read_text()
    assert "harness.num_few_shot=2, and hats shows 0: lm-eval's task allows no other" in log


@pytest.mark.slow
@pytest.mark.usefixtures("harness_python")
def test_a_task_of_the_users_own_by_transformers_and_the_same_by_vllm(
    tmp_path: Path, smollm2_dir: Path
) -> None:
    (tmp_path / "hats.yaml").write_text(OWN_TASK.format(folder=write_rows(tmp_path)))
    words = [f"harness.include={tmp_path}", "harness.num_few_shot=2", "harness.max_model_tokens=128"]
    words += ["harness.max_reply_tokens=6"]
    by_hf = ask(smollm2_dir, tmp_path / "hf", "hats", *words, "harness.engine=hf")
    assert (by_hf.num_fewshot, by_hf.max_reply_tokens, by_hf.num_examples) == (2, 6, 3)
    assert by_hf.engine == "hf"
    for sample in samples_of(tmp_path / "hf", "hats"):
        assert str(sample["arguments"]["gen_args_0"]["arg_0"]).count("Q: ") == 3
    # The same command again asks nobody.
    (tmp_path / "hf" / "lm-eval-hats-step-000000.log").unlink()
    assert ask(smollm2_dir, tmp_path / "hf", "hats", *words, "harness.engine=hf") == by_hf
    assert not (tmp_path / "hf" / "lm-eval-hats-step-000000.log").exists()
    require_system_part("vLLM (make vllm-deps)", VLLM.is_ready())
    found = ask(smollm2_dir, tmp_path / "out", "hats", *words)
    assert (found.engine, found.num_fewshot, found.num_examples) == ("vllm", 2, 3)
    assert [sample["resps"] for sample in samples_of(tmp_path / "out", "hats")] == [
        sample["resps"] for sample in samples_of(tmp_path / "hf", "hats")
    ]
    assert by_hf.metrics == found.metrics


@pytest.mark.slow
@pytest.mark.usefixtures("harness_python")
def test_two_processes_share_the_work_of_a_file_and_a_table_follows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Six processes load it. Nine examples are some 700 tokens to it.
    model = tiny_model(tmp_path / "model", max_position_embeddings=2048)
    (tmp_path / "hats.yaml").write_text(OWN_TASK.format(folder=write_rows(tmp_path)))
    file = tmp_path / "both.toml"
    file.write_text(
        f"""model.uri = "{model}"
model.dtype = "float32"
harness.tasks = ["hats", "gsm8k"]
harness.include = "."
harness.engine = "hf"
harness.num_few_shot = 8
harness.max_reply_tokens = 6
[task.parts.gsm8k]
source = "{tmp_path}"
"""
    )
    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STROP_OFFLINE", "1")
        assert main(["eval", "--config", str(file), "--out", str(out), "--workers", "2"]) == 0
    (hats, gsm8k) = (
        HarnessResult.read((out / f"both.lm-eval-{name}-step-000000.json").read_bytes())
        for name in ("hats", "gsm8k")
    )
    assert (hats.num_fewshot, gsm8k.num_fewshot, hats.num_examples, gsm8k.num_examples) == (8, 8, 3, 3)
    assert gsm8k.max_reply_tokens == 6
    for sample in samples_of(out, "gsm8k", stem="both.lm-eval"):
        assert str(sample["arguments"]["gen_args_0"]["arg_0"]).count("Question: ") == 9
    assert list(out.glob("*.part-1.log"))
    log = (out / "both.lm-eval-hats-step-000000.log").read_text()
    # Of three documents one share has two; the other one's reply was taken from what it had kept.
    assert "generate_until: 2 of 2 requests of part 0 are kept" in log
    assert "Cached requests: 3, Requests remaining: 0" in log
    rows = json.loads((out / "tables" / "both-step-000000.json").read_text())
    assert [row["task"] for row in rows] == ["hats", "gsm8k", "gsm8k"]
    header = "task,metric,value,low,high,num_examples,num_few_shot,max_reply_tokens,step,engine,baseline,"
    assert (out / "tables" / "both-step-000000.csv").read_text().startswith(header)
    assert "hats  " in (out / "tables" / "both-step-000000.txt").read_text()
    assert "exact_match" in capsys.readouterr().out
    # Alone, ended half way by SIGTERM, and begun again.
    alone = (f"harness.include={tmp_path}", "harness.batch_size=1", *SAME)
    end_half_way(model, tmp_path / "one", "hats", *alone)
    single = ask(model, tmp_path / "one", "hats", *alone)
    assert single.metrics == hats.metrics
    assert [sample["resps"] for sample in samples_of(tmp_path / "one", "hats")] == [
        sample["resps"] for sample in samples_of(out, "hats", stem="both.lm-eval")
    ]
    log = (tmp_path / "one" / "lm-eval-hats-step-000000.log").read_text()
    assert re.findall(r"Cached requests: (\d)", log)[1] in {"1", "2", "3"}


SAME = ("harness.engine=hf", "harness.num_few_shot=8", "harness.max_reply_tokens=6")
