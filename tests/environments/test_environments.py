"""What every environment must do: one turn, a game that ships, and a class of a user's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from strop.environments import Action, Environment, choose_environment
from strop.environments.guess_number import GuessNumberSpec
from strop.rollout import Example, FinishReason, Message, Outcome, Split
from strop.tasks import Task, build_task
from strop.tasks.generated import ArithmeticSpec
from tests.environments.test_worlds import build, call

TASKS: dict[str, Callable[[], Task]] = {
    "one turn": lambda: build_task(ArithmeticSpec()),
    "guess-number": lambda: build_task(GuessNumberSpec()),
    "a class": build,
}


def words(task: Task) -> Action:
    """Return an action that earns nothing and does not end an attempt of several turns."""
    text = call("add", number=0) if task.name == "Counting" else "no such answer"
    return Action(text=text, finish_reason=FinishReason.EOS)


@pytest.fixture(params=TASKS)
def task(request: pytest.FixtureRequest) -> Task:
    return TASKS[request.param]()


@pytest.fixture
def make_environment(task: Task) -> Callable[[], Environment]:
    """Return what builds a fresh attempt each time."""
    return choose_environment(task)


@pytest.fixture
def example(task: Task) -> Example:
    return task.examples(Split.TRAIN)[0]


Make = Callable[[], Environment]


def test_equal_seeds_open_alike(make_environment: Make, example: Example) -> None:
    async def openings() -> list[tuple[Message, ...]]:
        return [await make_environment().reset(example, seed=3) for _ in range(2)]

    first, second = asyncio.run(openings())
    assert first == second
    assert any(message.text for message in first)


def test_score_without_a_step_is_the_floor(make_environment: Make, example: Example) -> None:
    async def act() -> Outcome:
        environment = make_environment()
        await environment.reset(example, seed=3)
        return await environment.score()

    outcome = asyncio.run(act())
    assert outcome.reward == 0.0
    assert not outcome.is_correct


def test_done_after_the_last_turn_and_no_step_beyond(
    task: Task, make_environment: Make, example: Example
) -> None:
    async def act() -> None:
        environment = make_environment()
        await environment.reset(example, seed=3)
        results = [await environment.step(words(task)) for _ in range(environment.max_turns)]
        assert [result.done for result in results] == [False] * (len(results) - 1) + [True]
        assert results[-1].messages == ()
        with pytest.raises(AssertionError):
            await environment.step(words(task))

    asyncio.run(act())


def test_equal_actions_score_alike_and_scoring_changes_nothing(
    task: Task, make_environment: Make, example: Example
) -> None:
    async def act() -> list[Outcome]:
        outcomes = []
        for _ in range(2):
            environment = make_environment()
            await environment.reset(example, seed=3)
            await environment.step(words(task))
            outcomes += [await environment.score(), await environment.score()]
        return outcomes

    outcomes = asyncio.run(act())
    assert outcomes[0].is_scored
    assert outcomes == [outcomes[0]] * 4


def test_nothing_works_before_reset(task: Task, make_environment: Make) -> None:
    with pytest.raises(AssertionError):
        asyncio.run(make_environment().step(words(task)))
    with pytest.raises(AssertionError):
        asyncio.run(make_environment().score())


def test_close_twice_and_at_any_time(make_environment: Make, example: Example) -> None:
    async def act() -> None:
        unused = make_environment()
        await unused.close()
        used = make_environment()
        await used.reset(example, seed=3)
        await used.close()
        await used.close()

    asyncio.run(act())
