"""Games of textarena, played in its own environment by the real package."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from strop.environments import choose_environment
from strop.environments.contract import Action
from strop.environments.guests import guest as guests
from strop.environments.textarena import TEXTARENA, TextarenaSpec
from strop.errors import ConfigError
from strop.rollout import Example, FinishReason, Outcome, Split
from strop.tasks import Task, build_task
from strop.tasks.contract import TURN
from strop.tasks.failures import AttemptFailed
from tests.conftest import require_system_part


@pytest.fixture(scope="module", autouse=True)
def _package() -> Iterator[None]:
    require_system_part("the environment of textarena (make guest-deps)", TEXTARENA.is_ready())
    yield
    for one in list(guests.running()):
        one.end()


def game(name: str = "GuessTheNumber-v0", **settings: Any) -> Task:
    return build_task(TextarenaSpec(game=name, num_train=8, num_held_out=2, **settings))


def guess_all(task: Task, example: Example) -> Outcome:
    return task.verify(example, TURN.join(f"I guess [{n}]" for n in range(11, 21)))


def test_a_game_is_told_played_and_scored() -> None:
    task = game()
    first, second = task.examples(Split.TRAIN)[:2]
    assert "guess the number between 1 and 20 within 10 turns" in task.render(first)[0].text
    assert first.fields["seed"] != second.fields["seed"]
    rewards = [guess_all(task, example).reward for example in task.examples(Split.TRAIN)]
    assert 1.0 in rewards
    assert rewards == [guess_all(task, example).reward for example in task.examples(Split.TRAIN)]


def test_the_turn_tells_what_is_new_alone() -> None:
    task = game(options={"max_turns": 3})

    async def play() -> list[str]:
        environment = choose_environment(task)()
        await environment.reset(task.examples(Split.TRAIN)[0], seed=0)
        said = []
        for guess in ("[1]", "[1]", "nothing"):
            result = await environment.step(Action(text=guess, finish_reason=FinishReason.EOS))
            said += [message.text for message in result.messages]
        assert (await environment.score()).is_scored
        await environment.close()
        return said

    said = asyncio.run(play())
    assert said[0] == "The target number is higher."
    assert "between 1 and 20" not in said[1]


def test_attempts_side_by_side_draw_as_if_they_were_alone() -> None:
    """The package draws from random numbers that the whole process shares."""
    task = game("Minesweeper-v0")
    moves = ["[3 3]", "[0 0]", "[7 7]"]

    async def play(example: Example, pause: float) -> list[str]:
        environment = choose_environment(task)()
        said = [message.text for message in await environment.reset(example, seed=0)]
        for move in moves:
            await asyncio.sleep(pause)
            result = await environment.step(Action(text=move, finish_reason=FinishReason.EOS))
            said += [message.text for message in result.messages]
            if result.done:
                break
        await environment.close()
        return said

    async def both() -> list[list[str]]:
        one, two = task.examples(Split.TRAIN)[:2]
        alone = [await play(one, 0), await play(two, 0)]
        beside = await asyncio.gather(play(one, 0.001), play(two, 0), play(one, 0))
        return [*alone, *beside]

    one, two, *beside = asyncio.run(both())
    assert one != two
    assert beside == [one, two, one]


@pytest.mark.parametrize("name", ["NoSuchGame-v0", "TicTacToe-v0"])
def test_a_game_that_is_none_or_for_more_players_is_refused(name: str) -> None:
    task = game(name)
    with pytest.raises(ConfigError, match="cannot begin"):
        task.render(task.examples(Split.TRAIN)[0])


def test_a_process_that_dies_costs_its_attempts_and_another_is_started() -> None:
    task = game()
    example = task.examples(Split.TRAIN)[0]
    task.render(example)

    async def play() -> AttemptFailed:
        environment = choose_environment(task)()
        await environment.reset(example, seed=0)
        for one in guests.running():
            os.kill(one.pid, signal.SIGKILL)
        with pytest.raises(AttemptFailed) as failed:
            await environment.step(Action(text="[1]", finish_reason=FinishReason.EOS))
        await environment.close()
        return failed.value

    failure = asyncio.run(play())
    assert (failure.owner, failure.kind) == ("infra", "guest_lost")
    assert guess_all(task, example).is_scored
