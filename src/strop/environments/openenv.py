"""The environment of an OpenEnv server, with one session (`/ws`) for each attempt.

An action that the server rejects is reported to the model. A server that dies, is silent for `tool_limit_s`,
fails in `reset` or `step`, or never returns a reward leaves the attempt without a score.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from strop.environments.contract import Done, NumberedSection
from strop.environments.tools import read_objects
from strop.rollout import Example, FailureOwner, Outcome, Split
from strop.spec.base import FreeTable, expert
from strop.tasks.failures import AttemptFailed
from strop.tasks.registry import import_extra
from strop.tasks.task import TaskLimits
from strop.tasks.user.rewards import FULL_MARKS_SLACK

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

_NO_ACTION = "VALIDATION_ERROR"
_FULL = "CAPACITY_REACHED"
_RETRY_S = 0.5
_MAX_BYTES = 64 << 20


class OpenenvSpec(NumberedSection):
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
    options: FreeTable = Field(
        default={},
        description="Further arguments of the environment's reset, beside the seed.",
        json_schema_extra=expert("each environment has other settings"),
    )
    max_return: float = Field(
        default=1.0,
        gt=0.0,
        description="Largest sum of rewards of an attempt: full marks. The least is as far below 0.",
        json_schema_extra=expert("a server does not say what its rewards are"),
    )


class Openenv:
    """One session. Its seed is the example's; the reward is the sum of the rewards of its steps."""

    name = "openenv"
    version = "openenv-2"
    max_turns = 30

    def __init__(self, spec: OpenenvSpec) -> None:
        import_extra("websockets", "openenv")
        self._spec = spec
        self._socket: ClientConnection | None = None
        self._rewards: list[float | None] = []
        self._num_invalid = 0
        top = spec.max_return
        self.limits = TaskLimits(max_reply_tokens=1024, max_reward=top, min_reward=-top, max_goldless_frac=1)

    def examples(self, split: Split) -> Iterator[Mapping[str, Any]]:
        """Yield a seed for each attempt."""
        return ({"seed": seed} for seed in self._spec.numbers_of(split))

    async def reset(self, example: Example, seed: int) -> str:
        """Open a session with the example's seed. Raises: AttemptFailed."""
        data = await self._ask("reset", {**self._spec.options, "seed": example.fields["seed"]})
        return _show(data["observation"])

    async def step(self, text: str) -> str | Done:
        """Take the reply's action. Raises: AttemptFailed."""
        name = self._spec.action_field
        *_, action = [None, *read_objects(text)] if name is None else [{name: text}]
        data: dict[str, Any] = {} if action is None else await self._ask("step", action)
        if "observation" not in data:
            self._num_invalid += 1
            self._rewards.append(0.0)
            why = json.dumps(data.get("errors", ""), ensure_ascii=False) if data else "it has none"
            return f"That is no action: {why[:1000]}"
        reward, shown = data.get("reward"), _show(data["observation"])
        self._rewards.append(None if reward is None else float(reward))
        return Done(shown) if data.get("done") else shown

    def score(self) -> Outcome:
        """Return the sum of the rewards. Raises: AttemptFailed if no executed step had one."""
        rewards = [reward for reward in self._rewards if reward is not None]
        if len(rewards) == self._num_invalid < len(self._rewards):
            raise AttemptFailed(FailureOwner.TASK, "no_reward", "no step had a reward")
        total = sum(rewards)
        return Outcome(
            parts={"return": total},
            is_correct=total >= self._spec.max_return - FULL_MARKS_SLACK,
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

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a request within the limit. Raises: AttemptFailed."""
        from websockets.exceptions import WebSocketException

        limit_s = self._spec.tool_limit_s
        cause: Exception
        try:
            async with asyncio.timeout(limit_s):
                while (answer := await self._exchange(kind, data)) is None:
                    await self.close()
                    await asyncio.sleep(_RETRY_S)
                return answer
        except TimeoutError as error:
            failure, detail, cause = "server_silent", f"no answer for {limit_s:g} s", error
        except (OSError, WebSocketException, ValueError, LookupError, TypeError, AttributeError) as error:
            failure, detail, cause = "server_lost", f"{type(error).__name__}: {error}", error
        raise AttemptFailed(FailureOwner.INFRA, failure, f"{self._spec.url}: {detail}") from cause

    async def _exchange(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the answer to a request; None if the server has no room for another session."""
        from websockets.asyncio.client import connect
        from websockets.exceptions import ConnectionClosed

        if self._socket is None:
            # "ws" in place of "http".
            url = f"ws{self._spec.url.removeprefix('http').removeprefix('ws').rstrip('/')}/ws"
            self._socket = await connect(
                url, proxy=None, compression=None, open_timeout=None, ping_interval=None, max_size=_MAX_BYTES
            )
        # The server may have sent an error before it closed the connection.
        with suppress(ConnectionClosed):
            await self._socket.send(json.dumps({"type": kind, "data": data}))
        answer = json.loads(await self._socket.recv())
        found: dict[str, Any] = answer["data"]
        if answer["type"] == "observation":
            if not isinstance(found["observation"], dict):
                raise TypeError(f"an observation of type {type(found['observation']).__name__}")
            return found
        if found.get("code") == _FULL:
            return None
        if kind == "step" and found.get("code") == _NO_ACTION:
            return found
        detail = f"{kind}: {json.dumps(found)[:1000]}"
        raise AttemptFailed(FailureOwner.TASK, "environment_failed", detail)


def _show(observation: Mapping[str, Any]) -> str:
    """Return an observation's only field if it is a text, else the whole observation as JSON."""
    values = [value for value in observation.values() if value is not None]
    if len(values) == 1 and isinstance(values[0], str):
        return values[0]
    return json.dumps(observation, ensure_ascii=False)
