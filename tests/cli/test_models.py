"""Commands that ask, compare and take out models."""

from __future__ import annotations

import json
from pathlib import Path

from tests.fixtures.commands import Run

ASK = ("--task", "arithmetic", "model.dtype=float32", "placement.threads=1")


def test_a_checkpoint_is_evaluated_as_its_run_did(finished_run: Path, run: Run) -> None:
    words = ("--split", "held_out", "--num-examples", "4", "--num-samples", "2", "--json")
    ended = run("eval", finished_run, *ASK, *words)
    assert ended.code == 0, ended.err
    stored = json.loads((finished_run / "eval" / "arithmetic-step-000002.json").read_text())
    found = json.loads(ended.out)
    # The same weights, task, prompts and random streams, so the same result to the last digit.
    assert found == stored


def test_an_edited_result_is_shown_nowhere(finished_run: Path, folder: Path, run: Run) -> None:
    """Incident: `strop compare` showed "0.0 % 95.0 % +0.0 %" of a file whose accuracy had been edited."""
    (folder / "kept").mkdir()
    words = ("eval", finished_run, *ASK, "--split", "held_out", "--num-examples", "4", "--out", "kept")
    assert run(*words).code == 0
    for path in (finished_run / "eval" / "arithmetic-step-000002.json", *(folder / "kept").glob("*.json")):
        values = json.loads(path.read_text())
        values["greedy"]["accuracy"] = 0.95
        path.write_text(json.dumps(values))
    edited = finished_run / "eval" / "arithmetic-step-000002.json"
    before = finished_run / "eval" / "arithmetic-step-000000.json"
    for command in (
        ("compare", before, edited),
        ("compare", finished_run, finished_run),
        ("report", finished_run),
        ("eval", "kept", "--rescore"),
        words,
    ):
        ended = run(*command)
        assert (ended.code, ended.out) == (1, ""), command
        assert "is not a complete result" in ended.err


def test_eva_2_a_run_with_a_lowered_budget_says_so(run: Run, folder: Path) -> None:
    """Incident: as above, for the scores that a run takes of itself."""
    ended = run("train", "run.toml", "task.max_reply_tokens=8")
    assert ended.code == 0, ended.err
    assert ended.out.count("held-out accuracy: invalid: truncation") == 2
    assert "change" not in ended.out
    assert "invalid_eval" in ended.err
    (events,) = (folder / "runs").glob("*/events.jsonl")
    found = [json.loads(line) for line in events.read_text().splitlines()]
    assert [event["step"] for event in found if event["cause"] == "invalid_eval"] == [0, 2]


def test_samples_show_the_prompt_the_reply_and_its_worth(
    run: Run, folder: Path, tiny_model_dir: Path
) -> None:
    words = ("sample", tiny_model_dir, *ASK, "num=2")
    ended = run(*words)
    assert ended.code == 0
    assert ended.out.count("<|start|>user\nWhat is ") == 2
    assert "reward 0.0" in ended.out
    assert "\x1b" not in ended.out
    found = json.loads(run(*words, "--json").out)
    assert [sorted(entry) for entry in found] == [
        sorted(
            [
                "prompt",
                "reply",
                "finish_reason",
                "gold",
                "reward",
                "is_correct",
                "failure",
                "trace",
                "example_id",
            ]
        )
    ] * 2


def test_a_prompt_of_ones_own_is_asked_greedily(run: Run, folder: Path, tiny_model_dir: Path) -> None:
    words = (
        "sample",
        tiny_model_dir,
        "--prompt",
        "hello",
        "--json",
        "sampling.temperature=0",
        "max_reply_tokens=9",
    )
    (first,), (second,) = (json.loads(run(*words, f"seed={seed}").out) for seed in (1, 2))
    assert first["prompt"] == "<|start|>user\nhello<|end|>\n<|start|>assistant\n"
    assert first["reply"] == second["reply"] != ""


def test_sampling_may_cut_where_training_may_not(run: Run, folder: Path, tiny_model_dir: Path) -> None:
    words = (tiny_model_dir, *ASK, "num=1", "sampling.top_k=1")
    (sampled,) = json.loads(run("sample", *words, "sampling.temperature=0.7", "--json").out)
    (greedy,) = json.loads(run("sample", *words, "sampling.temperature=0", "--json").out)
    # One token is left to draw from: the most probable one.
    assert sampled["reply"] == greedy["reply"]


def test_a_trained_model_is_exported_once_and_loads(finished_run: Path, folder: Path, run: Run) -> None:
    # That transformers loads an export is tested with the export itself.
    words = ("model", "export", finished_run, "out", "--no-load-test")
    ended = run(*words)
    assert (ended.code, ended.out) == (0, "out\n")
    source = finished_run / "checkpoints" / "step-000002" / "model"
    for path in source.iterdir():
        assert (folder / "out" / path.name).read_bytes() == path.read_bytes()
    assert run("eval", "out", *ASK, "--split", "held_out", "--num-examples", "1").code == 0
    again = run(*words)
    assert again.code == 76
    assert "out exists" in again.err


def test_get_prints_nothing_but_the_directory(run: Run, folder: Path, tiny_model_dir: Path) -> None:
    ended = run("model", "get", tiny_model_dir)
    assert (ended.code, ended.out) == (0, f"{tiny_model_dir}\n")
    assert "digest" in ended.err


def test_runs_are_listed_viewed_and_compared(finished_run: Path, folder: Path, run: Run) -> None:
    assert run("train", "run.toml", "optimizer.lr=1e-4").code == 0
    listed = json.loads(run("ls", "--json").out)
    assert [entry["phase"] for entry in listed] == ["finished", "finished"]
    assert listed[1]["path"] == f"runs/{finished_run.name}"
    assert finished_run.name in run("ls").out
    (finished_run / "report.html").unlink()
    assert run("report", finished_run).out == f"{finished_run / 'report.html'}\n"
    assert (finished_run / "report.html").is_file()
    compared = json.loads(run("compare", finished_run, listed[0]["path"], "--json").out)
    assert compared["settings"] == [{"key": "optimizer.lr", "values": [1e-05, 1e-4]}]
    assert "optimizer.lr" in run("compare", finished_run, listed[0]["path"]).out
