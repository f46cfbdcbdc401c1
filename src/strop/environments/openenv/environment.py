"""An OpenEnv server's environment: each attempt has a session of its own on it (`/ws`).

What the server refuses as no action is told to the model. One that dies, is silent for `tool_limit_s`, or
raises in its `reset` or `step` leaves the attempt without a score; so does one that never names a reward.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Literal

from pydantic import Field

from strop.environments.contract import Done
from strop.environments.openenv.websocket import WebSocket
from strop.rollout import Example, FailureOwner, Outcome, Split
from strop.spec.base import FreeTable, expert
from strop.spec.task import EnvironmentSection
from strop.tasks.contract import TaskLimits
from strop.tasks.failures import AttemptFailed
from strop.tasks.registry import built_in

_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
_NO_ACTION = "VALIDATION_ERROR"
_FULL = "CAPACITY_REACHED"
_RETRY_S = 0.5


class OpenenvSpec(EnvironmentSection):
    """An environment of an OpenEnv server."""

    name: Literal["openenv"]
    url: str = Field(
        pattern=r"^(https?|wss?)://[^/\s]+[^\s?#]*$",
        description="Base URL of the server, such as 'http://127.0.0.1:8000'. It must allow as many sessions"
        " at once as the run has attempts; those beyond wait, for tool_limit_s.",
        json_schema_extra=expert("a server may be anywhere"),
    )
    action_field: str | None = Field(
        default=None,
        min_length=1,
        description="Field of an action that the whole reply is, as text, or with action_is_number its last"
        " number. none = the last JSON object of a reply is the action.",
        json_schema_extra=expert("environments differ in what an action is"),
    )
    action_is_number: bool = Field(
        default=False,
        description="Whether action_field takes the last number of a reply.",
        json_schema_extra=expert("environments differ in what an action is"),
    )
    instructions: str = Field(
        default="",
        description="What the model is told before the first observation, such as what an action is.",
        json_schema_extra=expert("a server says nothing to a model but its observations"),
    )
    options: FreeTable = Field(
        default={},
        description="Given to the environment's reset, beside the seed.",
        json_schema_extra=expert("environments have settings of their own"),
    )
    max_return: float = Field(
        default=1.0,
        gt=0.0,
        description="Largest sum of rewards of an attempt: full marks.",
        json_schema_extra=expert("a server does not say what its rewards are"),
    )
    min_return: float = Field(
        default=0.0,
        le=0.0,
        description="Least sum of rewards of an attempt.",
        json_schema_extra=expert("a server does not say what its rewards are"),
    )
    num_train: int = Field(
        default=1000, ge=1, le=10**6, description="Attempts to train on, each with a seed."
    )
    num_held_out: int = Field(default=100, ge=1, le=10**6, description="Attempts that are held out.")


@built_in(
    "openenv", OpenenvSpec, "An environment of an OpenEnv server, of which each attempt has one.", rank=148
)
class Openenv:
    """One session. Its seed is the example's; the reward is the sum of the rewards of its steps."""

    name = "openenv"
    version = "openenv-1"
    max_turns = 30

    def __init__(self, spec: OpenenvSpec) -> None:
        self._spec = spec
        self._socket: WebSocket | None = None
        self._rewards: list[float | None] = []
        self._num_invalid = 0

    @property
    def limits(self) -> TaskLimits:
        """What an attempt may say and earn."""
        spec = self._spec
        return TaskLimits(
            max_reply_tokens=1024,
            max_reward=spec.max_return,
            min_reward=spec.min_return,
            max_goldless_frac=1.0,
        )

    def examples(self, split: Split) -> Iterator[Mapping[str, Any]]:
        """Yield a seed for each attempt."""
        is_held_out = split is Split.HELD_OUT
        first = 0 if is_held_out else self._spec.num_held_out
        number = self._spec.num_held_out if is_held_out else self._spec.num_train
        return ({"seed": first + index} for index in range(number))

    async def reset(self, example: Example, seed: int) -> str:
        """Open a session with the example's seed. Raises: AttemptFailed."""
        given = {**self._spec.options, "seed": example.fields["seed"]}
        found = await self._within(self._open(given))
        return "\n\n".join(filter(None, (self._spec.instructions, _show(found["observation"]))))

    async def step(self, text: str) -> str | Done:
        """Take the reply's action. Raises: AttemptFailed."""
        action = self._read(text)
        if action is None:
            return self._refuse("it has none")
        found = await self._within(self._ask("step", action))
        if found["type"] == "error":
            return self._refuse(json.dumps(found["data"].get("errors", ""), ensure_ascii=False))
        seen = found["data"]
        reward = seen.get("reward")
        self._rewards.append(None if reward is None else float(reward))
        shown = _show(seen["observation"])
        return Done(shown) if seen.get("done") else shown

    def score(self) -> Outcome:
        """Return the sum of the rewards. Raises: AttemptFailed if no step that was taken had one."""
        given = [reward for reward in self._rewards if reward is not None]
        if len(given) == self._num_invalid < len(self._rewards):
            raise AttemptFailed(FailureOwner.TASK, "no_reward", "no step had a reward")
        total = sum(given)
        return Outcome(
            parts={"return": total},
            is_correct=total >= self._spec.max_return,
            turn_rewards=tuple(reward or 0.0 for reward in self._rewards),
            format_ok=not self._num_invalid,
            metrics={"num_invalid_actions": float(self._num_invalid)},
        )

    async def close(self) -> None:
        """End the session."""
        socket, self._socket = self._socket, None
        if socket is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await socket.close()

    def gold_replies(self, example: Example) -> tuple[tuple[str, ...], ...]:
        """Return nothing: a server keeps what is right to itself."""
        return ()

    def _read(self, text: str) -> dict[str, Any] | None:
        """Return the action of a reply; None where there is none."""
        name = self._spec.action_field
        if name is None:
            return _last_object(text)
        if not self._spec.action_is_number:
            return {name: text}
        numbers = _NUMBER.findall(text)
        return {name: json.loads(numbers[-1].lstrip("+"))} if numbers else None

    def _refuse(self, why: str) -> str:
        self._num_invalid += 1
        self._rewards.append(0.0)
        return f"That is no action: {why[:1000]}"

    async def _open(self, given: Mapping[str, Any]) -> Any:
        while True:
            self._socket = await WebSocket.connect(f"{self._spec.url.rstrip('/')}/ws")
            found = await self._ask("reset", given)
            if found["type"] != "error":
                return found["data"]
            # It is full.
            await self.close()
            await asyncio.sleep(_RETRY_S)

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> Any:
        """Return what is answered. Raises: AttemptFailed for an error of the environment's; OSError."""
        assert self._socket is not None
        # It may have said why before it hung up.
        with suppress(OSError):
            await self._socket.send(json.dumps({"type": kind, "data": data}))
        found = json.loads(await self._socket.receive())
        if found["type"] == "observation":
            observation = found["data"]["observation"]
            if not isinstance(observation, dict):
                raise TypeError(f"an observation of type {type(observation).__name__}")
            return found
        code = found["data"].get("code")
        if code == _FULL or (kind == "step" and code == _NO_ACTION):
            return found
        detail = f"{kind}: {json.dumps(found['data'])[:1000]}"
        raise AttemptFailed(FailureOwner.TASK, "environment_failed", detail)

    async def _within(self, asking: Any) -> Any:
        """Return what is answered in time. Raises: AttemptFailed if nothing is, or no words of OpenEnv's."""
        limit_s = self._spec.tool_limit_s
        try:
            async with asyncio.timeout(limit_s):
                return await asking
        except TimeoutError as error:
            detail = f"{self._spec.url} has not answered for {limit_s:g} s"
            raise AttemptFailed(FailureOwner.INFRA, "server_silent", detail) from error
        except OSError as error:
            raise AttemptFailed(FailureOwner.INFRA, "server_lost", f"{self._spec.url}: {error}") from error
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            detail = f"{self._spec.url} speaks otherwise: {type(error).__name__}: {error}"
            raise AttemptFailed(FailureOwner.INFRA, "server_lost", detail) from error


def _show(observation: Mapping[str, Any]) -> str:
    """Return the one text that an observation is, or all that it has as JSON."""
    values = [value for value in observation.values() if value is not None]
    if len(values) == 1 and isinstance(values[0], str):
        return values[0]
    return json.dumps(observation, ensure_ascii=False)


def _last_object(text: str) -> dict[str, Any] | None:
    found, place, decoder = None, 0, json.JSONDecoder()
    while (start := text.find("{", place)) >= 0:
        try:
            value, place = decoder.raw_decode(text, start)
            found = value if isinstance(value, dict) else found
        except (ValueError, RecursionError):
            place = start + 1
    return found
