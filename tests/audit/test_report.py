"""What an audit says, how it is kept, what may be accepted; graders that are slow or hang now and then."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import pytest

from strop.audit import (
    AuditReport,
    AuditSettings,
    ProbeResult,
    ProbeStatus,
    Verdict,
    accept_probes,
    context,
    describe_acceptance,
    find_audit,
    run_audit,
    stored_audit_path,
    write_audit,
)
from strop.audit.report import SCHEMA
from strop.rollout import Example, FailureOwner, Outcome
from strop.tasks.judging import Judge
from strop.tasks.task import Task
from tests.audit.test_audit import (
    MATCHES_EITHER_WAY,
    PAYS_FOR_A_LETTER,
    PAYS_FOR_THE_QUESTION,
    Capitals,
    audit,
    find,
)


def result(probe: str, status: ProbeStatus) -> ProbeResult:
    return ProbeResult(probe=probe, status=status, num=0 if status is ProbeStatus.NOT_APPLICABLE else 1)


@pytest.mark.parametrize(
    ("probes", "verdict"),
    [
        ([], Verdict.GREEN),
        ([result("constant", ProbeStatus.WARN)], Verdict.AMBER),
        ([result("constant", ProbeStatus.WARN), result("echo", ProbeStatus.FAIL)], Verdict.RED),
        ([result("gold", ProbeStatus.FAIL)], Verdict.RED),
        ([result("cost", ProbeStatus.ERROR)], Verdict.RED),
        ([result("label_leak", ProbeStatus.NOT_APPLICABLE)], Verdict.GREEN),
    ],
)
def test_the_verdict_follows_from_the_probes(probes: list[ProbeResult], verdict: Verdict) -> None:
    assert replace(audit(Capitals(), probes=()), probes=tuple(probes)).verdict is verdict


def test_a_stored_audit_is_found_by_the_tasks_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STROP_CACHE", str(tmp_path))
    report = audit(MATCHES_EITHER_WAY)
    write_audit(report, stored_audit_path("capitals", "1"))
    assert find_audit("capitals", "1") == report
    assert find_audit("capitals", "2") is None


def test_a_damaged_audit_is_as_good_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STROP_CACHE", str(tmp_path))
    path = stored_audit_path("capitals", "1")
    write_audit(audit(MATCHES_EITHER_WAY), path)
    path.write_bytes(path.read_bytes()[:-9])
    assert find_audit("capitals", "1") is None


def test_an_audit_by_other_probes_is_as_good_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STROP_CACHE", str(tmp_path))
    write_audit(audit(Capitals(), probes=("empty",)), stored_audit_path("capitals", "1"))
    monkeypatch.setattr("strop.audit.report.SCHEMA", SCHEMA + 1)
    assert find_audit("capitals", "1") is None


def test_a_report_holds_all_that_it_was_made_of() -> None:
    report = audit(MATCHES_EITHER_WAY, num_examples=8, seed=3)
    values = report.to_json()
    assert (values["task"], values["task_version"], values["seed"], values["num_examples"]) == (
        *("capitals", "1", 3, 8),
    )
    (garbage,) = [probe for probe in values["probes"] if probe["probe"] == "garbage"]
    assert (garbage["status"], garbage["evidence"][0]["reply"]) == ("fail", "a")


def red_report() -> AuditReport:
    return audit(PAYS_FOR_THE_QUESTION, probes=("empty", "echo"))


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("echo", Verdict.GREEN),
        ("echo@1", Verdict.GREEN),
        ("echo@2", Verdict.RED),
        # What passed needs no acceptance.
        ("empty", Verdict.RED),
    ],
)
def test_an_acceptance_holds_for_its_probe_and_its_version(name: str, verdict: Verdict) -> None:
    report = accept_probes(red_report(), {name: "echoes are asked for"})
    assert (report.verdict, report.accepted_verdict) == (Verdict.RED, verdict)
    line = describe_acceptance(report)
    assert line.startswith(f"{verdict}: echo fail")
    assert ("accepted: echo" in line) == (verdict is Verdict.GREEN)
    assert ("train.accept = 'audit.echo@1: reason' goes on" in line) == (verdict is Verdict.RED)


def test_a_user_without_a_name_can_accept_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> str:
        raise KeyError("getpwuid(): uid not found: 4711")

    monkeypatch.setattr("getpass.getuser", fail)
    assert [entry.user for entry in accept_probes(red_report(), {"echo": "asked for"}).accepted] == [
        str(os.getuid())
    ]


class Computes(Capitals):
    """Takes long for long replies, in the process of the run."""

    async def verify(self, example: Example, text: str) -> Outcome:
        await asyncio.sleep(0.2 if len(text) > 10**5 else 0.0)
        return await super().verify(example, text)


@pytest.mark.parametrize(("limit_s", "status"), [(5.0, ProbeStatus.PASS), (0.1, ProbeStatus.WARN)])
def test_a_verifier_that_takes_long_for_a_long_reply_is_found(
    limit_s: float, status: ProbeStatus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "LONG_LIMIT_S", limit_s)
    assert find(audit(Computes(), probes=("cost",)), "cost").status is status


def test_a_slow_grader_costs_examples_and_not_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "ENOUGH_S", 0.0)
    report = audit(PAYS_FOR_A_LETTER, probes=("garbage", "constant", "determinism"))
    shown = [(result.probe, result.status.value, result.num) for result in report.probes]
    # Two examples are always asked, two replies to each are repeated.
    assert shown == [("garbage", "fail", 2), ("constant", "pass", 2), ("determinism", "pass", 4)]


class SometimesLate(Judge):
    """A judge whose verifier is ended at its limit once in so many judgements."""

    def __init__(self, task: Task, every: int) -> None:
        super().__init__(task)
        self.every = every
        self.num = 0

    async def judge(self, example: Example, text: str) -> Outcome:
        self.num += 1
        if self.num % self.every == 0:
            return Outcome.lost(FailureOwner.TASK, "verifier_timeout", "no verdict after 20 s")
        return await super().judge(example, text)


@pytest.mark.parametrize(("every", "status"), [(10**6, "pass"), (40, "pass"), (10, "fail")])
def test_replies_that_are_late_are_told_apart_from_wrong_ones(every: int, status: str) -> None:
    """One in forty is what a busy machine does; one in ten is a verifier that hangs."""
    task = Capitals()
    settings = AuditSettings(probes=("garbage", "gold"), num_examples=40)
    report = asyncio.run(run_audit(task, settings, SometimesLate(task, every)))
    assert {result.status.value for result in report.probes} == {status}
    late = asyncio.run(run_audit(task, replace(settings, probes=("determinism",)), SometimesLate(task, 40)))
    assert ProbeStatus.FAIL not in {result.status for result in late.probes}
