"""lm-eval beside us: its environment, what it is told, and what of its words is believed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from strop.errors import CheckRefused, ConfigError, CorruptRecord, EngineError, StoreError
from strop.evaluate.harness_environment import LM_EVAL, HarnessEnvironment, ensure_environment
from strop.evaluate.lm_eval import (
    PROTOCOLS,
    HarnessJob,
    find_protocol,
    harness_command,
    read_output,
    refuse_small_model,
    run_harness,
    stage_rows,
    write_task_file,
)
from strop.rollout import Split
from strop.spec.task import Gsm8kSpec
from strop.tasks.mathematics.gsm8k import Gsm8k
from tests.fixtures.tiny_tokenizer import tiny_tokenizer

NUM_TEST = 3


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
        "configs": {name: {"generation_kwargs": {"max_gen_toks": job.protocol.max_reply_tokens}}},
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
            "arguments": {"gen_args_0": {"arg_0": "Q: How many?\nA:"}},
            "resps": [["1" * 1024 if index == 0 else "7"]],
            "filter": filter_name,
        }
        for filter_name in ("strict-match", "flexible-extract")
        for index, example in enumerate(job.task.examples(Split.HELD_OUT))
    ]
    samples = "".join(json.dumps(line) + "\n" for line in lines)
    (place / f"samples_{name}_2026-01-01T00-00-00.0.jsonl").write_text(samples)


def test_the_harness_is_told_our_rows(tmp_path: Path) -> None:
    job = make_job(tmp_path, num_examples=2)
    digest = stage_rows(job, tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "test.jsonl").read_text().splitlines()]
    examples = job.task.examples(Split.HELD_OUT)
    assert [row["example_id"] for row in rows] == [example.example_id for example in examples[:2]]
    assert rows[0]["answer"] == "50 + 50 = 100\n#### 100"
    assert len((tmp_path / "train.jsonl").read_text().splitlines()) == 8
    assert stage_rows(job, tmp_path) == digest


def test_the_protocol_is_pinned(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    words = harness_command(job, tmp_path, Path("python"))
    for flag, value in (
        ("--num_fewshot", "4"),
        ("--seed", "42"),
        ("--gen_kwargs", "temperature=0,max_gen_toks=1024"),
        ("--tasks", "strop_gsm8k_cot"),
    ):
        assert words[words.index(flag) + 1] == value
    assert "--log_samples" in words


def test_the_task_file_replaces_the_data_alone(tmp_path: Path) -> None:
    package = tmp_path / "env" / "lib" / "python3.11" / "site-packages" / "lm_eval"
    package.mkdir(parents=True)
    written = json.loads(write_task_file(PROTOCOLS["gsm8k"], tmp_path, tmp_path / "env").read_text())
    assert written.pop("include") == str(package / "tasks" / "gsm8k" / "gsm8k.yaml")
    assert set(written) == {"task", "tag", "dataset_path", "dataset_name", "dataset_kwargs"}


def test_what_the_harness_says_is_read(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    write_output(job, tmp_path / "out", lambda said: None)
    result, samples = read_output(job, tmp_path / "out", "d")
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
        read_output(job, tmp_path / "out", "d")


def test_no_output_is_not_believed_either(tmp_path: Path) -> None:
    with pytest.raises(CorruptRecord, match="ValueError: not enough values"):
        read_output(make_job(tmp_path), tmp_path / "out", "d")


def test_a_model_that_would_have_its_prompts_cut_is_refused(tmp_path: Path) -> None:
    job = make_job(tmp_path, max_positions=1030)
    refuse_small_model(job)
    write_output(job, tmp_path / "out", lambda said: None)
    with pytest.raises(
        CheckRefused, match=r"1024 tokens, and a prompt of \d+ tokens .* 1030 positions; .*Next"
    ):
        read_output(job, tmp_path / "out", "d")
    (tmp_path / "small").mkdir()
    with pytest.raises(CheckRefused, match=r"1024 tokens, and any prompt .* 512 positions"):
        refuse_small_model(make_job(tmp_path / "small", max_positions=512))


def test_a_task_that_is_not_pinned_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"with task mmlu\. Allowed: gsm8k, gsm8k_cot\. Next: "):
        find_protocol("mmlu")


def test_a_harness_that_fails_is_told_with_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STROP_CACHE", str(tmp_path / "cache"))
    (LM_EVAL.path / "lib" / "python3.11" / "site-packages" / "lm_eval").mkdir(parents=True)
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho the harness is unwell\nexit 3\n")
    program.chmod(0o755)
    with pytest.raises(EngineError, match=r"ended with 3 on gsm8k_cot: the harness is unwell.* Next: read "):
        run_harness(make_job(tmp_path), tmp_path / "out", python=program)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["lm-eval-gsm8k_cot-step-000000.log"]


@pytest.mark.slow
def test_an_environment_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STROP_CACHE", str(tmp_path / "a cache"))
    said: list[str] = []
    empty = HarnessEnvironment(name="empty", pip_steps=())
    python = ensure_environment(empty, say=said.append)
    assert python.exists()
    marker = python.parent / "marker"
    marker.touch()
    assert ensure_environment(empty, say=said.append) == python
    assert (marker.exists(), len(said)) == (True, 1)
    # Other steps are another environment under the same name; these cannot be taken.
    broken = HarnessEnvironment(name="empty", pip_steps=((str(tmp_path / "no such package"),),))
    with pytest.raises(
        StoreError, match=r"(?s)environment of empty could not be made: .* Allowed: .* Next: "
    ):
        ensure_environment(broken, say=said.append)
    assert not marker.exists()
    assert not broken.is_ready()
    assert not empty.is_ready()
