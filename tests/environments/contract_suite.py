"""What every environment must do. Subclass `EnvironmentContract` and give its fixtures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

from strop.environments import Action, Environment, StepResult
from strop.errors import DataError
from strop.rollout import Example, FinishReason, Message, Outcome

Result = TypeVar("Result")

WORDS = Action(text="no such answer", finish_reason=FinishReason.EOS)


def run(waiting: Coroutine[Any, Any, Result]) -> Result:
    return asyncio.run(waiting)


class EnvironmentContract:
    """The suite. `make_environment` builds a fresh attempt each time."""

    @pytest.fixture
    def make_environment(self) -> Callable[[], Environment]:
        raise NotImplementedError

    @pytest.fixture
    def example(self) -> Example:
        raise NotImplementedError

    def test_equal_seeds_open_alike(
        self, make_environment: Callable[[], Environment], example: Example
    ) -> None:
        async def openings() -> list[tuple[Message, ...]]:
            return [await make_environment().reset(example, seed=3) for _ in range(2)]

        first, second = run(openings())
        assert first == second
        assert any(message.text for message in first)

    def test_score_without_a_step_is_the_floor(
        self, make_environment: Callable[[], Environment], example: Example
    ) -> None:
        async def act() -> Outcome:
            environment = make_environment()
            await environment.reset(example, seed=3)
            return await environment.score()

        outcome = run(act())
        assert outcome.reward == 0.0
        assert not outcome.is_correct

    def test_done_after_the_last_turn_and_no_step_beyond(
        self, make_environment: Callable[[], Environment], example: Example
    ) -> None:
        async def act() -> list[StepResult]:
            environment = make_environment()
            await environment.reset(example, seed=3)
            results = [await environment.step(WORDS) for _ in range(environment.max_turns)]
            with pytest.raises(DataError):
                await environment.step(WORDS)
            return results

        results = run(act())
        assert [result.done for result in results] == [False] * (len(results) - 1) + [True]
        assert results[-1].messages == ()

    def test_equal_actions_score_alike_and_scoring_changes_nothing(
        self, make_environment: Callable[[], Environment], example: Example
    ) -> None:
        async def act() -> list[Outcome]:
            outcomes = []
            for _ in range(2):
                environment = make_environment()
                await environment.reset(example, seed=3)
                for _ in range(environment.max_turns):
                    await environment.step(WORDS)
                outcomes += [await environment.score(), await environment.score()]
            return outcomes

        outcomes = run(act())
        assert outcomes[0].is_scored
        assert outcomes == [outcomes[0]] * 4

    def test_nothing_works_before_reset(self, make_environment: Callable[[], Environment]) -> None:
        with pytest.raises(DataError, match="reset"):
            run(make_environment().step(WORDS))
        with pytest.raises(DataError, match="before reset"):
            run(make_environment().score())

    def test_close_twice_and_at_any_time(
        self, make_environment: Callable[[], Environment], example: Example
    ) -> None:
        async def act() -> None:
            unused = make_environment()
            await unused.close()
            used = make_environment()
            await used.reset(example, seed=3)
            await used.close()
            await used.close()

        run(act())
