"""Judges: which process verifies a reply.

A verifier whose time is bounded by the text runs in the caller's process (`InlineJudge`). One that may hang,
crash or run untrusted code runs in worker processes (`WorkerJudge`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from functools import partial
from typing import Any, Protocol

from strop.hardware import describe_machine
from strop.hardware.busy_clock import BusyClock, Interval
from strop.rollout import Example, Failure, FailureOwner, Outcome
from strop.tasks.contract import Task
from strop.tasks.failures import owner_of_error
from strop.tasks.judging.fork_server import Handler
from strop.tasks.judging.pool import MAX_SLOW, CallFailure, WorkerPool
from strop.tasks.traits import world_of

_EXAMPLE_FIELDS = tuple(field.name for field in fields(Example))


class Judge(Protocol):
    """Judges replies for one task."""

    async def judge(self, example: Example, text: str) -> Outcome:
        """Return the outcome of a reply; it has a failure if the verifier gave none.

        Raises: any exception of the verifier, if it runs in this process.
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

    async def judge(self, example: Example, text: str) -> Outcome:
        """Call the verifier, or play the reply if the task has turns."""
        if self._world is not None:
            outcome: Outcome = await self._world.play(example, text)
            return outcome
        return self._task.verify(example, text)

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

    async def judge(self, example: Example, text: str) -> Outcome:
        """Judge in a worker. A time-out, a crash and an exception give an outcome without a score."""
        # Not asdict: its copies would be most of a judgement's cost in this process.
        values = {name: getattr(example, name) for name in _EXAMPLE_FIELDS}
        reply = await self.pool.call({"example": values, "text": text})
        if isinstance(reply, CallFailure):
            return Outcome.lost(owner_of_error(reply.kind), f"verifier_{reply.kind}", reply.detail)
        return outcome_from_json(reply)

    async def close(self) -> None:
        """End all workers."""
        await self.pool.close()


class TimedJudge:
    """Passes replies on, and measures the time during which at least one was being judged."""

    def __init__(self, judge: Judge, clock: Callable[[], float] = time.perf_counter) -> None:
        self._judge = judge
        self._clock = BusyClock(clock)

    async def judge(self, example: Example, text: str) -> Outcome:
        """Pass the reply on."""
        with self._clock.running():
            return await self._judge.judge(example, text)

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


def _make_handler(make_task: Callable[[], Task]) -> Handler:
    task = make_task()

    def judge(call: Mapping[str, Any]) -> dict[str, Any]:
        return outcome_to_json(task.verify(Example(**call["example"]), call["text"]))

    return judge


def outcome_to_json(outcome: Outcome) -> dict[str, Any]:
    """Return an outcome as JSON values."""
    return asdict(outcome)


def outcome_from_json(values: Mapping[str, Any]) -> Outcome:
    """Return the outcome of which `outcome_to_json` made these values."""
    failure = values["failure"]
    if failure is not None:
        failure = Failure(**{**failure, "owner": FailureOwner(failure["owner"])})
    return Outcome(**{**values, "failure": failure, "turn_rewards": tuple(values["turn_rewards"])})
