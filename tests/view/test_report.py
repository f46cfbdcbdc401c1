"""The report holds what the page says of a run, in every state a run can be in, and nothing can act in it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strop.errors import CorruptRecord, StoreError
from strop.evaluate import Validity, result_name, write_result
from strop.record import Event, EventKind, RunDir
from strop.record.files import DirectoryRecord
from strop.record.prediction import write_prediction
from strop.record.rollouts import write_rollouts
from strop.view.live import LiveRun
from strop.view.report import write_comparison, write_report
from strop.view.terminal import describe_usd
from tests.record.test_prediction import PLANNED
from tests.view.synthetic_run import make_result, make_rollouts, make_run, raise_alarm


def kept_in(path: Path) -> dict[str, Any]:
    """Return what a report holds."""
    found = re.search(r'<script type="application/json" id="kept">(.*?)</script>', path.read_text("utf-8"))
    assert found is not None
    content: dict[str, Any] = json.loads(found[1])
    return content


def answer(path: Path, *words: object) -> Any:
    """Return what the page would be told."""
    key = json.dumps([str(word) for word in words], ensure_ascii=False, separators=(",", ":"))
    return kept_in(path)["answers"][key]


def told(run: RunDir) -> dict[str, Any]:
    """Write a run's report; return what it says of it."""
    found: dict[str, Any] = answer(write_report(run.path), "run", run.path.name)
    return found


def test_a_finished_run_shows_before_and_after(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.mark_finished()
    path = write_report(run.path)
    assert path == run.path / "report.html"
    shown = told(run)
    # learned(0) = 0.29 + 0.51 / (1 + e^3.6) = 0.3036: 61 of 200 = 30.5 %. learned(40) = 0.7938: 159 of 200.
    assert [one["accuracy"] for one in (shown["evals"][0], shown["evals"][-1])] == [0.305, 0.795]
    assert shown["change"]["estimate"] == pytest.approx(0.49)
    assert (shown["phase"], shown["alarms"], shown["wanted_steps"]) == ("finished", [], 40)
    assert kept_in(path)["start"] == f"#/run/{run.path.name}"
    assert [found.name for found in run.path.iterdir() if "partial" in found.name] == []


@pytest.mark.parametrize(
    ("terms", "method"),
    [
        ("rl", "grpo"),
        ("sft", "sft"),
        ("rl+sft", "grpo and sft"),
        ("dpo", "pref_ipo"),
        ("distill", "distillation"),
    ],
)
def test_a_run_is_named_after_what_it_learned_by(tmp_path: Path, terms: str, method: str) -> None:
    run = make_run(tmp_path)
    sections = f'[train]\nterms = "{terms}"\n[dpo]\nloss = "pref_ipo"\n[algorithm]\nname = "grpo"\n'
    (run.path / "spec.toml").write_text(sections)
    assert told(run)["algorithm"] == method


def test_the_report_has_the_curves_and_a_few_rollouts(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    path, name = write_report(run.path), run.path.name
    live = LiveRun(key=name, record=DirectoryRecord(run.path))
    assert answer(path, "metrics", name) == live.list_metrics()
    assert told(run)["rollout_steps"] == [1, 40]
    for step in (1, 40):
        rows = answer(path, "rollouts", name, step, "step")["rows"]
        assert 1 <= len(rows) <= 3
        for row in rows:
            rollout = answer(path, "rollout", name, step, row["key"], "step")
            assert rollout["example_id"] == row["example_id"]


def test_text_of_the_model_cannot_act(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    replies = ["</script><script>alert(1)</script> 12", "<!-- <script> 12", "abc\u202edef"]
    write_rollouts(run.rollouts_path(40), make_rollouts(40, replies, prompt="<b>What?</b>"))
    raise_alarm(run, 3, "<i>detail</i>")
    path = write_report(run.path)
    page = path.read_text("utf-8")
    assert page.count("<script") == page.count("</script>") == 3
    assert not re.findall(r"<b>What|<i>detail|<!--", page)
    rows = answer(path, "rollouts", run.path.name, 40, "step")["rows"]
    assert {row["reply"] for row in rows} <= set(replies)


def test_a_run_that_has_just_begun_has_a_report(tmp_path: Path) -> None:
    shown = told(make_run(tmp_path, num_steps=0, eval_steps=()))
    names = ("evals", "change", "plot_range", "rollout_steps")
    assert [shown[name] for name in names] == [[], None, None, []]


def test_nothing_is_concluded_from_an_invalid_result(tmp_path: Path) -> None:
    run = make_run(tmp_path, eval_steps=(0,))
    assert told(run)["change"] is None
    result = make_result(40, num_solved=150, validity=Validity.TRUNCATION)
    write_result(result, run.path / "eval" / result_name(result))
    shown = told(run)
    assert (len(shown["evals"]), shown["change"]) == (2, None)
    assert shown["evals"][-1]["validity"] == "invalid: truncation"


def test_results_of_another_protocol_are_not_mixed_in(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    other = make_result(60, num_solved=200).model_copy(update={"task_version": "a2"})
    write_result(other, run.path / "eval" / result_name(other))
    assert [one["step"] for one in told(run)["evals"]] == [0, 20, 40]


def test_the_price_stands_in_the_report(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_prediction(run.path, PLANNED)
    assert "Price of the steps" not in dict(told(run)["facts"])
    write_prediction(run.path, replace(PLANNED, usd_per_hour=36.0, total_s=1000.0))
    seconds = sum(line["seconds_step"] for line in run.metrics.read())
    # A cent a second; ten dollars were planned for a thousand.
    price = dict(told(run)["facts"])["Price of the steps"]
    assert price.startswith(describe_usd(seconds / 100))
    assert price.endswith("10.00 USD")


def test_what_was_planned_stands_beside_what_was_measured(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert told(run)["compared"] == []
    write_prediction(run.path, PLANNED)
    rows = {row["name"]: row for row in told(run)["compared"]}
    # 2 s were planned for generating, and about 6.9 s were drawn; 3.1 GB of 4 GB.
    assert 3.0 < rows["generate"]["ratio"] < 3.9
    memory = rows["memory peak"]
    assert (memory["planned"], memory["measured"]) == ("4.00 GB", "3.14 GB")


def test_alarms_are_counted_by_cause_and_explained(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for step in (12, 13, 30):
        raise_alarm(run, step)
    run.events.append(Event(kind=EventKind.RESUME, step=20, cause="resumed", detail="from step 20"))
    shown = told(run)
    (alarm,) = shown["alarms"]
    assert (alarm["cause"], alarm["num_times"], alarm["first_step"], alarm["last_step"]) == (
        "zero_variance",
        *(3, 12, 30),
    )
    assert [event["cause"] for event in shown["log"]] == ["resumed"]


@pytest.mark.parametrize(
    ("rows", "chosen"),
    [
        # Example b: 1, 0.5, 0 and one without a reward. Best, the one at position 3 // 2 = 1, worst.
        ([("a", 0.5), ("b", 0.0), ("b", None), ("a", 0.25), ("b", 1.0), ("b", 0.5)], [4, 5, 1]),
        ([], []),
        ([("a", 1.0), ("a", 1.0)], [0, 1]),
        ([("a", None), ("a", None)], [0, 1]),
    ],
)
def test_the_example_with_the_widest_rewards_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: list[tuple[str, float | None]], chosen: list[int]
) -> None:
    listed = [{"key": key, "example_id": name, "reward": reward} for key, (name, reward) in enumerate(rows)]
    monkeypatch.setattr(LiveRun, "list_rows", lambda *_: listed)
    live = LiveRun(key="a", record=DirectoryRecord(tmp_path))
    assert [row["key"] for row in live.choose_rows(1)] == chosen


def test_what_is_not_a_run_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(StoreError):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_record_is_named_and_the_old_report_stays(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    path = write_report(run.path)
    before = path.read_bytes()
    (run.path / "eval" / "arithmetic-step-000020.json").write_text("{}")
    with pytest.raises(CorruptRecord, match=r"arithmetic-step-000020\.json is not a complete result"):
        write_report(run.path)
    assert path.read_bytes() == before


def test_eva_6_a_plot_that_does_not_show_the_whole_run_says_so(tmp_path: Path) -> None:
    """Incident: the plot ended before the training reward collapsed."""
    whole = make_run(tmp_path / "whole", num_steps=40)
    assert re.findall(r"\d+", told(whole)["plot_range"]) == ["1", "40"]
    lines = (whole.path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (whole.path / "metrics.jsonl").write_text("".join(lines[:10]))
    assert re.findall(r"\d+", told(whole)["plot_range"]) == ["1", "10", "40"]


def test_every_alarm_of_the_page_about_them_is_explained() -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs" / "alarms.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    named = {name for cell in rows for name in re.findall(r"`(\w+)`", cell)}
    explained = (root / "src" / "strop" / "view" / "page" / "alarms.js").read_text(encoding="utf-8")
    # It has a page of its own, with the engines.
    assert named | {"weight_canary"} == set(re.findall(r"^  (\w+): ", explained, re.MULTILINE))


def test_gate_and_audit_are_in_it(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.events.append(Event(kind=EventKind.GATE, step=0, cause="parity", detail="0.02 nats"))
    audit = {"verdict": "red", "probes": [{"probe": "echo", "status": "fail"}]}
    (run.path / "audit.json").write_text(json.dumps(audit))
    shown = told(run)
    assert [check["cause"] for check in shown["gate"]] == ["parity"]
    assert shown["audit"] == audit
    for damaged in ("[]", "{"):
        (run.path / "audit.json").write_text(damaged)
        with pytest.raises(CorruptRecord):
            write_report(run.path)


def test_a_run_that_only_a_file_evaluated_shows_that(tmp_path: Path) -> None:
    run = make_run(tmp_path, eval_steps=())
    for step in (0, 40):
        result = make_result(step, num_solved=50 + step)
        write_result(result, run.path / "eval" / f"later.{result_name(result)}")
    assert [one["accuracy"] for one in told(run)["evals"]] == [0.25, 0.45]
    own = make_result(40, num_solved=100)
    write_result(own, run.path / "eval" / result_name(own))
    assert [one["accuracy"] for one in told(run)["evals"]] == [0.5]


def test_several_runs_stand_beside_the_first(tmp_path: Path) -> None:
    runs = [make_run(tmp_path, eval_steps=(0,)) for _ in range(3)]
    for run, rate, num_solved in zip(runs, ("1e-5", "1e-4", "1e-6"), (100, 140, 100), strict=True):
        (run.path / "spec.toml").write_text(
            f'name = "a"\n[task]\nname = "arithmetic"\n[optimizer]\nlr = {rate}\n'
        )
        result = make_result(40, num_solved=num_solved)
        write_result(result, run.path / "eval" / "arithmetic-step-000040.json")
    path = write_comparison([run.path for run in runs], tmp_path)
    assert path == tmp_path / "comparison.html"
    names = [run.path.name for run in runs]
    compared = answer(path, "compare", *names)
    # 140 of 200 where it were 100 of the same: 20 points more.
    assert [change["estimate"] for change in compared["changes"]] == pytest.approx([0.2, 0.0])
    assert {row["key"]: row["values"] for row in compared["settings"]}["optimizer.lr"] == [
        "1e-05",
        "0.0001",
        "1e-06",
    ]
    assert [line["key"] for line in answer(path, "runs")] != []
    assert all(answer(path, "run", name)["key"] == name for name in names)
    assert kept_in(path)["start"].startswith("#/compare?")


def test_what_cannot_be_compared_is_said(tmp_path: Path) -> None:
    runs = [make_run(tmp_path), make_run(tmp_path, eval_steps=())]
    path = write_comparison([run.path for run in runs], tmp_path)
    assert answer(path, "compare", *(run.path.name for run in runs))["error"]
    with pytest.raises(StoreError):
        write_comparison([runs[0].path, tmp_path], tmp_path / "nowhere")
