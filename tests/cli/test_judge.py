"""`strop tasks check --judges`, and `strop train` on a task that a model judges, over a real HTTP server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from strop.record import RunDir
from tests.fixtures.commands import Run
from tests.fixtures.judge_server import Say, judge_server, scored, shown_reply
from tests.fixtures.judged import ROWS
from tests.fixtures.row_files import write_rows

TASK = """name = "llm-judge"
source = "rows.jsonl"
num_held_out = 4
rubric = "correctness"
judge_url = "{url}"
judge_model = "scripted"
judge_revision = "1"
calibration = "labels.jsonl"
max_reply_tokens = 8
"""


def compare(question: str) -> str:
    gold = question.partition("Reference answer:\n")[2].partition("\n")[0]
    return scored(float(shown_reply(question).strip() == gold))


def praise(question: str) -> str:
    return scored(1.0)


@pytest.fixture
def judged_file(folder: Path) -> Path:
    """A run file with a place for the judge's address, questions, and 50 labelled replies."""
    write_rows(folder / "rows.jsonl", ROWS)
    labels = [
        {
            **row,
            "reply": f"word-{number}" if is_good else "no idea",
            "gold": f"word-{number}",
            "label": is_good,
        }
        for number, row in enumerate([*ROWS, {"prompt": "Which?"}])
        for is_good in (True, False)
    ]
    write_rows(folder / "labels.jsonl", labels)
    path = folder / "judged.toml"
    path.write_text((folder / "run.toml").read_text().replace('name = "arithmetic"\n', TASK))
    return path


def point(path: Path, url: str) -> None:
    path.write_text(path.read_text().replace("{url}", url))


def test_a_judge_that_agrees_with_people_is_shown(run: Run, judged_file: Path) -> None:
    with judge_server(compare) as server:
        point(judged_file, server.url)
        ended = run("tasks", "check", "judged.toml", "--judges")
        listed = json.loads(run("tasks", "check", "judged.toml", "--judges", "--json").out)
    assert (ended.code, ended.err) == (0, "")
    assert "judge scripted (1): accuracy 100.0%, kappa 1.00 on 50 labelled replies, 0 unscored" in ended.out
    # All 50 were judged by the first command, and are known now.
    assert [(report["num_rows"], report["num_cached"], report["kappa"]) for report in listed] == [
        (50, 50, 1.0)
    ]


@pytest.mark.parametrize(
    ("say", "fault"),
    [
        (praise, "kappa 0.00 with people is below 0.6"),
        (lambda question: "No grade from me.", "0% of 32 replies got the same score twice"),
    ],
)
def test_a_judge_that_does_not_ends_with_76(run: Run, judged_file: Path, say: Say, fault: str) -> None:
    with judge_server(say) as server:
        point(judged_file, server.url)
        ended = run("tasks", "check", "judged.toml", "--judges")
    assert ended.code == 76
    assert fault in ended.err


def test_a_run_without_a_judge_has_none_to_check(run: Run, folder: Path) -> None:
    ended = run("tasks", "check", "run.toml", "--judges")
    assert ended.code == 2
    assert "a check of the judges of task arithmetic, which names no labelled replies" in ended.err


@pytest.mark.slow
def test_a_run_is_judged_by_a_model(run: Run, folder: Path, judged_file: Path) -> None:
    with judge_server(compare) as server:
        point(judged_file, server.url)
        ended = run("train", "judged.toml")
        assert ended.code == 0, ended.err
    (path,) = (found.parent for found in (folder / "runs").glob("*/run.json"))
    assert json.loads((path / "judge-0.json").read_text())["kappa"] == 1.0
    probes = {
        probe["probe"]: probe["status"] for probe in json.loads((path / "audit.json").read_text())["probes"]
    }
    assert probes["judge_injection"] == "pass"
    for line in RunDir.open(path).metrics.read():
        assert line["judge_unparsable_frac"] == 0.0
        assert line["failed_frac"] == 0.0


@pytest.mark.slow
def test_a_judge_that_pays_for_everything_trains_nothing(run: Run, folder: Path, judged_file: Path) -> None:
    with judge_server(praise) as server:
        point(judged_file, server.url)
        ended = run("train", "judged.toml")
    assert ended.code == 76
    for cause in ("verifier: ", "audit: red", "judge_injection", "judges: ", "kappa 0.00"):
        assert cause in ended.err
