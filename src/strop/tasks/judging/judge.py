"""Judges: where a reply is verified.

A verifier that may hang or crash runs in processes that are killed at its limit (`WorkerPool`); any other is
awaited in the caller's own.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from strop.errors import SandboxError
from strop.hardware import describe_machine
from strop.hardware.busy_clock import BusyClock
from strop.rollout import Example, Failure, FailureOwner, Outcome
from strop.tasks.judging.pool import Handler, WorkerPool
from strop.tasks.task import Outcomes, Task


class Judge:
    """Judges replies for one task."""

    def __init__(self, task: Task, make_task: Callable[[], Task] | None = None) -> None:
        """`make_task`: picklable, builds an equal task, warm, in other processes; None: there are none."""
        self.task = task
        self.busy = BusyClock()
        """Runs while at least one reply is being judged."""
        limit_s = task.limits.verify_limit_s
        self.pool: WorkerPool | None = None
        if make_task is not None and limit_s is not None:
            self.pool = WorkerPool(
                partial(_make_handler, make_task),
                num_workers=max(describe_machine().num_logical_cpus, 8),  # Endless calls let others pass.
                limit_s=limit_s,
            )

    def with_own_clock(self) -> Judge:
        """Return this judge, with the same processes and another clock."""
        judge = copy.copy(self)
        judge.busy = BusyClock()
        return judge

    async def judge(self, example: Example, text: str) -> Outcome:
        """Return the outcome of a reply. A time-out, a crash or an exception in a worker gives no score.

        Raises: any exception of the verifier, if it runs in this process; a sandbox's gives no score.
        """
        with self.busy.running():
            found = await self._call("verify", example, text)
            outcome: Outcome = Outcome(parts={}, failure=found) if isinstance(found, Failure) else found
            if not self.task.asks_judge:
                return outcome
            return (await self.task.verify_here(example, [text], [outcome]))[0]

    async def judge_group(self, example: Example, texts: Sequence[str], outcomes: Outcomes) -> Outcomes:
        """Judge replies beside each other, and add this to their outcomes; one failure is that of all.

        Each reply has its share of the time. Raises: like `judge`.
        """
        with self.busy.running():
            found = await self._call("verify_group", example, texts, outcomes, num_limits=len(texts))
            if isinstance(found, Failure):
                return [replace(outcome, failure=found) for outcome in outcomes]
            return list(await self.task.verify_here(example, texts, found))

    async def close(self) -> None:
        """End the judge's processes; running calls give no score. May be called twice."""
        if self.pool is not None:
            await self.pool.close()

    async def _call(self, method: str, example: Example, *given: Any, num_limits: int = 1) -> Any:
        """Return what a method of the task returns, here or in a worker, or its failure."""
        # Parts of a mixture differ in where they are judged.
        if self.pool is not None and self.task.limits_of(example).verify_limit_s is not None:
            found = await self.pool.call((method, example, *given), num_limits=num_limits)
            return replace(found, kind=f"verifier_{found.kind}") if isinstance(found, Failure) else found
        try:
            return await getattr(self.task, method)(example, *given)
        except SandboxError as error:
            kind = f"verifier_{type(error).__name__}"
            return Failure(owner=FailureOwner.INFRA, kind=kind, detail=str(error))


async def judge_as_attempted(judge: Judge, example: Example, text: str) -> Outcome:
    """Judge a reply; one that earns full marks alone is judged beside a right one, if its task compares.

    Every reply is the best of a group of one. If no right reply is known, the rival says nothing.
    """
    task = judge.task
    outcome = await judge.judge(example, text)
    is_best = outcome.reward is not None and outcome.reward >= task.limits_of(example).max_reward
    rivals = (task.gold_replies(example) or ("I do not know.",)) if task.compares(example) else ()
    if not is_best or text in rivals or not rivals:
        return outcome
    return (await judge.judge_group(example, [text, rivals[0]], [Outcome(parts={})] * 2))[0]


def _make_handler(make_task: Callable[[], Task]) -> Handler:
    task = make_task()

    async def call(method: str, *given: Any) -> Any:
        return await getattr(task, method)(*given)

    return lambda payload: asyncio.run(call(*payload))
