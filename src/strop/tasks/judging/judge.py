"""Judges: where a reply is verified.

A verifier that may hang or crash runs in processes that are killed at its limit (`WorkerPool`); any other is
awaited in the caller's own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from typing import Any

from strop.errors import SandboxError
from strop.hardware import describe_machine
from strop.hardware.busy_clock import BusyClock, Interval
from strop.rollout import Example, Failure, FailureOwner, Outcome
from strop.tasks.failures import owner_of_error
from strop.tasks.judging.fork_server import Handler
from strop.tasks.judging.pool import CallFailure, WorkerPool
from strop.tasks.task import Task

_RIVAL = "I do not know."
_EXAMPLE_FIELDS = tuple(field.name for field in fields(Example))
_MIN_WORKERS = 4  # So many endless calls at once let others pass.


class Judge:
    """Judges replies for one task."""

    def __init__(
        self, task: Task, make_task: Callable[[], Task] | None = None, *, num_workers: int | None = None
    ) -> None:
        """`make_task`: picklable, builds an equal task, warmed up, in other processes; None: there are none.

        `num_workers`: processes at once, None: as many as the machine has processors.
        """
        self.task = task
        limit_s = task.limits.verify_limit_s
        self.pool: WorkerPool | None = None
        if make_task is not None and limit_s is not None:
            self.pool = WorkerPool(
                partial(_make_handler, make_task),
                num_workers=num_workers or max(describe_machine().num_logical_cpus, _MIN_WORKERS),
                limit_s=limit_s,
            )

    async def judge(self, example: Example, text: str, *, is_member: bool = False) -> Outcome:
        """Return the outcome of a reply. A time-out, a crash or an exception in a worker gives no score.

        `is_member`: only what the replies beside it do not matter for; `judge_group` judges the rest.
        Raises: any exception of the verifier, if it runs in this process; a sandbox's gives no score.
        """
        pool = self._pool_for(example)
        if pool is None:
            try:
                outcome = await (self.task.verify_member if is_member else self.task.verify)(example, text)
            except SandboxError as error:
                outcome = _lost(type(error).__name__, str(error))
        else:
            reply = await _call(pool, example, {"text": text, "is_member": is_member})
            outcome = reply if isinstance(reply, Outcome) else outcome_from_json(reply)
        if is_member or not self.task.asks_judge:
            return outcome
        return (await self.task.verify_here(example, [text], [outcome]))[0]

    async def judge_group(
        self, example: Example, texts: Sequence[str], outcomes: Sequence[Outcome]
    ) -> Sequence[Outcome]:
        """Complete the outcomes of members beside each other; one failure is that of all.

        Each reply has its share of the time. Raises: like `judge`.
        """
        pool = self._pool_for(example)
        if pool is None:
            outcomes = await self.task.verify_group(example, texts, outcomes)
        else:
            call = {"texts": list(texts), "outcomes": list(map(outcome_to_json, outcomes))}
            reply = await _call(pool, example, call, num_replies=len(texts))
            if isinstance(reply, Outcome):
                return [replace(outcome, failure=reply.failure) for outcome in outcomes]
            outcomes = [outcome_from_json(values) for values in reply]
        return await self.task.verify_here(example, texts, outcomes) if self.task.asks_judge else outcomes

    async def close(self) -> None:
        """End the judge's processes; running calls give no score. May be called twice."""
        if self.pool is not None:
            await self.pool.close()

    def _pool_for(self, example: Example) -> WorkerPool | None:
        """Return where an example is judged: parts of a mixture differ."""
        has_limit = self.pool is not None and self.task.limits_of(example).verify_limit_s is not None
        return self.pool if has_limit else None


class TimedJudge(Judge):
    """Passes replies on to a judge, and measures the time during which at least one was being judged."""

    def __init__(self, judge: Judge, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(judge.task)
        self._judge = judge
        self._clock = BusyClock(clock)

    async def judge(self, example: Example, text: str, *, is_member: bool = False) -> Outcome:
        """Pass the reply on."""
        with self._clock.running():
            return await self._judge.judge(example, text, is_member=is_member)

    async def judge_group(
        self, example: Example, texts: Sequence[str], outcomes: Sequence[Outcome]
    ) -> Sequence[Outcome]:
        """Pass the group on."""
        with self._clock.running():
            return await self._judge.judge_group(example, texts, outcomes)

    def take_intervals(self, most: int) -> list[Interval]:
        """Return the intervals with a running judgement since the last call. See `BusyClock`."""
        return self._clock.take_intervals(most)

    def take_busy_s(self) -> float:
        """Return the busy time (seconds) since the last call, and reset it."""
        return self._clock.take_s()


async def judge_as_attempted(judge: Judge, example: Example, text: str) -> Outcome:
    """Judge a reply; one that earns full marks alone is judged beside a right one, if its task compares.

    Every reply is the best of a group of one. If no right reply is known, the rival says nothing.
    """
    task = judge.task
    outcome, rivals = await judge.judge(example, text), task.gold_replies(example) or (_RIVAL,)
    is_best = outcome.reward is not None and outcome.reward >= task.limits_of(example).max_reward
    if not is_best or text in rivals or not task.compares(example):
        return outcome
    pair = [text, rivals[0]]
    members = [await judge.judge(example, one, is_member=True) for one in pair]
    return (await judge.judge_group(example, pair, members))[0]


async def _call(pool: WorkerPool, example: Example, call: Mapping[str, Any], *, num_replies: int = 1) -> Any:
    """Return a worker's answer, or the outcome of its failure."""
    # Not asdict: its copies would be most of a judgement's cost in this process.
    values = {name: getattr(example, name) for name in _EXAMPLE_FIELDS}
    reply = await pool.call({"example": values, **call}, num_limits=num_replies)
    if isinstance(reply, CallFailure):
        return _lost(reply.kind, reply.detail)
    return reply


def _lost(kind: str, detail: str) -> Outcome:
    return Outcome.lost(owner_of_error(kind), f"verifier_{kind}", detail)


def _make_handler(make_task: Callable[[], Task]) -> Handler:
    task = make_task()

    async def judge(call: Mapping[str, Any]) -> Any:
        example = Example(**call["example"])
        if "texts" in call:
            outcomes = list(map(outcome_from_json, call["outcomes"]))
            found = await task.verify_group(example, call["texts"], outcomes)
            return list(map(outcome_to_json, found))
        verify = task.verify_member if call["is_member"] else task.verify
        return outcome_to_json(await verify(example, call["text"]))

    return lambda call: asyncio.run(judge(call))


def outcome_to_json(outcome: Outcome) -> dict[str, Any]:
    """Return an outcome as JSON values."""
    return asdict(outcome)


def outcome_from_json(values: Mapping[str, Any]) -> Outcome:
    """Return the outcome of which `outcome_to_json` made these values."""
    failure = values["failure"]
    if failure is not None:
        failure = Failure(**{**failure, "owner": FailureOwner(failure["owner"])})
    return Outcome(**{**values, "failure": failure, "turn_rewards": tuple(values["turn_rewards"])})
