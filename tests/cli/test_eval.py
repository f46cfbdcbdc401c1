"""`strop eval`, `strop eval --rescore` and what they keep: several tasks, kills, curricula, new verdicts."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strop.audit import AuditReport, ProbeResult, ProbeStatus, stored_audit_path, write_audit
from strop.evaluate import read_result
from strop.record.files import list_shards
from strop.run.tasks import read_task
from strop.tasks import build_task
from tests.fixtures.commands import Ended, Run
from tests.fixtures.tiny_model import tiny_model

ASK = ("model.dtype=float32", "placement.threads=1", "--split", "held_out")


def again(run: Run, place: object, word: str) -> dict[str, Any]:
    """Return the result of kept replies under another setting."""
    (entry,) = json.loads(run("eval", place, "--rescore", word, "--json").out)
    result: dict[str, Any] = entry["result"]
    return result


def evaluate(run: Run, model: Path, *words: object) -> Ended:
    return run("eval", model, "--task", "arithmetic", *ASK, *words)


def test_several_tasks_give_one_table_and_one_file_each(run: Run, folder: Path, tiny_model_dir: Path) -> None:
    words = ("--limit", "3", "--samples", "2", "--pass-at", "2,1", "--out", "results")
    tasks = ("eval", tiny_model_dir, "--task", "arithmetic,guess-number", *ASK, *words)
    ended = run(*tasks, "guess-number.max_value=15", "arithmetic.max_value=15")
    assert ended.code == 0, ended.err
    assert "2 tasks, examples of held_out, step 0" in ended.out
    for task in ("arithmetic", "guess-number"):
        result = read_result(folder / "results" / f"{task}-step-000000.json")
        assert (result.task, result.num_examples, list(result.pass_at_k)) == (task, 3, [1, 2])
        assert list_shards(folder / "results" / f"{task}-step-000000")
        lines = [line.split() for line in ended.out.splitlines() if line.split()[:1] == [task]]
        assert [line[1] for line in lines] == ["greedy", "sampled", "pass@1", "pass@2"]
    listed = json.loads(run(*tasks, "guess-number.max_value=15", "arithmetic.max_value=15", "--json").out)
    assert [entry["task"] for entry in listed] == ["arithmetic", "guess-number"]
    # The settings reached their own task: other ones are another evaluation.
    refused = run(*tasks, "guess-number.max_value=16", "arithmetic.max_value=15")
    assert refused.code == 76
    assert (
        "guess-number-step-000000.json belongs to another evaluation, there and now: task_version"
        in refused.err
    )


def test_a_score_says_what_the_audit_of_its_task_found(
    run: Run, folder: Path, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STROP_CACHE", str(tmp_path / "cache"))
    words = ("eval", tiny_model_dir, "--task", "arithmetic", *ASK, "--limit", "2")
    ended = run(*words, "--json")
    assert ended.code == 0, ended.err
    result = json.loads(ended.out)
    assert result["audit"] is None
    # What was kept is scored again, and nothing is generated.
    assert (
        "arithmetic: not audited; `strop audit arithmetic` with its settings attacks its judge"
        in run(*words).err
    )
    path = stored_audit_path("arithmetic", result["task_version"])
    report = AuditReport(
        task="arithmetic",
        task_version=result["task_version"],
        seed=0,
        num_examples=1,
        seconds=1.0,
        probes=(ProbeResult(probe="echo", status=ProbeStatus.FAIL),),
    )
    write_audit(report, path)
    assert "arithmetic: unaudited" in run(*words).out
    write_audit(replace(report, probes=()), path)
    ended = run(*words)
    assert "audit" not in ended.out + ended.err
    assert json.loads(run(*words, "--json").out)["audit"] == "green"
    path.write_text("{}")
    assert json.loads(run(*words, "--json").out)["audit"] is None


def test_one_invalid_result_of_several_fails_the_command(
    run: Run, folder: Path, tiny_model_dir: Path
) -> None:
    words = ("--task", "arithmetic,guess-number", *ASK, "--limit", "2", "arithmetic.max_reply_tokens=4")
    ended = run("eval", tiny_model_dir, *words)
    assert ended.code == 1
    assert "strop: arithmetic: invalid: truncation" in ended.err
    assert "arithmetic: truncation suspect" in ended.out
    assert "guess-number" in ended.out


def test_the_same_command_again_generates_nothing(run: Run, folder: Path, tiny_model_dir: Path) -> None:
    first = evaluate(run, tiny_model_dir, "--limit", "4", "--json")
    again = evaluate(run, tiny_model_dir, "--limit", "4", "--json")
    assert (first.code, again.code) == (0, 0)
    assert again.out == first.out
    assert "the replies to 4 of 4 examples are kept from before" in again.err
    # Without --out, another evaluation has another name.
    assert evaluate(run, tiny_model_dir, "--limit", "5").code == 0
    assert len(list((folder / "evals").glob("arithmetic-step-000000-*.json"))) == 2


def test_an_order_file_is_written_from_samples(run: Run, folder: Path, tiny_model_dir: Path) -> None:
    ended = evaluate(run, tiny_model_dir, "--limit", "3", "--samples", "2", "--write-order", "order.jsonl")
    assert ended.code == 0, ended.err
    rows = [json.loads(line) for line in (folder / "order.jsonl").read_text().splitlines()]
    assert [row["num_samples"] for row in rows] == [2, 2, 2]


def test_kept_replies_are_judged_anew(run: Run, folder: Path, tiny_model_dir: Path) -> None:
    assert evaluate(run, tiny_model_dir, "max_value=15", "--limit", "4", "--out", "results").code == 0
    result_path = folder / "results" / "arithmetic-step-000000.json"
    result = read_result(result_path)
    shard = list_shards(result_path.with_suffix(""))[0]
    for place in (result_path, shard, folder):
        (entry,) = json.loads(run("eval", place, "--rescore", "--json").out)
        assert entry["changes"] == []
        assert entry["path"].endswith(f"arithmetic-step-000000-rescored-{result.task_version[:8]}.json")
        assert read_result(Path(entry["path"])) == result
    shown = run("eval", "results", "--rescore")
    assert shown.code == 0, shown.err
    assert f"judged by version {result.task_version}, replies of version {result.task_version}" in shown.out
    assert "0 verdicts changed" in shown.out
    # A setting that leaves the examples alone makes another version; one that moves them is refused.
    other = again(run, "results", "max_too_long_frac=0.5")
    assert other["task_version"] == other["replies_version"] == result.task_version
    shorter = again(run, "results", "max_reply_tokens=20")
    assert shorter["task_version"] != shorter["replies_version"] == result.task_version
    moved = run("eval", "results", "--rescore", "max_value=99")
    assert moved.code == 76
    assert "example ids are not in its held_out split" in moved.err


def test_a_place_without_replies_is_refused(run: Run, folder: Path) -> None:
    ended = run("eval", "nothing", "--rescore")
    assert (ended.code, ended.out) == (1, "")
    assert "nothing holds no replies of an evaluation. Allowed: " in ended.err


def test_eva_7_results_list_what_they_differ_in(run: Run, folder: Path, tiny_model_dir: Path) -> None:
    """Incident: as above, for results without runs: seeds and number formats are in them."""
    for name, words in (("a", ("seed=1",)), ("b", ("seed=2", "sampling.temperature=1"))):
        assert evaluate(run, tiny_model_dir, *words, "--limit", "2", "--out", name).code == 0
    places = [f"{name}/arithmetic-step-000000.json" for name in "ab"]
    found = json.loads(run("compare", *places, "--json").out)
    assert found["settings"] == [{"key": "run_seed", "values": [1, 2]}]


FILE_TEXT = """name = "short"
task.name = "arithmetic"
task.max_value = 15
eval.num_examples = 3
eval.num_samples = "none"
model.dtype = "float32"
placement.threads = 1
"""


def test_a_file_says_what_is_evaluated(run: Run, folder: Path, tiny_model_dir: Path) -> None:
    (folder / "short.toml").write_text(FILE_TEXT)
    # Words go over the file, also those of its task by name.
    words = ("--config", "short.toml", "arithmetic.max_value=12", "eval.num_examples=2")
    ended = run("eval", tiny_model_dir, *words, "--out", "results")
    assert ended.code == 0, ended.err
    result = read_result(folder / "results" / "short.arithmetic-step-000000.json")
    assert (result.num_examples, result.num_samples, result.split.value) == (2, None, "held_out")
    assert result.task_version == build_task(read_task("arithmetic", ["max_value=12"])).version
    assert "arithmetic, 2 examples of held_out, step 0" in ended.out


def test_a_table_stands_beside_the_users_own_results(
    run: Run, folder: Path, tiny_model_dir: Path, tmp_path: Path
) -> None:
    (folder / "short.toml").write_text(FILE_TEXT)
    assert run("eval", tiny_model_dir, "--config", "short.toml", "--out", "old").code == 0
    again = FILE_TEXT.replace("short", "again") + 'eval.baselines = ["before=old"]\n'
    (folder / "again.toml").write_text(again)
    other = tiny_model(tmp_path / "other", initializer_range=0.3)
    path = "old/short.arithmetic-step-000000.json"
    words = ("--config", "again.toml", "--out", "new")
    ended = run("eval", other, *words, "--baseline", f"file={path}")
    assert ended.code == 0, ended.err
    assert "beside baselines" in ended.out
    with (folder / "new" / "again-step-000000.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["metric"], row["baseline_of"], row["same_protocol"]) for row in rows] == [
        ("greedy", "before", "True"),
        ("greedy", "file", "True"),
    ]
    ends = [[float(row[f"difference{end}"]) for end in ("_low", "", "_high")] for row in rows]
    assert all(one == sorted(one) for one in ends)
    # Without a file, and asked otherwise.
    ended = evaluate(run, other, "--limit", "2", "--out", "two", "--baseline", f"file={path}")
    assert ended.code == 0, ended.err
    (table,) = (folder / "two").glob("*-step-000000.csv")
    assert "num_examples 3 and 2" in table.read_text()
    # Before anything is asked.
    refused = evaluate(run, other, "--limit", "2", "--out", "three", "--baseline", "nothing")
    assert refused.code == 2
    assert "the baseline 'nothing' has no results" in " ".join(refused.err.split())
    assert not (folder / "three").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "Missing option '--task', or --config"),
        (("--task", "arithmetic"), "Missing option '--split', or --config"),
        (("--follow",), "--follow takes --config EVAL.toml"),
        (("--config", "short.toml", "--task", "arithmetic"), "says everything itself: leave --task out"),
        (("--config", "short.toml", "--limit", "3"), "leave --num-examples out"),
        (("--config", "short.toml", "max_value=3"), "max_value"),
        (("--config", "short.toml", "--follow", "task.max_value=3"), "leave settings out"),
        (("--config", "short.toml", "--follow", "--out", "o"), "leave --out out"),
        (("--config", "short.toml", "--follow", "--baseline", "o"), "leave --baseline out"),
        (("--config", "none.toml"), "none.toml"),
        ((*ASK, "--task", "arithmetic,guess-number", "max_value=9"), "max_value"),
        ((*ASK, "--task", "arithmetic,arithmetic"), "arithmetic,arithmetic"),
        ((*ASK, "--task", "arithmetic", "--pass-at", "2"), "pass@2"),
        ((*ASK, "--task", "arithmetic", "--pass-at", "2,x"), "--pass-at"),
        ((*ASK, "--task", "arithmetic,guess-number", "--write-order", "o.jsonl"), "--write-order"),
        ((*ASK, "--harness", "helm", "--task", "gsm8k"), "helm"),
    ],
)
def test_usage_that_cannot_work_is_refused(
    run: Run, folder: Path, tiny_model_dir: Path, words: tuple[str, ...], message: str
) -> None:
    (folder / "short.toml").write_text(FILE_TEXT)
    ended = run("eval", tiny_model_dir, *words)
    assert (ended.code, ended.out) == (2, "")
    assert message in " ".join(ended.err.replace("│", " ").split())
