"""TextArena's games of one player, served by `host.py`. Tried with textarena 0.7.4.

Its games draw from Python's process-wide random numbers; each attempt has a state of them of its own.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import textarena


class Guest:
    """All attempts at one game."""

    def __init__(self, game: str, options: dict[str, Any]) -> None:
        self._game = game
        self._options = options
        self._attempts: dict[int, tuple[Any, Any]] = {}
        """Game, and its state of the random numbers, by number."""
        self._numbers = itertools.count()

    async def start(self) -> None:
        """Make the game once, to see that it can be made."""
        self._begin(0)

    async def open(self, seed: int) -> dict[str, Any]:
        """Begin an attempt; return its number and what the player sees first."""
        game, state, seen = self._begin(seed)
        number = next(self._numbers)
        self._attempts[number] = game, state
        return {"number": number, "text": seen}

    async def step(self, number: int, text: str) -> dict[str, Any]:
        """Make a move; return what the player sees then, and whether the game is over."""
        game, state = self._attempts[number]

        def move() -> tuple[bool, str]:
            is_done, _ = game.step(text)
            return is_done, "" if is_done else _seen(game)

        (is_done, seen), state = _drawing_from(state, move)
        self._attempts[number] = game, state
        return {"text": seen, "is_done": is_done}

    async def score(self, number: int) -> dict[str, Any]:
        """Return the reward, None where the game gave none, and whether a move was against the rules."""
        state = self._attempts[number][0].state
        rewards = state.rewards or {}
        reward = rewards.get(0)
        info = (state.game_info or {}).get(0, {})
        return {
            "reward": None if reward is None else float(reward),
            "is_done": bool(state.done),
            "invalid_move": bool(info.get("invalid_move", False)),
        }

    async def close(self, number: int) -> None:
        """Forget an attempt."""
        self._attempts.pop(number, None)

    def _begin(self, seed: int) -> tuple[Any, Any, str]:
        def begin() -> tuple[Any, str]:
            random.seed(seed)
            # Without wrappers: these tell the whole history anew in every turn.
            game = textarena.make(f"{self._game}-raw", **self._options)
            game.reset(num_players=1, seed=seed)
            return game, _seen(game)

        (game, seen), state = _drawing_from(None, begin)
        return game, state, seen


def _seen(game: Any) -> str:
    """Return what the player has been told since it was asked last, but for its own words."""
    _, told = game.get_observation()
    said = textarena.ObservationType.PLAYER_ACTION
    return "\n".join(str(text).strip() for _, text, kind in told if kind is not said)


def _drawing_from(state: Any, work: Callable[[], Any]) -> tuple[Any, Any]:
    """Do something with a state of the random numbers; return what it gives, and the state behind it."""
    if state is not None:
        random.setstate(state)
    return work(), random.getstate()
