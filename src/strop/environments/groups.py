"""The attempts at one example, which are compared with each other.

An attempt that the machine or the engine failed is repeated with the same seeds, and is then what it would
have been. A failure of the task or its world would only happen again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from strop.engine import Engine
from strop.environments.contract import Environment
from strop.environments.extending import PromptCache
from strop.environments.rollout import Attempt, RolloutPlan
from strop.environments.single_turn import Answered
from strop.rollout import FailureOwner, Group, Outcome, Rollout
from strop.tasks.failures import catch_failure
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
    The plans have one example and one prompt format.
    Raises: like `run_rollout`, after the other rollouts were cancelled.
    """
    assert len({(plan.example.example_id, str(plan.prompt_format)) for plan in plans}) == 1
    prompts = PromptCache(tokenizer, plans[0].prompt_format)
    answered: dict[int, Answered] = {}

    async def attempt(place: int) -> Rollout:
        environment = make_environment()
        if isinstance(environment, Answered):
            environment.is_member, answered[place] = True, environment
        made = Attempt(environment=environment, engine=engine, plan=plans[place], prompts=prompts)
        return await made.run()

    rollouts = await _run_all([_refill(partial(attempt, place)) for place in range(len(plans))])
    if answered:
        judge = next(iter(answered.values()))
        answers = [answered[place].answer for place in range(len(plans))]
        rollouts = await score_beside(judge, rollouts, answers)
    return Group(example=plans[0].example, rollouts=tuple(rollouts))


async def score_beside(judge: Answered, rollouts: Sequence[Rollout], answers: Sequence[str]) -> list[Rollout]:
    """Complete the outcomes of attempts at one example, where its task compares their answers.

    Those of one `Sampling` are compared: an evaluation's greedy attempt with none. One that failed is absent.
    """
    completed = list(rollouts)
    for sampling in {rollout.sampling for rollout in rollouts}:
        places = [
            place
            for place, rollout in enumerate(rollouts)
            if rollout.sampling == sampling and rollout.outcome.failure is None
        ]
        if not places:
            continue
        outcomes: Sequence[Outcome] = [rollouts[place].outcome for place in places]
        with catch_failure(FailureOwner.TASK) as caught:
            outcomes = await judge.score_group(
                rollouts[0].example, [answers[place] for place in places], outcomes
            )
        if caught.failure is not None:
            outcomes = [replace(outcome, failure=caught.failure) for outcome in outcomes]
        for place, outcome in zip(places, outcomes, strict=True):
            completed[place] = replace(rollouts[place], outcome=outcome)
    return completed


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
    for num_refills in range(MAX_REFILLS + 1):
        if num_refills:
            await asyncio.sleep(_PAUSE_S * num_refills)
        rollout = await attempt()
        failure = rollout.outcome.failure
        if failure is None or failure.owner not in _REFILLED:
            break
    if not num_refills:
        return rollout
    metrics = {**rollout.outcome.metrics, NUM_REFILLS: float(num_refills)}
    return replace(rollout, outcome=replace(rollout.outcome, metrics=metrics))
