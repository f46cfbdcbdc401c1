"""Guess a number in a few turns: the canary of environments, as `arithmetic` is that of tasks."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import Field

from strop.environments.contract import Done, NumberedSection
from strop.rollout import Example, Message, Split
from strop.spec.base import expert
from strop.tasks.task import TaskLimits

_MAX_DIGITS = 9
_NUMBER = re.compile(r"[0-9]+")


class GuessNumberSpec(NumberedSection):
    """Guess a number from 1 to a bound; the answer to each guess is higher or lower."""

    name: Literal["guess-number"] = "guess-number"
    max_value: int = Field(
        default=20,
        ge=3,
        le=10**6,
        description="The largest possible number; the smallest is 1.",
        json_schema_extra=expert("the game can be made harder"),
    )
    num_train: int = Field(default=2000, ge=1, le=10**6, description="Games to train on.")


class GuessNumber:
    """One game. The seed decides the secret number; every answer repeats the remaining bounds.

    The last number of a reply is the guess.

    The score is 1 if the number is found, else up to a half, for the share of the numbers that are ruled out.
    """

    name = "guess-number"
    version = "guess-3"
    max_turns = 5

    def __init__(self, spec: GuessNumberSpec) -> None:
        self._spec = spec
        # The score of always guessing the middle number: it is right, or rules out half.
        chance = (spec.max_value + 5) / (4 * spec.max_value)
        # Seven digits and the end of a turn. The last number of the opening is a guess too.
        self.limits = TaskLimits(max_reply_tokens=8, stop_strings=("\n",), chance=chance)
        self._low, self._high = 1, spec.max_value
        self._secret = 0
        self._is_found = False

    def examples(self, split: Split) -> Iterator[Mapping[str, Any]]:
        """Yield games. An example names a draw; the number itself is drawn when the game begins."""
        return ({"game": number} for number in self._spec.numbers_of(split))

    def reset(self, example: Example, seed: int) -> tuple[Message, ...]:
        """Draw the number, and ask for the first guess after an example of a right guess.

        Without the example, small models talk about guessing.
        """
        self._secret = random.Random(f"{example.example_id}/{seed}").randint(1, self._spec.max_value)
        question = "I think of a number from 1 to {}. Guess it: reply with a number."
        return (
            Message(role="user", content=question.format(9)),
            Message(role="assistant", content="5"),
            Message(role="user", content=f"Right. {question.format(self._spec.max_value)}"),
        )

    def step(self, text: str) -> str | Done:
        """Say whether the number is higher or lower than the guess."""
        numbers = _NUMBER.findall(text)
        # Python refuses to parse very long ones.
        if not numbers or len(numbers[-1]) > _MAX_DIGITS:
            return self._ask("That is no number.")
        guess = int(numbers[-1])
        if guess == self._secret:
            self._is_found = True
            return Done()
        if not self._low <= guess <= self._high:
            return self._ask(f"{guess} is out of reach.")
        if guess < self._secret:
            self._low = guess + 1
        else:
            self._high = guess - 1
        return self._ask("Higher." if guess < self._secret else "Lower.")

    def _ask(self, why: str) -> str:
        """Answer a guess with the remaining bounds; short, as each later turn reads it again."""
        return f"{why} It is from {self._low} to {self._high}."

    def score(self) -> float:
        """Return 1 if the number was found, else half of the share of the numbers that were ruled out."""
        if self._is_found:
            return 1.0
        left = self._high - self._low + 1
        return 0.5 * (1.0 - (left - 1) / (self._spec.max_value - 1)) if left < self._spec.max_value else 0.0

    def gold_replies(self, example: Example) -> Iterator[tuple[str, ...]]:
        """Yield the number, as the self-test's seed draws it."""
        from strop.tasks.user.own_task import OPENING_SEED

        secret = random.Random(f"{example.example_id}/{OPENING_SEED}").randint(1, self._spec.max_value)
        yield (str(secret),)
