"""Scores beyond what a task says that a reply can earn, wherever they come from."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from strop.environments import Action, SingleTurn
from strop.rollout import Example, Failure, FailureOwner, FinishReason, Message, Outcome, Split, make_example
from strop.spec.parts import MixtureSpec
from strop.tasks import Task, TaskLimits, build_task
from strop.tasks.judging import Judge
from strop.tasks.mixture import Mixture
from strop.tasks.task import is_within, within_bounds
from tests.fixtures.judging import judge_replies, run_self_test
from tests.tasks.user.test_rows import spec_of

LIMITS = TaskLimits(max_reply_tokens=8)
HALF = TaskLimits(max_reply_tokens=8, max_reward=0.5, min_reward=-0.5)


class Pays(Task):
    """Pays what a reply names; every other one by the gold answer."""

    version = "1"

    def __init__(self, limits: TaskLimits = LIMITS, name: str = "pays") -> None:
        self.name = name
        self.limits = limits

    def examples(self, split: Split) -> Sequence[Example]:
        return [make_example(self.name, {"n": split.value, "number": n}, f"gold {n}") for n in range(4)]

    def render(self, example: Example) -> tuple[Message, ...]:
        return (Message(role="user", content="?"),)

    async def verify(self, example: Example, text: str) -> Outcome:
        try:
            return Outcome(parts={"named": float(text)}, is_correct=True)
        except ValueError:
            is_right = text == example.answer
            return Outcome(parts={"gold": float(is_right) * self.limits.max_reward}, is_correct=is_right)

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        return (example.answer or "",)


def outcome_of(task: Task, reply: str, example: Example | None = None, by: Judge | None = None) -> Outcome:
    """Judge a reply where rollouts are judged, in training and evaluation alike."""

    async def attempt() -> Outcome:
        world = SingleTurn(task, by)
        await world.reset(example or task.examples(Split.TRAIN)[0], 0)
        await world.step(Action(text=reply, finish_reason=FinishReason.EOS))
        return await world.score()

    return asyncio.run(attempt())


def kind_of(outcome: Outcome) -> str | None:
    return None if outcome.failure is None else outcome.failure.kind


@pytest.mark.parametrize(
    ("score", "limits", "kind"),
    [
        ("1.0", LIMITS, None),
        ("0.0", LIMITS, None),
        ("1.0000001", LIMITS, None),  # a sum in float32
        ("2.39", LIMITS, "ceiling"),
        ("-0.01", LIMITS, "impossible_value"),
        ("inf", LIMITS, "impossible_value"),
        ("nan", LIMITS, "impossible_value"),
        ("-0.5", HALF, None),
        ("-0.6", HALF, "impossible_value"),
        ("0.6", HALF, "ceiling"),
    ],
)
def test_a_score_beyond_its_bounds_is_a_failure_of_the_task(
    score: str, limits: TaskLimits, kind: str | None
) -> None:
    outcome = outcome_of(Pays(limits), score)
    assert kind_of(outcome) == kind
    if kind is None:
        assert outcome.reward == float(score)
        return
    assert (outcome.reward, outcome.is_correct, outcome.is_scored) == (None, None, False)
    assert outcome.failure is not None
    assert outcome.failure.owner is FailureOwner.TASK
    assert f"{limits.min_reward:g} to {limits.max_reward:g}" in outcome.failure.detail
    # What it said stays on record, as far as a record can hold it.
    assert outcome.parts == {"named": float(score) if math.isfinite(float(score)) else None}


def test_what_has_no_score_keeps_its_own_reason() -> None:
    lost = Outcome(parts={"x": 9.0}, failure=Failure(owner=FailureOwner.INFRA, kind="timeout"))
    assert within_bounds(lost, LIMITS) is lost
    unscored = Outcome(parts={"x": None})
    assert within_bounds(unscored, LIMITS) is unscored
    # The rest of a score that is only partly known is no score.
    partly = Outcome(parts={"x": None, "y": 9.0})
    assert within_bounds(partly, LIMITS) is partly
    assert not is_within(math.nan, LIMITS)


def test_each_part_of_a_mixture_has_its_own_full_marks() -> None:
    tables: dict[str, Any] = {label: {"name": "arithmetic"} for label in ("whole", "half")}
    parts = {"whole": Pays(name="whole"), "half": Pays(HALF, name="half")}
    mixture = Mixture(MixtureSpec(name="mixture", parts=tables), parts)
    assert (mixture.limits.max_reward, mixture.limits.min_reward) == (1.0, -0.5)
    whole, half = (parts[label].examples(Split.TRAIN)[0] for label in ("whole", "half"))
    assert [kind_of(outcome_of(mixture, "0.7", one)) for one in (whole, half)] == [None, "ceiling"]
    assert [kind_of(outcome_of(mixture, "-0.3", one)) for one in (whole, half)] == ["impossible_value", None]
    # A right reply to either earns full marks, and the self-test holds each to its own.
    assert run_self_test(mixture, [whole, *parts["whole"].examples(Split.TRAIN)[1:], half]) == []


def test_a_reward_function_of_the_users_is_held_to_what_the_run_file_says(tmp_path: Path) -> None:
    code = "def score(reply, **columns):\n    return float(reply)\n"
    task = build_task(spec_of(tmp_path, code=code))
    found = [
        kind_of(within_bounds(one, task.limits))
        for one in judge_replies(spec_of(tmp_path, code=code), "1", "2.39", "-1")
    ]
    assert found == [None, "ceiling", "impossible_value"]
    wide = spec_of(tmp_path, code=code, max_reward=3.0, min_reward=-1.0)
    limits = build_task(wide).limits
    found = [kind_of(within_bounds(one, limits)) for one in judge_replies(wide, "1", "2.39", "-1", "3.5")]
    assert found == [None, None, None, "ceiling"]


def test_the_self_test_finds_a_right_reply_that_earns_too_much() -> None:
    class PaysTwice(Pays):
        async def verify(self, example: Example, text: str) -> Outcome:
            is_right = text == example.answer
            return Outcome(parts={"gold": 2.39 * is_right}, is_correct=is_right)

    task = PaysTwice()
    findings = run_self_test(task, task.examples(Split.TRAIN))
    (ceiling,) = [finding for finding in findings if finding.probe == "ceiling"]
    assert ceiling.evidence[0].reward == 2.39
