"""Tests of the self-test of verifiers; its incidents are in tests/incidents/test_rewards.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pydantic import JsonValue

from strop.errors import DataError
from strop.rollout import Example, Outcome, Split, make_example
from strop.spec.parts import MixtureSpec
from strop.tasks import build_task
from strop.tasks.generated import Arithmetic, ArithmeticSpec
from strop.tasks.mixture import Mixture
from tests.fixtures.judging import run_self_test


class UnscoredForEmpty(Arithmetic):
    """Gives no score to an empty reply, where a wrong reply is owed its 0."""

    async def verify(self, example: Example, text: str) -> Outcome:
        return await super().verify(example, text) if text else Outcome(parts={"correct": None})


class HalfForAnything(Arithmetic):
    """Pays 0.6 for whatever is said."""

    async def verify(self, example: Example, text: str) -> Outcome:
        outcome = await super().verify(example, text)
        return outcome if outcome.is_correct else Outcome(parts={"correct": 0.6}, is_correct=False)


def test_no_examples_are_refused() -> None:
    with pytest.raises(DataError, match="arithmetic"):
        run_self_test(build_task(ArithmeticSpec()), [])


def test_unscored_reply_is_found() -> None:
    task = UnscoredForEmpty(ArithmeticSpec())
    findings = run_self_test(task, task.examples(Split.TRAIN)[:2])
    assert findings[0].probe == "empty"
    assert {entry.reward for entry in findings[0].evidence} == {None}


def test_pay_without_work_is_found_once_a_probe() -> None:
    task = HalfForAnything(ArithmeticSpec())
    findings = run_self_test(task, task.examples(Split.TRAIN)[:4])
    assert [finding.probe for finding in findings] == ["empty", "garbage", "echo"]
    assert {entry.reward for finding in findings for entry in finding.evidence} == {0.6}


class SomeWithoutGold(Arithmetic):
    """Knows no right reply where the sum is even."""

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        return () if int(example.answer or "0") % 2 == 0 else super().gold_replies(example)


@pytest.mark.parametrize(("share", "num_found"), [(0.0, 2), (0.25, 2), (0.5, 0), (1.0, 0)])
def test_examples_without_gold_are_found_beyond_the_share_that_the_task_declares(
    share: float, num_found: int
) -> None:
    task = SomeWithoutGold(ArithmeticSpec())
    task.limits = replace(task.limits, max_goldless_frac=share)
    # Two even and two odd sums: half of the four have no right reply.
    examples = [make_example("arithmetic", {"a": 1, "b": b}, str(1 + b)) for b in (1, 2, 3, 4)]
    findings = run_self_test(task, examples)
    # The value is the share of examples with a right reply.
    assert [(finding.probe, finding.value) for finding in findings] == [("gold", 0.5)] * bool(num_found)


def test_a_share_of_one_part_of_a_mixture_is_no_excuse_for_another() -> None:
    """A part that promises gold is held to it beside one that does not."""
    parts: dict[str, dict[str, JsonValue]] = {
        "lenient": {"name": "arithmetic", "max_value": 5, "num_held_out": 4},
        "strict": {"name": "arithmetic", "min_value": 50, "max_value": 55, "num_held_out": 4},
    }
    specs = {label: ArithmeticSpec.model_validate(part) for label, part in parts.items()}
    lenient, strict = (SomeWithoutGold(spec) for spec in specs.values())
    lenient.limits = replace(lenient.limits, max_goldless_frac=1.0)
    task = Mixture(MixtureSpec(name="mixture", parts=parts), {"lenient": lenient, "strict": strict})
    (gold,) = [one for one in run_self_test(task, task.examples(Split.TRAIN)) if one.probe == "gold"]
    even = [e for e in strict.examples(Split.TRAIN) if int(e.answer or "0") % 2 == 0]
    assert gold.detail.startswith(f"{len(even)} examples ")
    assert even
