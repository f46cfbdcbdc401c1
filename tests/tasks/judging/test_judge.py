"""Judging in this process and in workers gives the same outcome; what cannot be judged has no score."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from functools import partial

import pytest

from strop.hardware.busy_clock import BusyClock
from strop.rollout import Example, FailureOwner, Outcome, Split
from strop.tasks import Task, build_task, build_warm_task
from strop.tasks.generated import Arithmetic, ArithmeticSpec, ReasoningGymSpec
from strop.tasks.judging import Judge

GYM = ReasoningGymSpec(name="reasoning-gym", dataset="chain_sum", num_train=6, num_held_out=2)


class Troubled(Arithmetic):
    """Sums whose verifier does what a broken one does when it is told to."""

    async def verify(self, example: Example, text: str) -> Outcome:
        if text == "hang":
            time.sleep(600)  # noqa: ASYNC251
        if text == "raise":
            raise TypeError("unsupported operand")
        return await super().verify(example, text)


def make_troubled() -> Task:
    task = Troubled(ArithmeticSpec())
    task.limits = replace(task.limits, verify_limit_s=1.0)
    return task


def judge_all(judge: Judge, task: Task, texts: list[str]) -> list[Outcome]:
    async def run() -> list[Outcome]:
        example = task.examples(Split.TRAIN)[0]
        try:
            return list(await asyncio.gather(*(judge.judge(example, text) for text in texts)))
        finally:
            await judge.close()

    return asyncio.run(run())


def test_workers_judge_like_this_process() -> None:
    task = build_task(GYM)
    texts = [*task.gold_replies(task.examples(Split.TRAIN)[0]), "<answer>no</answer>", ""]
    in_workers = judge_all(Judge(task, partial(build_warm_task, GYM)), task, texts)
    assert in_workers == judge_all(Judge(task), task, texts)
    assert [outcome.reward for outcome in in_workers[:2]] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("text", "kind", "detail"),
    [
        ("hang", "verifier_timeout", "no verdict after 4 s"),
        ("raise", "verifier_TypeError", "unsupported operand"),
    ],
)
def test_rew_8_a_verifier_that_hangs_or_raises_costs_only_its_own_reply(
    text: str, kind: str, detail: str
) -> None:
    task = make_troubled()
    # Right answers have as long: a second, and four at their second try.
    judge = Judge(task, make_troubled)
    example = task.examples(Split.TRAIN)[0]
    right = str(example.answer)
    first, lost, last = judge_all(judge, task, [right, text, right])
    assert [first.reward, last.reward] == [1.0, 1.0]
    assert lost.reward is None
    assert lost.failure is not None
    assert (lost.failure.owner, lost.failure.kind) == (FailureOwner.TASK, kind)
    assert detail in lost.failure.detail


def test_overlapping_judgements_count_once() -> None:
    ticks = iter(range(100))

    class Slow(Arithmetic):
        async def verify(self, example: Example, text: str) -> Outcome:
            await asyncio.sleep(0.01)
            return await super().verify(example, text)

    async def run() -> list[float]:
        task = Slow(ArithmeticSpec())
        judge = Judge(task).with_own_clock()
        judge.busy = BusyClock(lambda: float(next(ticks)))
        example = task.examples(Split.TRAIN)[0]
        await asyncio.gather(*(judge.judge(example, "7") for _ in range(5)))
        together = judge.busy.take_s()
        await judge.judge(example, "7")
        await judge.judge(example, "7")
        return [together, judge.busy.take_s(), judge.busy.take_s()]

    # Read at the first begin and the last end: one tick for five at once, one each for two in turn.
    assert asyncio.run(run()) == [1.0, 2.0, 0.0]
