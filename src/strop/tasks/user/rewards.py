"""Rewards, and reward functions of the user's.

A function takes a reply and the values of its row by name, and returns named parts. The return value of a
user's function is checked: a text, NaN or a list of another length is an error, not a reward of 0.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from typing_extensions import override

from strop.errors import ConfigError
from strop.rollout import Example, FailureOwner, Outcome
from strop.tasks.answers import show_answer
from strop.tasks.failures import catch_failure
from strop.user_code import CodeRef, InspectedFunction, hash_sources, inspect_function, load_code

Values = Mapping[str, Any]
"""A row's values by column, and what else a reward may take, but for the replies."""
Parts = dict[str, float | None]
"""Named parts of a reward; None: no score."""
REPLY, REPLIES = "reply", "completions"
"""The reply's parameter in a user's function: strop's form, and TRL's."""
RESERVED = frozenset({REPLY, "answer", "prompt", REPLIES, "prompts"})
"""Parameters of a function that are not columns of the row."""
_FORMS = "def score(reply, answer, **columns), or TRL's def score(completions, **columns)"
_VALUES = "a finite number, true or false, None, or a table of them"
FULL_MARKS_SLACK = 1e-9
_REWARD = "reward"


class Reward(ABC):
    """One of the rewards that replies to rows earn."""

    name: str
    identity: str
    """What of it is in the task's version."""
    compares = False
    """Whether it judges the replies to an example beside each other."""
    limit_s = 0.0
    """Wall time (seconds) that it may take."""
    allowed = ""
    """What answers it compares with; empty: it needs none."""

    def read_answer(self, value: Any) -> str:
        """Return a row's answer as it is compared. Raises: ValueError if it is none."""
        return show_answer(value)

    def warm_up(self) -> None:
        """Load what judging needs."""
        return

    @abstractmethod
    async def score(self, example: Example, values: Values, replies: Sequence[str]) -> list[Outcome]:
        """Judge replies to an example, whose row has these values; each outcome has parts of the reward.

        Raises: any exception that concerns all of the replies.
        """


class UserReward(Reward):
    """A user's reward function, called by the names of its parameters.

    One of TRL's form gets all replies to an example at once, and may compare them.
    """

    def __init__(self, text: str, limit_s: float) -> None:
        """Inspect the function without loading it.

        Raises: ConfigError if it cannot be imported, or takes no reply.
        """
        self.ref = CodeRef.parse(text)
        self.name, self.limit_s = self.ref.name, limit_s
        self.signature: InspectedFunction = inspect_function(self.ref)
        self._digest = hash_sources(self.ref.path)
        """Hash of the file and its imports from the same folder, as they are now."""
        self.identity = f"{self.ref} {self._digest}"
        self.compares = REPLIES in self.signature.parameters
        self.where = f"{self.ref} (line {self.signature.line})"
        """The function and its line, for messages."""
        if not {REPLY, REPLIES} & set(self.signature.parameters):
            parameters = ", ".join(self.signature.parameters) or "nothing"
            raise ConfigError(
                f"{self.where} takes {parameters}, and no reply",
                allowed=_FORMS,
                next_step="name the parameter that takes the reply so",
            )

    @override
    def warm_up(self) -> None:
        load_code(self.ref, self._digest)

    @override
    async def score(self, example: Example, values: Values, replies: Sequence[str]) -> list[Outcome]:
        """Call the function. An exception of strop's form, or a score that is not allowed, fails its reply.

        Raises: of TRL's form TypeError if it returns no list as long as the replies; any exception of it.
        """
        scores = await self._score_group(values, replies) if self.compares else [None] * len(replies)
        found: list[Outcome] = []
        for reply, score in zip(replies, scores, strict=True):
            with catch_failure(FailureOwner.TASK) as caught:
                value = score if self.compares else await self._call({**values, REPLY: reply})
                found.append(Outcome(parts=to_parts(value, self.name, self.where)))
            found += [] if caught.failure is None else [Outcome(parts={}, failure=caught.failure)]
        return found

    async def _score_group(self, values: Mapping[str, Any], replies: Sequence[str]) -> Sequence[Any]:
        is_chat = not isinstance(values["prompt"], str)
        lists = {key: value for key, value in values.items() if key not in RESERVED or key == "answer"}
        lists["prompts"] = values["prompt"]
        given: dict[str, Any] = {key: [value] * len(replies) for key, value in lists.items()}
        given[REPLIES] = [[{"role": "assistant", "content": one}] if is_chat else one for one in replies]
        returned = await self._call(given)
        scores = returned.tolist() if hasattr(returned, "tolist") else returned
        if not isinstance(scores, list | tuple) or len(scores) != len(replies):
            kind = f"{len(scores)} scores" if isinstance(scores, list | tuple) else type(scores).__name__
            raise TypeError(f"{self.where} returned {kind} for {len(replies)} completions; allowed: as many")
        return scores

    async def _call(self, values: Mapping[str, Any]) -> Any:
        names = values if self.signature.takes_others else self.signature.parameters
        given = {key: values[key] for key in names if key in values}
        return await call_foreign(load_code(self.ref, self._digest), **given)


async def call_foreign(function: Callable[..., Any], /, *values: Any, **named: Any) -> Any:
    """Return what a user's function returns, or the result of its coroutine.

    The function sees no running event loop: it may start one of its own.
    """
    loop = asyncio.get_running_loop()
    asyncio._set_running_loop(None)
    try:
        returned = function(*values, **named)
    finally:
        asyncio._set_running_loop(loop)
    return await returned if inspect.isawaitable(returned) else returned


def as_outcome(verdict: Any, where: str, full_marks: float) -> Outcome:
    """Convert a class's verdict on a reply or an attempt to an outcome; correct means full marks.

    An `Outcome` that says itself whether it is correct stays as it is.
    Raises: TypeError or ValueError as `to_parts`.
    """
    outcome = verdict if isinstance(verdict, Outcome) else Outcome(parts=to_parts(verdict, _REWARD, where))
    if outcome.is_correct is not None or outcome.reward is None:
        return outcome
    return replace(outcome, is_correct=outcome.reward >= full_marks - FULL_MARKS_SLACK)


def to_parts(returned: Any, name: str, where: str) -> Parts:
    """Check a function's return value. Raises: TypeError or ValueError naming the allowed values."""
    if isinstance(returned, Mapping):
        if not returned:
            raise ValueError(f"{where} returned an empty table; allowed: {_VALUES}")
        return {f"{name}.{key}": _to_number(value, where) for key, value in returned.items()}
    return {name: _to_number(returned, where)}


def _to_number(value: Any, where: str) -> float | None:
    if value is None:
        return None
    # A scalar of NumPy or PyTorch.
    plain = value.item() if hasattr(value, "item") and not isinstance(value, int | float) else value
    if not isinstance(plain, bool | int | float):
        raise TypeError(f"{where} returned {plain!r:.60}, a {type(plain).__name__}; allowed: {_VALUES}")
    if not math.isfinite(plain):
        raise ValueError(f"{where} returned {plain}; allowed: {_VALUES}")
    return float(plain)
