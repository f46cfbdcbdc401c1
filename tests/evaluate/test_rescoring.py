"""Judging kept replies anew: nothing is generated, both versions are named, changes are listed."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from strop.engine import GenerationRequest
from strop.environments import SingleTurn, run_groups
from strop.errors import CheckRefused
from strop.evaluate import EvalPlan, EvalResult, EvalSettings, plan_evaluation, rescore
from strop.rollout import Example, Outcome, Rollout, Split
from strop.tasks import Task
from strop.tasks.generated import Arithmetic
from strop.tokenizer import Tokenizer
from tests.evaluate.arithmetic_world import (
    Answer,
    BrittleArithmetic,
    add,
    make_engine,
    make_spec,
    make_task,
    make_tokenizer,
)
from tests.fixtures.dummy_engine import ScriptedReply

SETTINGS = EvalSettings(run_seed=0, step=0, split=Split.HELD_OUT, num_samples=1)


class StrictArithmetic(Arithmetic):
    """Arithmetic that wants the sum alone, by a new version."""

    version = "strict"

    def __init__(self) -> None:
        super().__init__(make_spec())

    async def verify(self, example: Example, text: str) -> Outcome:
        is_correct = text == example.answer
        return Outcome(parts={"correct": float(is_correct)}, is_correct=is_correct, extracted=text)


@pytest.fixture
def tokenizer(tmp_path: Any) -> Tokenizer:
    return make_tokenizer(tmp_path)


def attempt(tokenizer: Tokenizer, answer: Answer, task: Task) -> tuple[EvalPlan, list[Rollout]]:
    planned = plan_evaluation(task=task, tokenizer=tokenizer, settings=SETTINGS, model_digest="m")
    engine = make_engine(tokenizer, answer)
    groups = asyncio.run(run_groups(lambda: SingleTurn(task), engine, tokenizer, planned.rollout_plans_P_G))
    return planned.plan, [rollout for group in groups for rollout in group.rollouts]


def judge_anew(
    plan: EvalPlan, rollouts: list[Rollout], task: Task
) -> tuple[EvalResult, list[tuple[Rollout, Rollout]]]:
    return asyncio.run(rescore(plan, rollouts, task))


def test_the_same_verifier_changes_nothing(tokenizer: Tokenizer) -> None:
    plan, rollouts = attempt(tokenizer, add, make_task())
    result, changed = judge_anew(plan, rollouts, make_task())
    assert (changed, result.identity, result.greedy.accuracy) == ([], plan, 1.0)


def test_changed_verdicts_are_listed(tokenizer: Tokenizer) -> None:
    def answer(a: int, b: int, request: GenerationRequest) -> str:
        # Greedy replies are the sum alone, sampled ones a sentence.
        return str(a + b) if request.sampling.temperature == 0 else f"{a} + {b} = {a + b}"

    plan, rollouts = attempt(tokenizer, answer, make_task())
    result, changed = judge_anew(plan, rollouts, StrictArithmetic())
    assert (result.task_version, result.replies_version) == ("strict", make_task().version)
    assert result.sampled is not None
    assert (result.greedy.accuracy, result.sampled.accuracy) == (1.0, 0.0)
    assert [old for old, _ in changed] == rollouts[1::2]
    assert {(old.outcome.reward, new.outcome.reward) for old, new in changed} == {(1.0, 0.0)}
    assert changed[0][1].outcome.extracted == rollouts[1].turns[1].text


def test_a_verifier_that_was_mended_judges_what_it_failed_on(tokenizer: Tokenizer) -> None:
    plan, rollouts = attempt(tokenizer, add, BrittleArithmetic(make_spec()))
    num_failed = sum(not rollout.outcome.is_scored for rollout in rollouts)
    assert num_failed > 0
    mended, changed = judge_anew(plan, rollouts, make_task())
    assert mended.is_valid
    assert [(old.outcome.is_scored, new.outcome.is_correct) for old, new in changed] == [
        (False, True)
    ] * num_failed
    # And the other way round: a verifier that fails now gives no verdict, and says why.
    assert judge_anew(plan, rollouts, BrittleArithmetic(make_spec()))[1] == []
    plan, rollouts = attempt(tokenizer, add, make_task())
    broken, changed = judge_anew(plan, rollouts, BrittleArithmetic(make_spec()))
    assert {(old.outcome.is_correct, new.outcome.is_scored) for old, new in changed} == {(True, False)}
    assert {cause.failure.kind for cause in broken.causes} == {"TypeError"}
    assert broken.verdict.startswith(f"{len(changed)} of ")


def test_what_never_brought_a_reply_stays_what_it_was(tokenizer: Tokenizer) -> None:
    aborted = ScriptedReply(text="", is_aborted=True)
    plan, rollouts = attempt(
        tokenizer, lambda a, b, request: aborted if a == 1 else add(a, b, request), make_task()
    )
    result, changed = judge_anew(plan, rollouts, StrictArithmetic())
    num_lost = sum(rollout.outcome.failure is not None for rollout in rollouts)
    assert [(cause.failure.kind, cause.num) for cause in result.causes] == [("abort", num_lost)]
    assert len(changed) == len(rollouts) - num_lost


def test_a_cut_reply_stays_cut(tokenizer: Tokenizer) -> None:
    endless = ScriptedReply(text="1 and ", ends=False)
    plan, rollouts = attempt(tokenizer, lambda a, b, request: endless, make_task())
    assert judge_anew(plan, rollouts, StrictArithmetic())[0].greedy.truncated_frac == 1.0


def test_examples_of_another_task_are_refused(tokenizer: Tokenizer) -> None:
    plan, rollouts = attempt(tokenizer, add, make_task())
    # Another range shuffles other pairs into the held-out part.
    other = make_task(max_value=6)
    with pytest.raises(CheckRefused, match=r"[1-9]\d* of 10 example ids are not in its held_out split, the"):
        judge_anew(plan, rollouts, other)
    renamed = replace(rollouts[0].example, example_id="0" * 16)
    with pytest.raises(CheckRefused, match=r"1 of 10 example ids .*, the first is 0{16}\. Allowed: .*Next: "):
        judge_anew(
            plan, [replace(rollout, example=renamed) for rollout in rollouts[:2]] + rollouts[2:], make_task()
        )
