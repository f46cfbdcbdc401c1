"""Judges: which process verifies a reply.

A verifier whose time is bounded by the text runs in the caller's process (`InlineJudge`). One that may hang,
crash or run untrusted code runs in worker processes (`WorkerJudge`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from typing import Any, Protocol

from strop.hardware import describe_machine
from strop.hardware.busy_clock import BusyClock, Interval
from strop.rollout import Example, Failure, FailureOwner, Outcome
from strop.tasks.contract import GroupVerifier, Task
from strop.tasks.failures import owner_of_error
from strop.tasks.judging.fork_server import Handler
from strop.tasks.judging.pool import MAX_SLOW, CallFailure, WorkerPool
from strop.tasks.traits import group_verifier_of, limits_of, world_of

_RIVAL = "I do not know."
_EXAMPLE_FIELDS = tuple(field.name for field in fields(Example))


class Judge(Protocol):
    """Judges replies for one task."""

    async def judge(self, example: Example, text: str, *, is_member: bool = False) -> Outcome:
        """Return the outcome of a reply; it has a failure if the verifier gave none.

        `is_member`: only what the replies beside it do not matter for; `judge_group` judges the rest.
        Raises: any exception of the verifier, if it runs in this process.
        """
        ...

    async def judge_group(
        self, example: Example, texts: Sequence[str], outcomes: Sequence[Outcome]
    ) -> Sequence[Outcome]:
        """Complete the outcomes of members beside each other; their time limit is that of all together.

        Raises: like `judge`.
        """
        ...

    async def close(self) -> None:
        """End the judge's processes; running calls give no score. May be called twice."""
        ...


class InlineJudge:
    """Calls the task's verifier in this process."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._world = world_of(task)

    async def judge(self, example: Example, text: str, *, is_member: bool = False) -> Outcome:
        """Call the verifier, or play the reply if the task has turns."""
        if is_member:
            return _group_verifier(self._task, example).verify_member(example, text)
        if self._world is not None:
            outcome: Outcome = await self._world.play(example, text)
            return outcome
        return self._task.verify(example, text)

    async def judge_group(
        self, example: Example, texts: Sequence[str], outcomes: Sequence[Outcome]
    ) -> Sequence[Outcome]:
        """Call the group's verifier."""
        return _group_verifier(self._task, example).verify_group(example, texts, outcomes)

    async def close(self) -> None:
        """Do nothing: nothing was opened."""


class WorkerJudge:
    """Calls the task's verifier in processes that are killed at its limit."""

    def __init__(
        self, make_task: Callable[[], Task], *, limit_s: float, num_workers: int, max_slow: int = MAX_SLOW
    ) -> None:
        self.pool = WorkerPool(
            partial(_make_handler, make_task), num_workers=num_workers, limit_s=limit_s, max_slow=max_slow
        )

    async def judge(self, example: Example, text: str, *, is_member: bool = False) -> Outcome:
        """Judge in a worker. A time-out, a crash and an exception give an outcome without a score."""
        reply = await self._call(example, {"text": text, "is_member": is_member})
        return reply if isinstance(reply, Outcome) else outcome_from_json(reply)

    async def judge_group(
        self, example: Example, texts: Sequence[str], outcomes: Sequence[Outcome]
    ) -> Sequence[Outcome]:
        """Judge in a worker, each reply with its share of the time; one failure is that of all."""
        call = {"texts": list(texts), "outcomes": list(map(outcome_to_json, outcomes))}
        reply = await self._call(example, call, num_replies=len(texts))
        if isinstance(reply, Outcome):
            return [replace(outcome, failure=reply.failure) for outcome in outcomes]
        return [outcome_from_json(values) for values in reply]

    async def _call(self, example: Example, call: Mapping[str, Any], *, num_replies: int = 1) -> Any:
        """Return the worker's answer, or the outcome of its failure."""
        # Not asdict: its copies would be most of a judgement's cost in this process.
        values = {name: getattr(example, name) for name in _EXAMPLE_FIELDS}
        reply = await self.pool.call({"example": values, **call}, num_limits=num_replies)
        if isinstance(reply, CallFailure):
            return Outcome.lost(owner_of_error(reply.kind), f"verifier_{reply.kind}", reply.detail)
        return reply

    async def close(self) -> None:
        """End all workers."""
        await self.pool.close()


class TimedJudge:
    """Passes replies on, and measures the time during which at least one was being judged."""

    def __init__(self, judge: Judge, clock: Callable[[], float] = time.perf_counter) -> None:
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

    async def close(self) -> None:
        """Do nothing: the caller that opened the other judge closes it."""

    def take_intervals(self, most: int) -> list[Interval]:
        """Return the intervals with a running judgement since the last call. See `BusyClock`."""
        return self._clock.take_intervals(most)

    def take_busy_s(self) -> float:
        """Return the busy time (seconds) since the last call, and reset it."""
        return self._clock.take_s()


def open_judge(task: Task, make_task: Callable[[], Task]) -> Judge:
    """Return the judge that a task needs.

    `make_task` must be picklable and build an equal task, warmed up.
    """
    limit_s = task.limits.verify_limit_s
    if limit_s is None:
        return InlineJudge(task)
    return WorkerJudge(
        make_task,
        limit_s=limit_s,
        num_workers=describe_machine().num_logical_cpus,
        max_slow=0 if task.limits.verify_keeps_time else MAX_SLOW,
    )


async def judge_as_attempted(judge: Judge, task: Task, example: Example, text: str) -> Outcome:
    """Judge a reply; one that earns full marks alone is judged beside a right one, if its task compares.

    Every reply is the best of a group of one. If no right reply is known, the rival says nothing.
    """
    outcome, rivals = await judge.judge(example, text), task.gold_replies(example) or (_RIVAL,)
    is_best = outcome.reward is not None and outcome.reward >= limits_of(task, example).max_reward
    if not is_best or text in rivals or group_verifier_of(task, example) is None:
        return outcome
    pair = [text, rivals[0]]
    members = [await judge.judge(example, one, is_member=True) for one in pair]
    return (await judge.judge_group(example, pair, members))[0]


def _make_handler(make_task: Callable[[], Task]) -> Handler:
    task = make_task()

    def judge(call: Mapping[str, Any]) -> Any:
        example = Example(**call["example"])
        if "texts" in call:
            outcomes = list(map(outcome_from_json, call["outcomes"]))
            found = _group_verifier(task, example).verify_group(example, call["texts"], outcomes)
            return list(map(outcome_to_json, found))
        verify = _group_verifier(task, example).verify_member if call["is_member"] else task.verify
        return outcome_to_json(verify(example, call["text"]))

    return judge


def _group_verifier(task: Task, example: Example) -> GroupVerifier:
    verifier = group_verifier_of(task, example)
    assert verifier is not None
    return verifier


def outcome_to_json(outcome: Outcome) -> dict[str, Any]:
    """Return an outcome as JSON values."""
    return asdict(outcome)


def outcome_from_json(values: Mapping[str, Any]) -> Outcome:
    """Return the outcome of which `outcome_to_json` made these values."""
    failure = values["failure"]
    if failure is not None:
        failure = Failure(**{**failure, "owner": FailureOwner(failure["owner"])})
    return Outcome(**{**values, "failure": failure, "turn_rewards": tuple(values["turn_rewards"])})
