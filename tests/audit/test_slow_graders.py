"""Graders that are slow, hang now and then, or run on a busy machine."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from strop.audit import AuditSettings, ProbeStatus, answer_probes, context, probes, run_audit
from strop.rollout import Example, FailureOwner, Outcome
from strop.tasks.contract import Task
from tests.audit.test_audit import Capitals, PaysForALetter, audit, find


class Computes(Capitals):
    """Takes long for long replies, in the process of the run."""

    def verify(self, example: Example, text: str) -> Outcome:
        until = time.thread_time() + (0.2 if len(text) > 10**5 else 0.0)
        while time.thread_time() < until:
            pass
        return super().verify(example, text)


def test_a_verifier_that_computes_for_long_beside_the_run_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find(audit(Computes(), num_examples=4, probes=("garbage",)), "garbage").status is ProbeStatus.PASS
    monkeypatch.setattr(probes, "_MAX_CPU_S", 0.1)
    result = find(audit(Computes(), num_examples=4, probes=("garbage",)), "garbage")
    assert (result.status, result.value) == (ProbeStatus.FAIL, 4.0)
    assert result.detail == "replies that take more than 0.1 s to judge"


def test_a_slow_grader_costs_examples_and_not_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "ENOUGH_S", 0.0)
    monkeypatch.setattr(answer_probes, "ENOUGH_S", 0.0)
    report = audit(PaysForALetter(), probes=("garbage", "constant", "determinism"))
    shown = [(result.probe, result.status.value, result.num) for result in report.probes]
    # Four examples are always asked, and one where each of its two replies is repeated.
    assert shown == [("garbage", "fail", 4), ("constant", "pass", 4), ("determinism", "pass", 2)]


class SometimesLate:
    """A judge whose verifier is ended at its limit once in so many judgements."""

    def __init__(self, task: Task, every: int) -> None:
        self.task = task
        self.every = every
        self.num = 0

    async def judge(self, example: Example, text: str) -> Outcome:
        self.num += 1
        if self.num % self.every == 0:
            return Outcome.lost(FailureOwner.TASK, "verifier_timeout", "no verdict after 20 s")
        return self.task.verify(example, text)

    async def close(self) -> None:
        pass


@pytest.mark.parametrize(("every", "status"), [(10**6, "pass"), (40, "warn"), (10, "fail")])
def test_replies_that_are_late_are_told_apart_from_wrong_ones(every: int, status: str) -> None:
    """One in forty is what a busy machine does; one in ten is a verifier that hangs."""
    task = Capitals()
    settings = AuditSettings(probes=("garbage", "gold"), num_examples=40)
    report = asyncio.run(run_audit(task, settings, SometimesLate(task, every)))
    assert {result.status.value for result in report.probes} == {status}
    late = asyncio.run(
        run_audit(task, replace(settings, probes=("determinism", "order")), SometimesLate(task, 40))
    )
    assert ProbeStatus.FAIL not in {result.status for result in late.probes}
