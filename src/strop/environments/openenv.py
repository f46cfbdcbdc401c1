"""The environment of an OpenEnv server, with one session (`/ws`) for each attempt.

An action that the server rejects is reported to the model. A server that dies, is silent for `tool_limit_s`,
fails in `reset` or `step`, or never returns a reward leaves the attempt without a score.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from strop.environments.contract import Done, numbers_of
from strop.environments.tools import read_objects
from strop.errors import ConfigError
from strop.rollout import Example, FailureOwner, Outcome, Split
from strop.spec.base import FreeTable, expert
from strop.spec.task import EnvironmentSection
from strop.tasks.failures import AttemptFailed
from strop.tasks.task import TaskLimits

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

_NO_ACTION = "VALIDATION_ERROR"
_FULL = "CAPACITY_REACHED"
_RETRY_S = 0.5
_MAX_BYTES = 64 << 20


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
        description="Field of an action that takes the whole reply as text. none = the last JSON object of a"
        " reply is the action.",
        json_schema_extra=expert("environments differ in what an action is"),
    )
    instructions: str = Field(
        default="",
        description="Text before the first observation, such as the form of an action.",
        json_schema_extra=expert("a server sends a model only its observations"),
    )
    options: FreeTable = Field(
        default={},
        description="Further arguments of the environment's reset, beside the seed.",
        json_schema_extra=expert("each environment has other settings"),
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


class Openenv:
    """One session. Its seed is the example's; the reward is the sum of the rewards of its steps."""

    name = "openenv"
    version = "openenv-1"
    max_turns = 30

    def __init__(self, spec: OpenenvSpec) -> None:
        if find_spec("websockets") is None:
            raise ConfigError(
                "openenv speaks through websockets, which is not installed",
                allowed="an installation with the extra 'openenv'",
                next_step="pip install 'strop[openenv]'",
            )
        self._spec = spec
        self._socket: ClientConnection | None = None
        self._rewards: list[float | None] = []
        self._num_invalid = 0

        self.limits = TaskLimits(
            max_reply_tokens=1024,
            max_reward=spec.max_return,
            min_reward=spec.min_return,
            max_goldless_frac=1.0,
        )

    def examples(self, split: Split) -> Iterator[Mapping[str, Any]]:
        """Yield a seed for each attempt."""
        spec = self._spec
        seeds = numbers_of(split, num_train=spec.num_train, num_held_out=spec.num_held_out)
        return ({"seed": seed} for seed in seeds)

    async def reset(self, example: Example, seed: int) -> str:
        """Open a session with the example's seed. Raises: AttemptFailed."""
        options = {**self._spec.options, "seed": example.fields["seed"]}
        opened = await self._within(self._open(options))
        return "\n\n".join(filter(None, (self._spec.instructions, _show(opened["observation"]))))

    async def step(self, text: str) -> str | Done:
        """Take the reply's action. Raises: AttemptFailed."""
        action = self._read(text)
        if action is None:
            return self._refuse("it has none")
        answer = await self._within(self._ask("step", action))
        if answer["type"] == "error":
            return self._refuse(json.dumps(answer["data"].get("errors", ""), ensure_ascii=False))
        result = answer["data"]
        reward = result.get("reward")
        self._rewards.append(None if reward is None else float(reward))
        shown = _show(result["observation"])
        return Done(shown) if result.get("done") else shown

    def score(self) -> Outcome:
        """Return the sum of the rewards. Raises: AttemptFailed if no executed step had one."""
        rewards = [reward for reward in self._rewards if reward is not None]
        if len(rewards) == self._num_invalid < len(self._rewards):
            raise AttemptFailed(FailureOwner.TASK, "no_reward", "no step had a reward")
        total = sum(rewards)
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

    def _read(self, text: str) -> dict[str, Any] | None:
        """Return the action of a reply, or None if it has none."""
        name = self._spec.action_field
        if name is not None:
            return {name: text}
        *_, last = None, *read_objects(text)
        return last

    def _refuse(self, why: str) -> str:
        self._num_invalid += 1
        self._rewards.append(0.0)
        return f"That is no action: {why[:1000]}"

    async def _open(self, options: Mapping[str, Any]) -> Any:
        from websockets.asyncio.client import connect

        # "ws" in place of "http".
        url = f"ws{self._spec.url.removeprefix('http').removeprefix('ws').rstrip('/')}/ws"
        while True:
            self._socket = await connect(
                url, proxy=None, compression=None, open_timeout=None, ping_interval=None, max_size=_MAX_BYTES
            )
            answer = await self._ask("reset", options)
            if answer["type"] != "error":
                return answer["data"]
            # The server is full.
            await self.close()
            await asyncio.sleep(_RETRY_S)

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> Any:
        """Send a request and return its answer. Raises: AttemptFailed if the environment fails."""
        assert self._socket is not None
        from websockets.exceptions import ConnectionClosed

        # The server may have sent an error before it closed the connection.
        with suppress(ConnectionClosed):
            await self._socket.send(json.dumps({"type": kind, "data": data}))
        answer = json.loads(await self._socket.recv())
        if answer["type"] == "observation":
            observation = answer["data"]["observation"]
            if not isinstance(observation, dict):
                raise TypeError(f"an observation of type {type(observation).__name__}")
            return answer
        code = answer["data"].get("code")
        if code == _FULL or (kind == "step" and code == _NO_ACTION):
            return answer
        detail = f"{kind}: {json.dumps(answer['data'])[:1000]}"
        raise AttemptFailed(FailureOwner.TASK, "environment_failed", detail)

    async def _within(self, request: Awaitable[Any]) -> Any:
        """Await a request within the limit. Raises: AttemptFailed for a missing or malformed answer."""
        from websockets.exceptions import WebSocketException

        limit_s = self._spec.tool_limit_s
        cause: Exception
        try:
            async with asyncio.timeout(limit_s):
                return await request
        except TimeoutError as error:
            kind, detail, cause = "server_silent", f"no answer for {limit_s:g} s", error
        except (OSError, WebSocketException, ValueError, LookupError, TypeError, AttributeError) as error:
            kind, detail, cause = "server_lost", f"{type(error).__name__}: {error}", error
        raise AttemptFailed(FailureOwner.INFRA, kind, f"{self._spec.url}: {detail}") from cause


def _show(observation: Mapping[str, Any]) -> str:
    """Return an observation's only field if it is a text, else the whole observation as JSON."""
    values = [value for value in observation.values() if value is not None]
    if len(values) == 1 and isinstance(values[0], str):
        return values[0]
    return json.dumps(observation, ensure_ascii=False)
