"""The attempts at one example, which are compared with each other.

What the machine or the engine failed at is attempted again, with the same seeds: the attempt is then what it
would have been. What the task or its world failed at would fail again.

Attempts may share their first turns: these are played once, and each goes on from a copy of the world, with
what was told and said as exact ids. A world that cannot be copied is played again, with the same seed and the
same replies, and must tell the same.
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
"""How often an attempt is made again at most."""
NUM_REFILLS = "num_refills"
"""Metric of an attempt that was made again: how often."""
_PAUSE_S = 0.1
"""Before an attempt is made again for the first time; twice as long before the second."""
_REFILLED = (FailureOwner.INFRA, FailureOwner.ENGINE)
Result = TypeVar("Result")


async def run_group(
    make_environment: Callable[[], Environment],
    engine: Engine,
    tokenizer: Tokenizer,
    plans: Sequence[RolloutPlan],
) -> Group:
    """Attempt one example several times at once; the prompt is rendered and encoded once.

    The rollouts stand in the order of the plans. For a task: `choose_environment(task)`.
    Raises: DataError if there is no plan or the plans differ in example or prompt format; else
        like `run_rollout`, after the other rollouts were cancelled. ConfigError if no turns can be shared.
    """
    if len({(plan.example.example_id, str(plan.prompt_format)) for plan in plans}) != 1:
        num_examples = len({plan.example.example_id for plan in plans})
        raise DataError(
            f"a group of {len(plans)} plans for {num_examples} different examples or prompt formats"
        )
    prompts = PromptCache(tokenizer, plans[0].prompt_format)
    trees = _Trees(make_environment, engine, prompts)
    number = plans[0].num_branches
    grown = [trees.grow(plans[start : start + number]) for start in range(0, len(plans), number)]
    rollouts = [rollout for tree in await _run_all(grown) for rollout in tree]
    return Group(example=plans[0].example, rollouts=tuple(rollouts))


async def run_groups(
    make_environment: Callable[[], Environment],
    engine: Engine,
    tokenizer: Tokenizer,
    plans_P_G: Sequence[Sequence[RolloutPlan]],
    *,
    on_group: Callable[[], None] | None = None,
) -> list[Group]:
    """Attempt several examples at once, each several times; groups stand in the order of the plans.

    `on_group` is called whenever a group is done, so that a watcher sees long stages move.
    Raises: like `run_group`, after every other group was cancelled.
    """

    async def run(plans_G: Sequence[RolloutPlan]) -> Group:
        group = await run_group(make_environment, engine, tokenizer, plans_G)
        if on_group is not None:
            on_group()
        return group

    return await _run_all([run(plans_G) for plans_G in plans_P_G])


class _Trees:
    """Makes attempts, alone or from turns that they share."""

    def __init__(
        self, make_environment: Callable[[], Environment], engine: Engine, prompts: PromptCache
    ) -> None:
        self._make_environment = make_environment
        self._engine = engine
        self._prompts = prompts

    async def grow(self, plans: Sequence[RolloutPlan]) -> list[Rollout]:
        """Play what attempts share with the first plan's streams, and have every plan go on from there.

        Where that attempt ends before, the other plans are attempts of their own.
        """
        first, *others = plans
        if not others:
            return [await _refill(partial(self._attempt, first))]
        kept: list[tuple[Attempt, Kept[Environment]]] = []
        rollout = await _refill(partial(self._play_shared, first, kept))
        if not kept:
            alone = [_refill(partial(self._attempt, plan)) for plan in others]
            return [rollout, *await _run_all(alone)]
        ((shared, snapshot),) = kept
        try:
            return await _run_all([_refill(partial(self._go_on, shared, snapshot, plan)) for plan in plans])
        finally:
            await snapshot.close()

    async def _attempt(self, plan: RolloutPlan) -> Rollout:
        attempt = self._begin(plan)
        return await attempt.conclude(attempt.run())

    async def _play_shared(self, plan: RolloutPlan, kept: list[tuple[Attempt, Kept[Environment]]]) -> Rollout:
        """Walk to the first place behind the shared turns that can be kept, or to the end."""
        attempt = self._begin(plan)

        async def walk() -> Outcome | None:
            _require_branching(attempt)
            until = plan.num_shared_turns
            while (outcome := await attempt.run(until)) is None:
                if (snapshot := await _take_snapshot(attempt, self._make_environment)) is not None:
                    kept.append((attempt, snapshot))
                    return None
                until += 1
            return outcome

        return await attempt.conclude(walk())

    async def _go_on(self, shared: Attempt, snapshot: Kept[Environment], plan: RolloutPlan) -> Rollout:
        attempt = shared.fork(plan)

        async def walk() -> Outcome | None:
            attempt.environment = await snapshot.restore()
            return await attempt.run()

        return await attempt.conclude(walk())

    def _begin(self, plan: RolloutPlan) -> Attempt:
        return Attempt(
            environment=self._make_environment(), engine=self._engine, plan=plan, prompts=self._prompts
        )


def _require_branching(attempt: Attempt) -> None:
    """Refuse attempts that no others can go on from. Raises: ConfigError."""
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


async def _take_snapshot(
    attempt: Attempt, make_environment: Callable[[], Environment]
) -> Kept[Environment] | None:
    """Keep where an attempt's world stands; None where that is not possible yet."""
    take = getattr(attempt.environment, "snapshot", None)
    kept: Kept[Environment] | None = _play_again(attempt, make_environment) if take is None else await take()
    return kept


def _play_again(attempt: Attempt, make_environment: Callable[[], Environment]) -> Kept[Environment]:
    """Keep what was said and told up to now, to come to the same place by it."""
    example, seed = attempt.plan.example, attempt.world_seed
    actions, expected = tuple(attempt.actions), tuple(attempt.told)

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


def _require_equal(number: int, told: tuple[Message, ...], expected: tuple[Message, ...]) -> None:
    """Refuse a world that says anything else when it is played again. Raises: AttemptFailed, the task's."""
    if tuple(told) != expected:
        detail = f"after {number} equal replies the world says {told!r:.200}, and said {expected!r:.200}"
        raise AttemptFailed(FailureOwner.TASK, "snapshot_mismatch", detail)


async def _run_all(works: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Do all at once. Raises: what the first of them raises, after the others were cancelled."""
    running = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*running)
    finally:
        # Where one ended the run, the others must not go on behind it. Not a task group: it would wrap the
        # one exception that ended the run in a group.
        for one in running:
            one.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _refill(attempt: Callable[[], Awaitable[Rollout]]) -> Rollout:
    """Make an attempt, and again what the machine or the engine took from it; the last one counts."""
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
