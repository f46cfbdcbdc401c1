"""Single-player games of the package textarena, played in a separate Python environment (`guests`)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import Field

from strop.environments.contract import Done, numbers_of
from strop.environments.guests.guest import Guest, guest_of
from strop.errors import ConfigError
from strop.io.notices import tell
from strop.rollout import Example, FailureOwner, Outcome, Split
from strop.spec.base import FreeTable, expert
from strop.spec.task import EnvironmentSection
from strop.store.python_environment import PythonEnvironment, ensure_environment
from strop.tasks.contract import TaskLimits
from strop.tasks.failures import AttemptFailed
from strop.tasks.registry import built_in

TEXTARENA = PythonEnvironment(
    name="textarena-0.7.4", folder="guests", pip_steps=(("textarena==0.7.4", "numpy"),)
)


class TextarenaSpec(EnvironmentSection):
    """A game of the package textarena, for one player."""

    name: Literal["textarena"] = "textarena"
    game: str = Field(
        min_length=1,
        max_length=100,
        description="The game's id in textarena, such as 'Minesweeper-v0'. Multi-player games are refused,"
        " and so are games that fetch word lists, unless the lists are on this machine.",
        json_schema_extra=expert("the package has many games"),
    )
    options: FreeTable = Field(
        default={},
        description="Settings of the game itself, passed on unchanged.",
        json_schema_extra=expert("each game has other settings"),
    )
    num_train: int = Field(default=1000, ge=1, le=10**6, description="Games to train on, each with a seed.")
    num_held_out: int = Field(default=100, ge=1, le=10**6, description="Games that are held out.")


@built_in(
    "textarena",
    TextarenaSpec,
    "Any game for one player of the package textarena, which gets an environment of its own.",
    rank=37,
)
class Textarena:
    """One game. Its seed is the example's; the reward is the game's own, at least 0."""

    name = "textarena"
    version = "textarena-0.7.4-1"
    max_turns = 30
    limits = TaskLimits(max_reply_tokens=512, max_goldless_frac=1.0)

    def __init__(self, spec: TextarenaSpec) -> None:
        self._spec = spec
        self._guest: Guest | None = None
        self._number = 0

    def examples(self, split: Split) -> Iterator[Mapping[str, Any]]:
        """Yield a seed for each game."""
        spec = self._spec
        seeds = numbers_of(split, num_train=spec.num_train, num_held_out=spec.num_held_out)
        return ({"game": spec.game, "seed": seed} for seed in seeds)

    async def reset(self, example: Example, seed: int) -> str:
        """Begin the game of the example's seed."""
        # Its first start takes seconds.
        guest = self._guest = await asyncio.to_thread(_open_guest, self._spec)
        opened = await guest.do("open", seed=example.fields["seed"])
        self._number = opened["number"]
        text: str = opened["text"]
        return text

    async def step(self, text: str) -> str | Done:
        """Make a move."""
        assert self._guest is not None
        result = await self._guest.do("step", number=self._number, text=text)
        observation: str = result["text"]
        return Done(observation) if result["is_done"] else observation

    async def score(self) -> Outcome:
        """Return the game's reward; 0 if it was not played to its end."""
        assert self._guest is not None
        result = await self._guest.do("score", number=self._number)
        reward = result["reward"]
        if reward is None and result["is_done"]:
            raise AttemptFailed(FailureOwner.TASK, "no_reward", f"{self._spec.game} ended without a reward")
        reward = max(0.0, reward or 0.0)
        return Outcome(
            parts={"reward": reward},
            is_correct=reward >= 1.0,
            format_ok=not result["invalid_move"],
            metrics={"invalid_move": float(result["invalid_move"])},
        )

    async def close(self) -> None:
        """Drop the game."""
        guest, self._guest = self._guest, None
        if guest is not None and guest.is_alive:
            await guest.do("close", number=self._number)

    def gold_replies(self, example: Example) -> tuple[tuple[str, ...], ...]:
        """Return nothing: the games do not publish solutions."""
        return ()


def _open_guest(spec: TextarenaSpec) -> Guest:
    """Return the process that plays the game. Raises: ConfigError if there is no such single-player game."""
    if "num_players" in spec.options:
        raise ConfigError(
            "task.options sets num_players",
            allowed="the game's other settings: it has one player",
            next_step="leave it out",
        )
    python = ensure_environment(TEXTARENA, say=tell)
    return guest_of(python, "for_textarena.py", {"game": spec.game, "options": spec.options})
