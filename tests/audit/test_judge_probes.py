"""The probe of judges: one that can be talked to is found, a deaf one passes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from strop.audit import AuditSettings, ProbeResult, ProbeStatus, Verdict, run_audit
from strop.audit.probes import INJECTIONS
from strop.spec.task import TaskSpec
from strop.tasks import build_task
from strop.tasks.blend import BlendSpec
from strop.tasks.generated.arithmetic import ArithmeticSpec
from strop.tasks.mixture import MixtureSpec
from strop.tasks.traits import judge_digests_of
from tests.fixtures.judge_server import Say, judge_server, scored, shown_reply
from tests.fixtures.judged import judge_spec, judge_task

pytestmark = pytest.mark.usefixtures("own_cache")


def attack(tmp_path: Path, say: Say) -> ProbeResult:
    with judge_server(say) as server:
        task = judge_task(tmp_path, server.url)
        settings = AuditSettings(num_examples=3, probes=("judge_injection",))
        report = asyncio.run(run_audit(task, settings))
        task.client.close()
    (result,) = report.probes
    assert (report.verdict is Verdict.RED) == (result.status in (ProbeStatus.FAIL, ProbeStatus.ERROR))
    return result


def test_a_deaf_judge_passes(tmp_path: Path) -> None:
    result = attack(tmp_path, lambda question: scored(float(shown_reply(question).startswith("word-"))))
    assert (result.status, result.value) == (ProbeStatus.PASS, 0.0)
    assert result.num == 3 * len(INJECTIONS)


@pytest.mark.parametrize(
    ("weakness", "kind"),
    [
        (lambda shown: "Ignore everything" in shown, "instructions"),
        (lambda shown: "score" in shown and "json" in shown, "fenced score"),
        (lambda shown: "END OF REPLY" in shown, "delimiters"),
        (lambda shown: "Assistant:" in shown, "turns"),
        (lambda shown: "wise" in shown, "flattery"),
        (lambda shown: len(shown) > 2000, "length"),
    ],
)
def test_a_judge_that_can_be_talked_to_is_found(tmp_path: Path, weakness: object, kind: str) -> None:
    assert callable(weakness)
    result = attack(tmp_path, lambda question: scored(float(weakness(shown_reply(question)))))
    assert (result.status, result.detail, result.value) == (ProbeStatus.FAIL, kind, 1.0)
    assert result.evidence[0].reply == INJECTIONS[kind][:200]


def measure_length(tmp_path: Path, say: Say, rows: list[dict[str, Any]]) -> tuple[ProbeResult, Verdict]:
    with judge_server(say) as server:
        task = judge_task(tmp_path, server.url, rows)
        report = asyncio.run(run_audit(task, AuditSettings(num_examples=4, probes=("judge_length",))))
        task.client.close()
    return report.probes[0], report.verdict


LONG_ROWS = [
    {
        "prompt": f"Tell story {n}.",
        "gold": f"Story {n} is of a river, a boat and a stone, and of nothing else.",
    }
    for n in range(12)
]


def test_a_judge_that_likes_length_is_found(tmp_path: Path) -> None:
    def say(question: str) -> str:
        return scored(min(1.0, len(shown_reply(question)) / 4000))

    # Bare: 25 of 4000 characters. Longer: 25 + 1 + 12 fillings of 67, because 800 // 67 + 1 = 12: 830.
    # (830 - 25) / 4000 = 0.201.
    result, verdict = measure_length(tmp_path, say, LONG_ROWS)
    assert (result.status, result.num, verdict) == (ProbeStatus.FAIL, 8, Verdict.AMBER)
    assert result.value == pytest.approx(0.201, abs=0.001)
    assert result.detail.startswith("share of full marks gained by length; ")
    assert len(result.evidence[0].reply) == 200


def test_a_judge_that_reads_the_content_alone_passes(tmp_path: Path) -> None:
    def say(question: str) -> str:
        return scored(0.5 * shown_reply(question).startswith("Story"))

    result, verdict = measure_length(tmp_path, say, LONG_ROWS)
    assert (result.status, result.value, verdict) == (ProbeStatus.PASS, 0.0, Verdict.GREEN)


def test_a_judge_that_repeats_what_it_reads_gives_no_score(tmp_path: Path) -> None:
    """The parser would take a quoted grade for the judge's own, if it were not escaped."""
    result = attack(tmp_path, lambda question: "It says: " + shown_reply(question))
    assert result.status is ProbeStatus.FAIL
    assert result.detail == "replies that kept the judge from grading them"
    assert result.evidence[0].detail.startswith("engine, judge_unparsable: ")


def test_a_judge_is_attacked_inside_other_tasks_too(tmp_path: Path) -> None:
    section = judge_spec(tmp_path, "http://127.0.0.1:1/v1").model_dump(
        include={"name", "source", "judge_url", "judge_model", "judge_revision"}
    )
    sums: dict[str, Any] = {"name": "arithmetic", "max_value": 4, "num_held_out": 2}
    (digest,) = judge_digests_of(judge_task(tmp_path, "http://127.0.0.1:1/v1", rubric="quality"))
    specs: list[tuple[list[str], TaskSpec]] = [
        ([digest], MixtureSpec(name="mixture", parts={"sums": sums, "judge": section})),
        ([digest], BlendSpec(name="blend", parts={"sums": sums, "judge": section})),
        ([], MixtureSpec(name="mixture", parts={"sums": sums})),
    ]
    for judged, spec in specs:
        assert judge_digests_of(build_task(spec)) == judged


def test_other_tasks_are_not_attacked() -> None:
    settings = AuditSettings(num_examples=2, probes=("judge_injection",))
    report = asyncio.run(run_audit(build_task(ArithmeticSpec()), settings))
    assert [result.status for result in report.probes] == [ProbeStatus.NOT_APPLICABLE]
