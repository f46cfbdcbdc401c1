"""TextArena's single-player games, served by `host.py`. Tried with textarena 0.7.4.

Its games draw from Python's process-wide random generator; each attempt swaps in its own generator state.
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
        """Game and random state of each attempt, by number."""
        self._numbers = itertools.count()

    async def start(self) -> None:
        """Make the game once, as a check."""
        self._begin(0)

    async def open(self, seed: int) -> dict[str, Any]:
        """Begin an attempt; return its number and the player's first observation."""
        game, state, observation = self._begin(seed)
        number = next(self._numbers)
        self._attempts[number] = game, state
        return {"number": number, "text": observation}

    async def step(self, number: int, text: str) -> dict[str, Any]:
        """Make a move; return the player's next observation, and whether the game is over."""
        game, state = self._attempts[number]

        def move() -> tuple[bool, str]:
            is_done, _ = game.step(text)
            return is_done, "" if is_done else _observe(game)

        (is_done, observation), state = _with_random_state(state, move)
        self._attempts[number] = game, state
        return {"text": observation, "is_done": is_done}

    async def score(self, number: int) -> dict[str, Any]:
        """Return the reward (None if the game gave none), and whether a move broke the rules."""
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
            # Without wrappers: these repeat the whole history in every turn.
            game = textarena.make(f"{self._game}-raw", **self._options)
            game.reset(num_players=1, seed=seed)
            return game, _observe(game)

        (game, observation), state = _with_random_state(None, begin)
        return game, state, observation


def _observe(game: Any) -> str:
    """Return the new messages to the player, without the player's own actions."""
    _, messages = game.get_observation()
    action = textarena.ObservationType.PLAYER_ACTION
    return "\n".join(str(text).strip() for _, text, kind in messages if kind is not action)


def _with_random_state(state: Any, work: Callable[[], Any]) -> tuple[Any, Any]:
    """Call `work` under a random state; return its result and the new state."""
    if state is not None:
        random.setstate(state)
    return work(), random.getstate()
