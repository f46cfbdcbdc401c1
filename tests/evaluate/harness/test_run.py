"""lm-eval beside us: its environment, what it is told, and what of its words is believed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from strop.errors import CheckRefused, ConfigError, CorruptRecord, DataError, EngineError, StoreError
from strop.evaluate.harness import (
    GENERATING,
    LM_EVAL,
    PROTOCOLS,
    HarnessEngine,
    HarnessJob,
    HarnessMetric,
    HarnessPart,
    HarnessResult,
    refuse_small_model,
    refuse_unconfirmed_code,
    run_harness,
)
from strop.evaluate.harness import program as code_metric
from strop.evaluate.harness.result import HarnessOutput, pool_metrics, read_output
from strop.evaluate.harness.run import harness_command, stage_rows, write_task_files
from strop.rollout import Split
from strop.tasks.mathematics.gsm8k import Gsm8k, Gsm8kSpec
from tests.evaluate.harness import harness_rows, harness_world
from tests.fixtures.tiny_tokenizer import tiny_tokenizer

NUM_TEST = 3
NAME = "strop_gsm8k_cot"


def write_rows(path: Path, first: int, num_rows: int) -> None:
    rows = [
        {
            "question": f"Ann has {n} hats and buys {n}. How many?",
            "answer": f"{n} + {n} = {2 * n}\n#### {2 * n}",
        }
        for n in range(first, first + num_rows)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_job(tmp_path: Path, name: str = "gsm8k_cot", **changes: Any) -> HarnessJob:
    source = tmp_path / "data"
    source.mkdir()
    write_rows(source / "train.jsonl", 0, 8)
    write_rows(source / "test.jsonl", 50, NUM_TEST)
    fields: dict[str, Any] = {
        "protocol": PROTOCOLS[name],
        "task": Gsm8k(Gsm8kSpec.model_validate({"name": "gsm8k", "source": str(source)})),
        "model_path": tiny_tokenizer(tmp_path / "model"),
        "model_digest": "m",
        "step": 0,
        "dtype": "float32",
        "max_positions": 8192,
        "num_examples": None,
    }
    return HarnessJob(**(fields | changes))


def write_output(job: HarnessJob, out_dir: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Write what lm-eval 0.4.13 writes, in its form: two filters, one line of samples for each."""
    name = f"strop_{job.protocol.task}"
    said: dict[str, Any] = {
        "results": {
            name: {
                "alias": name,
                "sample_len": NUM_TEST,
                "exact_match,strict-match": 0.5,
                "exact_match_stderr,strict-match": 0.1,
                "exact_match,flexible-extract": 1.0,
                "exact_match_stderr,flexible-extract": "N/A",
            }
        },
        "configs": {
            name: {"generation_kwargs": {"max_gen_toks": job.protocol.max_reply_tokens, "until": ["Q:"]}}
        },
        "versions": {name: 3.0},
        "n-shot": {name: job.protocol.num_fewshot},
        "n-samples": {name: {"original": NUM_TEST, "effective": NUM_TEST}},
        "config": {"fewshot_seed": 42},
    }
    edit(said)
    place = out_dir / "__model"
    place.mkdir(parents=True)
    (place / "results_2026-01-01T00-00-00.0.json").write_text(json.dumps(said))
    lines = [
        {
            "doc": {"example_id": example.example_id},
            "arguments": {"gen_args_0": {"arg_0": f"Q: 1?\nA: 1\n\n{job.protocol.prompt(example)}"}},
            "resps": [["1" * 1024 if index == 0 else "7"]],
            "filter": filter_name,
        }
        for filter_name in ("strict-match", "flexible-extract")
        for index, example in enumerate(job.task.examples(Split.HELD_OUT))
    ]
    samples = "".join(json.dumps(line) + "\n" for line in lines)
    (place / f"samples_{name}_2026-01-01T00-00-00.0.jsonl").write_text(samples)


def write_program(folder: Path, script: str) -> Path:
    """Write a program of the shell that stands for the harness's interpreter."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def by(python: Path) -> HarnessEngine:
    return HarnessEngine(kind="hf", python=python)


def read(job: HarnessJob, out_dir: Path) -> HarnessOutput:
    return read_output(job, out_dir, [NAME], "d")


def test_the_harness_is_told_our_rows(tmp_path: Path) -> None:
    job = make_job(tmp_path, "gsm8k", num_examples=2)
    digest = stage_rows(job, tmp_path)
    place = tmp_path / "rows" / "gsm8k"
    rows = [json.loads(line) for line in (place / "test.jsonl").read_text().splitlines()]
    examples = job.task.examples(Split.HELD_OUT)
    assert [row["example_id"] for row in rows] == [example.example_id for example in examples[:2]]
    assert rows[0]["answer"] == "50 + 50 = 100\n#### 100"
    assert len((place / "train.jsonl").read_text().splitlines()) == 8
    assert stage_rows(job, tmp_path) == digest


def test_too_few_examples_to_show_are_refused(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    job = make_job(tmp_path / "data", "gsm8k")
    write_rows(tmp_path / "data" / "data" / "train.jsonl", 0, 4)
    with pytest.raises(DataError, match=r"gsm8k shows 5 solved examples, .* split has 4\. Allowed: 5 or"):
        stage_rows(job, tmp_path)


@pytest.mark.parametrize("name", GENERATING)
def test_every_protocol_stages_rows_and_task_files(name: str, tmp_path: Path) -> None:
    package = tmp_path / "env" / "lib" / "python3.11" / "site-packages" / "lm_eval"
    package.mkdir(parents=True)
    job = harness_world.make_job(name, harness_rows.write_data(tmp_path / "data"), tmp_path)
    stage_rows(job, tmp_path)
    names = write_task_files(job.protocol, tmp_path, tmp_path / "env")
    assert names == sorted(f"strop_{part}" for part in job.protocol.files)
    paths = sorted((tmp_path / "rows").glob("*/test.jsonl"))
    staged = [json.loads(line)["example_id"] for path in paths for line in path.read_text().splitlines()]
    assert sorted(staged) == sorted(example.example_id for example in job.examples)
    assert (tmp_path / "rows" / job.protocol.task / "train.jsonl").exists() is (name == "gsm8k")
    words = harness_command(job, tmp_path)
    assert ("--confirm_run_unsafe_code" in words) is (name in ("mbpp", "humaneval"))


def test_what_the_harness_cannot_ask_is_refused(tmp_path: Path) -> None:
    data = harness_rows.write_data(tmp_path / "data")
    lines = (data["mbpp"] / "test.jsonl").read_text().splitlines()
    row = json.loads(lines[0])
    row["test_list"] = row["test_list"][:2]
    (data["mbpp"] / "test.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=r"mbpp has 2 visible tests\. Allowed: 3 or more.* Next: "):
        stage_rows(harness_world.make_job("mbpp", data, tmp_path), tmp_path)
    odd = harness_rows.math_row("Topology", 5, "1")
    (data["math"] / "test.jsonl").write_text(json.dumps(odd) + "\n")
    with pytest.raises(DataError, match=r"of the subject 'Topology'\. Allowed: Algebra, .* Next: "):
        stage_rows(harness_world.make_job("minerva_math", data, tmp_path), tmp_path)


def test_the_protocol_is_pinned(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    stage_rows(job, tmp_path)
    words = harness_command(job, tmp_path)
    for flag, value in (
        ("--num_fewshot", "4"),
        ("--seed", "42"),
        ("--gen_kwargs", '{"temperature": 0, "max_gen_toks": 1024}'),
        ("--tasks", "strop_gsm8k_cot"),
    ):
        assert words[words.index(flag) + 1] == value
    assert "--log_samples" in words


def test_the_task_file_replaces_the_data_alone(tmp_path: Path) -> None:
    package = tmp_path / "env" / "lib" / "python3.11" / "site-packages" / "lm_eval"
    package.mkdir(parents=True)
    job = make_job(tmp_path, "gsm8k")
    stage_rows(job, tmp_path)
    assert write_task_files(job.protocol, tmp_path, tmp_path / "env") == ["strop_gsm8k"]
    written = json.loads((tmp_path / "tasks" / "gsm8k.yaml").read_text())
    assert written.pop("include") == str(package / "tasks" / "gsm8k" / "gsm8k.yaml")
    assert set(written) == {"task", "tag", "dataset_path", "dataset_name", "dataset_kwargs", "test_split"}
    assert set(written["dataset_kwargs"]["data_files"]) == {"train", "test"}


def test_what_the_harness_says_is_read(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    write_output(job, tmp_path / "out", lambda said: None)
    output = read(job, tmp_path / "out")
    result, samples = output.result, output.samples
    assert {name: (found.value, found.stderr) for name, found in result.metrics.items()} == {
        "exact_match,strict-match": (0.5, 0.1),
        "exact_match,flexible-extract": (1.0, None),
    }
    assert (result.num_examples, result.num_fewshot, result.seed, result.data_digest) == (3, 4, 42, "d")
    # One reply of three is as long as the budget.
    assert result.truncated_frac == pytest.approx(1 / 3)
    assert result.truncation_suspect
    assert len(samples.splitlines()) == 2 * NUM_TEST


@pytest.mark.parametrize(
    "edit",
    [
        lambda said: said["n-shot"].update(strop_gsm8k_cot=8),
        lambda said: said["config"].update(fewshot_seed=1234),
        lambda said: said["configs"]["strop_gsm8k_cot"]["generation_kwargs"].update(max_gen_toks=256),
        lambda said: said["n-samples"]["strop_gsm8k_cot"].update(effective=2),
        lambda said: said["results"].clear(),
        lambda said: said["results"].update(strop_gsm8k_cot={"alias": "x"}),
    ],
)
def test_another_protocol_than_the_pinned_one_is_not_believed(
    tmp_path: Path, edit: Callable[[dict[str, Any]], object]
) -> None:
    job = make_job(tmp_path)
    write_output(job, tmp_path / "out", edit)
    with pytest.raises(CorruptRecord, match=r"lm-eval's output is not what .* Allowed: .* Next: "):
        read(job, tmp_path / "out")


def change_samples(change: Callable[[str], str | None], out_dir: Path) -> None:
    """Change the log of samples; None removes it."""
    (path,) = (out_dir / "__model").glob("samples_*")
    changed = change(path.read_text())
    if changed is None:
        path.unlink()
    else:
        path.write_text(changed)


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda text: None, r"it has 0 files \*/samples_strop_gsm8k_cot_\*\.jsonl, not 1"),
        (lambda text: "", "0 logged examples of 3"),
        (lambda text: text[: len(text) // 2], "JSONDecodeError"),
        (lambda text: text.splitlines()[0] + "\n", "1 logged examples of 3"),
        (lambda text: "5\n", "TypeError"),
        (lambda text: "{}\n", "KeyError: 'doc'"),
        (lambda text: text.replace('"resps": [["7"]]', '"resps": []'), "IndexError"),
        (
            lambda text: text.replace('"example_id": "', '"example_id": "0'),
            "it logged 3 examples, and 3 were given",
        ),
    ],
)
def test_samples_that_are_missing_or_broken_are_not_believed(
    change: Callable[[str], str | None], cause: str, tmp_path: Path
) -> None:
    job = make_job(tmp_path)
    write_output(job, tmp_path / "out", lambda said: None)
    change_samples(change, tmp_path / "out")
    with pytest.raises(CorruptRecord, match=rf"lm-eval's output is not what .*{cause}.* Next: remove its"):
        read(job, tmp_path / "out")


def test_no_output_is_not_believed_either(tmp_path: Path) -> None:
    with pytest.raises(CorruptRecord, match=r"it has 0 files \*/results_\*\.json, not 1"):
        read(make_job(tmp_path), tmp_path / "out")


def test_results_of_two_runs_are_not_believed(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    write_output(job, tmp_path / "out", lambda said: None)
    (tmp_path / "out" / "__model" / "results_2.json").write_text("{}")
    with pytest.raises(CorruptRecord, match=r"it has 2 files \*/results_\*\.json, not 1"):
        read(job, tmp_path / "out")


def test_a_model_that_would_have_its_prompts_cut_is_refused(tmp_path: Path) -> None:
    refuse_small_model(make_job(tmp_path, max_positions=1030))
    (tmp_path / "small").mkdir()
    with pytest.raises(CheckRefused, match=r"1024 tokens, and any prompt .* 512 positions"):
        refuse_small_model(make_job(tmp_path / "small", max_positions=512))


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            "echo the harness is unwell\nexit 3",
            r"ended with 3 on gsm8k_cot: the harness is unwell.* Next: read ",
        ),
        ("echo out of memory\nkill -9 $$", r"ended with -9 on gsm8k_cot: out of memory.* Next: read "),
    ],
)
def test_a_harness_that_fails_is_told_with_its_log(
    script: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STROP_CACHE", str(tmp_path / "cache"))
    (LM_EVAL.path / "lib" / "python3.11" / "site-packages" / "lm_eval").mkdir(parents=True)
    program = write_program(tmp_path, script)
    with pytest.raises(EngineError, match=message):
        run_harness(make_job(tmp_path, engine=by(program)), tmp_path / "out")
    files = [path.name for path in (tmp_path / "out").iterdir() if path.is_file()]
    assert files == ["lm-eval-gsm8k_cot-step-000000.log"]


def test_a_harness_that_works_is_told_by_the_last_line_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STROP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("strop.evaluate.harness.run._TELL_EVERY_S", 0.02)
    (LM_EVAL.path / "lib" / "python3.11" / "site-packages" / "lm_eval").mkdir(parents=True)
    program = write_program(tmp_path, r"printf '1/2\r\0332/2'; sleep 2; exit 3")
    said: list[str] = []
    with pytest.raises(EngineError, match="ended with 3"):
        run_harness(make_job(tmp_path, engine=by(program)), tmp_path / "out", say=said.append)
    assert said == ["gsm8k_cot: 2/2"]


def test_a_harness_that_ends_well_and_writes_nothing_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STROP_CACHE", str(tmp_path / "cache"))
    with pytest.raises(StoreError, match=r"has 0 packages lm_eval\. Allowed: one.* Next: remove that folder"):
        run_harness(make_job(tmp_path, engine=by(tmp_path)), tmp_path / "out")
    (LM_EVAL.path / "lib" / "python3.11" / "site-packages" / "lm_eval").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    silent = by(write_program(tmp_path, "exit 0"))
    with pytest.raises(CorruptRecord, match=r"it has 0 files \*/results_\*\.json, not 1"):
        run_harness(make_job(tmp_path / "other", engine=silent), tmp_path / "out")
    assert list((tmp_path / "out").glob("*.json*")) == []


def test_a_result_of_another_evaluation_is_never_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STROP_CACHE", str(tmp_path / "cache"))
    (LM_EVAL.path / "lib" / "python3.11" / "site-packages" / "lm_eval").mkdir(parents=True)
    out = tmp_path / "out"
    job = make_job(tmp_path, engine=by(write_program(tmp_path, "echo asked\nexit 3")))
    write_output(job, tmp_path / "said", lambda said: None)
    other = read(job, tmp_path / "said").result.model_copy(update={"plan": "another", "seed": 7})
    out.mkdir()
    path = out / "lm-eval-gsm8k_cot-step-000000.json"
    path.write_text(other.model_dump_json())
    with pytest.raises(CheckRefused, match=r"is of another evaluation: seed 7 there and 42 now\. .*--out"):
        run_harness(job, out)
    assert not list(out.glob("*.log"))
    # In the folder that evaluations share it gets a name of its own.
    with pytest.raises(EngineError, match="ended with 3 on gsm8k_cot: asked"):
        run_harness(job, out, is_shared=True)
    assert len(list(out.glob("lm-eval-gsm8k_cot-step-000000-*.log"))) == 1
    assert HarnessResult.read(path.read_bytes()) == other


def test_a_prompt_that_is_not_ours_is_not_believed(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    write_output(job, tmp_path / "out", lambda said: None)
    (path,) = (tmp_path / "out" / "__model").glob("samples_*")
    path.write_text(path.read_text().replace("50 hats", "51 hats"))
    with pytest.raises(CorruptRecord, match=r"the prompt of example \w+ does not end in 'Q: Ann"):
        read(job, tmp_path / "out")


def test_a_group_is_pooled_by_hand() -> None:
    # Two right of two (no spread) and one of three: 3/5. Squares about the means: 0 and 2/3, so the
    # pooled variance is (0 + 2/3) / (5 - 2) = 2/9, and over five examples 2/45.
    # The part's own standard error: sqrt((2/3) / 2) / sqrt(3) = 1/3.
    parts = [
        HarnessPart(num_examples=2, metrics={"m,none": HarnessMetric(value=1.0, stderr=0.0)}),
        HarnessPart(num_examples=3, metrics={"m,none": HarnessMetric(value=1 / 3, stderr=1 / 3)}),
    ]
    pooled = pool_metrics(parts)["m,none"]
    assert pooled.value == pytest.approx(0.6)
    assert pooled.stderr == pytest.approx((2 / 45) ** 0.5)
    lone = HarnessPart(num_examples=1, metrics={"m,none": HarnessMetric(value=0.0, stderr=None)})
    assert pool_metrics([*parts, lone])["m,none"] == HarnessMetric(value=0.5, stderr=None)


@pytest.mark.parametrize("name", ["mbpp", "humaneval"])
def test_code_is_run_only_if_the_user_says_so(name: str) -> None:
    with pytest.raises(ConfigError, match=r"in no sandbox.* Allowed: .*--confirm-run-unsafe-code\. Next: "):
        refuse_unconfirmed_code(PROTOCOLS[name], is_confirmed=False)
    refuse_unconfirmed_code(PROTOCOLS[name], is_confirmed=True)
    refuse_unconfirmed_code(PROTOCOLS["gsm8k"], is_confirmed=False)


@pytest.mark.parametrize(
    ("program", "verdict"),
    [
        ("def add(a, b): return a + b", True),
        ("def add(a, b): return a * b", False),
        ("def add(a, b) return", False),
        ("import sys; sys.exit(0)", False),
        ("import os; os._exit(0)", False),
        ("raise KeyboardInterrupt", False),
        ("if __name__ == '__main__': raise ValueError\nadd = lambda a, b: a + b", True),
        ("input()", False),
        ("", False),
    ],
)
def test_a_program_passes_if_its_end_is_reached(
    program: str, verdict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # None of them hangs, and an interpreter starts late on a busy machine.
    monkeypatch.setattr(code_metric, "is_passing", partial(code_metric.is_passing, limit_s=60.0))
    assert code_metric.count_passes([program], "assert add(2, 3) == 5") == int(verdict)


def test_a_program_without_an_end_is_killed_with_what_it_started(tmp_path: Path) -> None:
    marker = tmp_path / "alive"
    child = f"import time, pathlib; time.sleep(2); pathlib.Path({str(marker)!r}).touch()"
    program = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {child!r}])\nwhile True: pass"
    assert not code_metric.is_passing(program, limit_s=0.5)
    time.sleep(2.5)
    assert not marker.exists()
