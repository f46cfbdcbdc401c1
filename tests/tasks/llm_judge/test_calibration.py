"""A judge compared with people and with itself, over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from strop.errors import DataError
from strop.tasks.llm_judge import JudgeReport, check_judge, read_labelled_replies, write_judge_report
from strop.tasks.llm_judge.calibration import cohens_kappa, correlation
from tests.fixtures.judge_server import Say, judge_server, scored, shown_reply
from tests.fixtures.judged import judge_task
from tests.fixtures.row_files import write_rows

pytestmark = pytest.mark.usefixtures("own_cache")


def labelled(num_good: int = 25, num_bad: int = 25) -> list[dict[str, Any]]:
    rows = [{"prompt": f"p{n}", "gold": "g", "reply": f"good {n}", "label": True} for n in range(num_good)]
    return rows + [
        {"prompt": f"q{n}", "gold": "g", "reply": f"bad {n}", "label": False} for n in range(num_bad)
    ]


def check(tmp_path: Path, say: Say, rows: Sequence[Any] = ()) -> JudgeReport:
    path = write_rows(tmp_path / "labels.jsonl", rows or labelled())
    with judge_server(say) as server:
        task = judge_task(tmp_path, server.url)
        report = asyncio.run(check_judge(task, read_labelled_replies(str(path))))
        task.client.close()
    return report


def test_a_judge_that_agrees_with_people(tmp_path: Path) -> None:
    report = check(tmp_path, lambda question: scored(float("good" in shown_reply(question))))
    assert (report.accuracy, report.kappa, report.agreement, report.num_unscored) == (1.0, 1.0, 1.0, 0)
    # 32 replies twice, past the cache.
    assert (report.num_repeated, report.num_calls, report.num_cached) == (32, 64, 0)
    assert report.faults == ()
    write_judge_report(report, tmp_path / "run" / "judge.json")
    assert json.loads((tmp_path / "run" / "judge.json").read_text())["kappa"] == 1.0


def test_a_judge_that_praises_everything_is_right_half_of_the_time_and_has_no_kappa(tmp_path: Path) -> None:
    report = check(tmp_path, lambda question: scored(1.0))
    # p = 25 / 50; it always says good, so e = 1 * 0.5 + 0 * 0.5 = 0.5 and kappa = 0.
    assert (report.accuracy, report.kappa) == (0.5, 0.0)
    assert report.length_correlation is None
    assert report.faults == ("kappa 0.00 with people is below 0.6",)


def test_a_judge_that_says_nothing_is_wrong_everywhere(tmp_path: Path) -> None:
    report = check(tmp_path, lambda question: "No idea.")
    # All labels turned: p = 0, e = 0.5, kappa = (0 - 0.5) / (1 - 0.5) = -1. Nothing twice is no agreement.
    assert (report.num_unscored, report.accuracy, report.kappa, report.agreement) == (50, 0.0, -1.0, 0.0)
    assert len(report.faults) == 2
    assert report.describe().startswith(
        "all 50 judgements failed: engine, judge_unparsable: the judge ended with"
    )


def test_a_judge_that_changes_its_mind_is_found(tmp_path: Path) -> None:
    scores = iter(range(10_000))
    report = check(tmp_path, lambda question: scored((next(scores) % 7) / 7))
    assert report.agreement < 0.95
    assert any("got the same score twice" in fault for fault in report.faults)


def test_a_judge_of_length_is_seen(tmp_path: Path) -> None:
    rows = [{**row, "reply": "x" * (number + 1)} for number, row in enumerate(labelled())]
    report = check(tmp_path, lambda question: scored(len(shown_reply(question)) / 50), rows)
    assert report.length_correlation == pytest.approx(1.0)
    assert "score and length correlate +1.00" in report.describe()


def test_kappa_by_hand() -> None:
    ours = [True] * 20 + [False] * 5 + [True] * 10 + [False] * 15
    theirs = [True] * 25 + [False] * 25
    # p = 35 / 50 = 0.7; e = 0.6 * 0.5 + 0.4 * 0.5 = 0.5; kappa = 0.2 / 0.5.
    assert cohens_kappa(ours, theirs) == pytest.approx(0.4)
    assert cohens_kappa([True] * 3, [True] * 3) == 1.0


def test_correlation_by_hand() -> None:
    # Means 2 and 2; products of deviations (-1)(-1) + 0 * 1 + 1 * 0 = 1, squares 2 and 2.
    assert correlation([(1.0, 1.0), (2.0, 3.0), (3.0, 2.0)]) == pytest.approx(0.5)
    assert correlation([]) is None


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        (labelled(24, 25), "49 .*24"),
        (labelled(50, 0), "50 .*50"),
        ([{"prompt": "p", "label": True}], "row 1"),
        ([{"prompt": "p", "reply": "r", "label": "yes"}], "row 1 .*label='yes'"),
        ([{"reply": "r", "label": True}], "row 1"),
    ],
)
def test_files_that_measure_nothing_are_refused(tmp_path: Path, rows: list[Any], named: str) -> None:
    with pytest.raises(DataError, match=named):
        read_labelled_replies(str(write_rows(tmp_path / "labels.jsonl", rows)))
    with pytest.raises(DataError):
        asyncio.run(check_judge(judge_task(tmp_path, "http://127.0.0.1:1/v1"), []))
