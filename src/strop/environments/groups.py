"""The attempts at one example, which are compared with each other.

An attempt that the machine or the engine failed is repeated with the same seeds, and is then what it would
have been. A failure of the task or its world would only happen again.

Attempts may share their first turns: these are played once, and each attempt goes on from a copy of the
world, with the exact ids so far. A world that cannot be copied is replayed with the same seed and the same
replies, and must answer the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from strop.engine import Engine
from strop.environments.contract import Environment, Kept
from strop.environments.extending import PromptCache
from strop.environments.rollout import Attempt, RolloutPlan
from strop.errors import ConfigError, DataError
from strop.rollout import FailureOwner, Group, Message, Outcome, Rollout
from strop.tasks.failures import AttemptFailed
from strop.tokenizer import Tokenizer

MAX_REFILLS = 2
"""Largest number of repetitions of an attempt."""
NUM_REFILLS = "num_refills"
"""Metric of a repeated attempt: the number of repetitions."""
_PAUSE_S = 0.1
"""Pause before the first repetition; the second waits twice as long."""
_REFILLED = (FailureOwner.INFRA, FailureOwner.ENGINE)
Result = TypeVar("Result")


async def run_group(
    make_environment: Callable[[], Environment],
    engine: Engine,
    tokenizer: Tokenizer,
    plans: Sequence[RolloutPlan],
) -> Group:
    """Attempt one example several times concurrently; the prompt is rendered and encoded once.

    The rollouts are in the order of the plans. For a task, `make_environment` is `choose_environment(task)`.
    Raises: DataError if there is no plan or the plans differ in example or prompt format; ConfigError if no
        turns can be shared; else like `run_rollout`, after the other rollouts were cancelled.
    """
    if len({(plan.example.example_id, str(plan.prompt_format)) for plan in plans}) != 1:
        num_examples = len({plan.example.example_id for plan in plans})
        raise DataError(
            f"a group of {len(plans)} plans for {num_examples} different examples or prompt formats"
        )
    prompts = PromptCache(tokenizer, plans[0].prompt_format)
    trees = _Trees(make_environment, engine, prompts)
    size = plans[0].num_branches
    growing = [trees.grow(plans[start : start + size]) for start in range(0, len(plans), size)]
    rollouts = [rollout for tree in await _run_all(growing) for rollout in tree]
    return Group(example=plans[0].example, rollouts=tuple(rollouts))


async def run_groups(
    make_environment: Callable[[], Environment],
    engine: Engine,
    tokenizer: Tokenizer,
    plans_P_G: Sequence[Sequence[RolloutPlan]],
    *,
    on_group: Callable[[], None] | None = None,
) -> list[Group]:
    """Attempt several examples concurrently, each several times; groups are in the order of the plans.

    `on_group` is called after each group, so that a watcher sees progress in long stages.
    Raises: like `run_group`, after every other group was cancelled.
    """

    async def run(plans_G: Sequence[RolloutPlan]) -> Group:
        group = await run_group(make_environment, engine, tokenizer, plans_G)
        if on_group is not None:
            on_group()
        return group

    return await _run_all([run(plans_G) for plans_G in plans_P_G])


class _Trees:
    """Runs attempts, alone or in trees that share their first turns."""

    def __init__(
        self, make_environment: Callable[[], Environment], engine: Engine, prompts: PromptCache
    ) -> None:
        self._make_environment = make_environment
        self._engine = engine
        self._prompts = prompts

    async def grow(self, plans: Sequence[RolloutPlan]) -> list[Rollout]:
        """Play the shared turns with the first plan's random streams; every plan goes on from there.

        If the shared attempt ends before it branches, the other plans are attempted from the start.
        """
        first, *others = plans
        if not others:
            return [await _refill(partial(self._attempt, first))]
        trunks: list[tuple[Attempt, Kept[Environment]]] = []
        rollout = await _refill(partial(self._play_shared, first, trunks))
        if not trunks:
            alone = [_refill(partial(self._attempt, plan)) for plan in others]
            return [rollout, *await _run_all(alone)]
        ((shared, snapshot),) = trunks

        async def go_on(plan: RolloutPlan) -> Rollout:
            attempt = shared.fork(plan)

            async def walk() -> Outcome | None:
                attempt.environment = await snapshot.restore()
                return await attempt.run()

            return await attempt.conclude(walk())

        try:
            return await _run_all([_refill(partial(go_on, plan)) for plan in plans])
        finally:
            await snapshot.close()

    async def _attempt(self, plan: RolloutPlan) -> Rollout:
        attempt = self._begin(plan)
        return await attempt.conclude(attempt.run())

    async def _play_shared(
        self, plan: RolloutPlan, trunks: list[tuple[Attempt, Kept[Environment]]]
    ) -> Rollout:
        """Play to the first turn behind the shared ones where a snapshot is possible, or to the end."""
        attempt = self._begin(plan)

        async def walk() -> Outcome | None:
            _require_branching(attempt)
            until = plan.num_shared_turns
            while (outcome := await attempt.run(until)) is None:
                take = getattr(attempt.environment, "snapshot", None)
                snapshot: Kept[Environment] | None = (
                    _replay(attempt, self._make_environment) if take is None else await take()
                )
                if snapshot is not None:
                    trunks.append((attempt, snapshot))
                    return None
                until += 1
            return outcome

        return await attempt.conclude(walk())

    def _begin(self, plan: RolloutPlan) -> Attempt:
        return Attempt(
            environment=self._make_environment(), engine=self._engine, plan=plan, prompts=self._prompts
        )


def _require_branching(attempt: Attempt) -> None:
    """Refuse attempts that cannot branch. Raises: ConfigError."""
    environment, plan = attempt.environment, attempt.plan
    is_conducted = getattr(environment, "act", None) is not None
    if is_conducted or environment.max_turns <= plan.num_shared_turns:
        why = (
            "a program conducts the attempts, and cannot be copied"
            if is_conducted
            else f"attempts have {environment.max_turns} turns at most"
        )
        raise ConfigError(
            f"train.branches={plan.num_branches} and train.shared_turns={plan.num_shared_turns}: {why}",
            allowed="an environment that answers reply by reply, in more turns than are shared",
            next_step="lower train.shared_turns, or remove train.branches",
        )


def _replay(attempt: Attempt, make_environment: Callable[[], Environment]) -> Kept[Environment]:
    """Return a snapshot that is restored by replaying the actions so far in a fresh world."""
    example, seed = attempt.plan.example, attempt.world_seed
    actions, expected = tuple(attempt.actions), tuple(attempt.world_messages)

    async def restore() -> Environment:
        environment = make_environment()
        async with AsyncExitStack() as stack:
            stack.push_async_callback(environment.close)
            _require_equal(0, await environment.reset(example, seed), expected[0])
            for number, action in enumerate(actions, start=1):
                _require_equal(number, (await environment.step(action)).messages, expected[number])
            stack.pop_all()
        return environment

    async def close() -> None:
        """Hold nothing, release nothing."""

    return Kept(restore, close)


def _require_equal(number: int, messages: tuple[Message, ...], expected: tuple[Message, ...]) -> None:
    """Refuse a world that answers differently when it is replayed. Raises: AttemptFailed (of the task)."""
    if tuple(messages) != expected:
        detail = f"after {number} equal replies the world says {messages!r:.200}, and said {expected!r:.200}"
        raise AttemptFailed(FailureOwner.TASK, "snapshot_mismatch", detail)


async def _run_all(works: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Run the coroutines concurrently. If one raises, cancel the others and re-raise."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        # Not a task group: it would wrap the one exception that ends the run in a group.
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _refill(attempt: Callable[[], Awaitable[Rollout]]) -> Rollout:
    """Make an attempt, and repeat it while the machine or the engine fails; the last one counts."""
    num_refills = 0
    while True:
        rollout = await attempt()
        failure = rollout.outcome.failure
        if failure is None or failure.owner not in _REFILLED or num_refills == MAX_REFILLS:
            break
        num_refills += 1
        await asyncio.sleep(_PAUSE_S * num_refills)
    if not num_refills:
        return rollout
    metrics = {**rollout.outcome.metrics, NUM_REFILLS: float(num_refills)}
    return replace(rollout, outcome=replace(rollout.outcome, metrics=metrics))
