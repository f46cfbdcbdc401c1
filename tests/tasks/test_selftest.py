"""Tests of the verifier's self-test; its incidents are in tests/incidents/test_rewards.py."""

from __future__ import annotations

import pytest

from strop.errors import DataError
from strop.rollout import Example, Outcome, Split, make_example
from strop.spec import ArithmeticSpec, ReverseTextSpec
from strop.spec.schema import find_settings
from strop.tasks import build_task
from strop.tasks.generated.arithmetic import Arithmetic
from strop.tasks.registry import TASK_SUMMARIES
from tests.fixtures.judging import run_self_test


class UnscoredForEmpty(Arithmetic):
    """Gives no score to an empty reply, where a wrong reply is owed its 0."""

    def verify(self, example: Example, text: str) -> Outcome:
        return super().verify(example, text) if text else Outcome(parts={"correct": None})


class HalfForAnything(Arithmetic):
    """Pays 0.6 for whatever is said."""

    def verify(self, example: Example, text: str) -> Outcome:
        outcome = super().verify(example, text)
        return outcome if outcome.is_correct else Outcome(parts={"correct": 0.6}, is_correct=False)


def test_no_examples_are_refused() -> None:
    with pytest.raises(DataError, match="a self-test of task arithmetic on no example"):
        run_self_test(build_task(ArithmeticSpec()), [])


def test_unscored_reply_is_found() -> None:
    task = UnscoredForEmpty(ArithmeticSpec())
    findings = run_self_test(task, task.examples(Split.TRAIN)[:2])
    assert [(finding.probe, finding.reward) for finding in findings] == [("empty", None), ("empty", None)]


def test_pay_without_work_is_found_once_a_probe() -> None:
    task = HalfForAnything(ArithmeticSpec())
    findings = run_self_test(task, task.examples(Split.TRAIN)[:4])
    assert [finding.probe for finding in findings] == ["empty", "blank", "garbage", "letter", "echo"]
    assert {finding.reward for finding in findings} == {0.6}


def test_a_finding_shows_both_texts() -> None:
    task = HalfForAnything(ArithmeticSpec())
    example = make_example("arithmetic", {"a": 1, "b": 2}, "3")
    garbage = next(finding for finding in run_self_test(task, [example]) if finding.probe == "garbage")
    assert garbage.describe() == (
        f"probe garbage on example {example.example_id}: reply 'asdf', gold '3', reward 0.6; "
        "a wrong reply must earn less than full marks"
    )


def test_summaries_name_the_tasks_that_can_be_built() -> None:
    assert set(TASK_SUMMARIES) == set(find_settings(("task", "name"))[0].choices)
    assert build_task(ReverseTextSpec(name="reverse-text")).name in TASK_SUMMARIES
