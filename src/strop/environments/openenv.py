"""The environment of an OpenEnv server, with one session (`/ws`) for each attempt.

An action that the server rejects is reported to the model. A server that dies, is silent for `tool_limit_s`,
fails in `reset` or `step`, or never returns a reward leaves the attempt without a score.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import re
import struct
from collections.abc import Awaitable, Iterator, Mapping
from contextlib import ExitStack, suppress
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field

from strop.environments.contract import Done, numbers_of
from strop.environments.tools import read_objects
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


MAX_BYTES = 64 << 20
_MAGIC = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_CONTINUED, _TEXT, _BINARY, _CLOSE, _PING, _PONG = 0, 1, 2, 8, 9, 10
_FINAL, _MASKED = 0x80, 0x80
_PORTS = {"ws": 80, "http": 80, "wss": 443, "https": 443}


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
        description="Field of an action that takes the whole reply as text, or with action_is_number its last"
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
        """Limits of an attempt's replies and reward."""
        spec = self._spec
        return TaskLimits(
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

    def gold_replies(self, example: Example) -> tuple[tuple[str, ...], ...]:
        """Return nothing: a server does not publish solutions."""
        return ()

    def _read(self, text: str) -> dict[str, Any] | None:
        """Return the action of a reply, or None if it has none."""
        name = self._spec.action_field
        if name is None:
            *_, last = None, *read_objects(text)
            return last
        if not self._spec.action_is_number:
            return {name: text}
        numbers = _NUMBER.findall(text)
        return {name: json.loads(numbers[-1].lstrip("+"))} if numbers else None

    def _refuse(self, why: str) -> str:
        self._num_invalid += 1
        self._rewards.append(0.0)
        return f"That is no action: {why[:1000]}"

    async def _open(self, options: Mapping[str, Any]) -> Any:
        while True:
            self._socket = await WebSocket.connect(f"{self._spec.url.rstrip('/')}/ws")
            answer = await self._ask("reset", options)
            if answer["type"] != "error":
                return answer["data"]
            # The server is full.
            await self.close()
            await asyncio.sleep(_RETRY_S)

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> Any:
        """Send a request and return its answer. Raises: AttemptFailed if the environment fails; OSError."""
        assert self._socket is not None
        # The server may have sent an error before it closed the connection.
        with suppress(OSError):
            await self._socket.send(json.dumps({"type": kind, "data": data}))
        answer = json.loads(await self._socket.receive())
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
        limit_s = self._spec.tool_limit_s
        try:
            async with asyncio.timeout(limit_s):
                return await request
        except TimeoutError as error:
            detail = f"{self._spec.url} has not answered for {limit_s:g} s"
            raise AttemptFailed(FailureOwner.INFRA, "server_silent", detail) from error
        except OSError as error:
            raise AttemptFailed(FailureOwner.INFRA, "server_lost", f"{self._spec.url}: {error}") from error
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            detail = f"{self._spec.url} speaks otherwise: {type(error).__name__}: {error}"
            raise AttemptFailed(FailureOwner.INFRA, "server_lost", detail) from error


def _show(observation: Mapping[str, Any]) -> str:
    """Return an observation's only field if it is a text, else the whole observation as JSON."""
    values = [value for value in observation.values() if value is not None]
    if len(values) == 1 and isinstance(values[0], str):
        return values[0]
    return json.dumps(observation, ensure_ascii=False)


class WebSocket:
    """A client connection of RFC 6455: whole texts, no extensions, one reader at a time.

    Written here: the needed part of the protocol is a hundred lines, and no installed library has a client.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, url: str) -> Self:
        """Connect to a `ws`, `wss`, `http` or `https` URL. Raises: OSError if no such server answers."""
        parts = urlsplit(url)
        port = parts.port or _PORTS[parts.scheme]
        is_secure = True if parts.scheme in ("wss", "https") else None
        reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=is_secure)
        with ExitStack() as stack:
            stack.callback(writer.close)
            key = base64.b64encode(os.urandom(16)).decode()
            writer.write(
                f"GET {parts.path or '/'} HTTP/1.1\r\nHost: {parts.netloc.rpartition('@')[2]}\r\n"
                f"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: {key}\r\n"
                "Sec-WebSocket-Version: 13\r\n\r\n".encode()
            )
            await writer.drain()
            try:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            except (asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
                raise ConnectionError("it does not answer as HTTP") from error
            fields = {
                name.strip().lower(): text.strip() for name, _, text in (line.partition(":") for line in head)
            }
            digest = hashlib.sha1((key + _MAGIC).encode(), usedforsecurity=False).digest()
            accept = base64.b64encode(digest).decode()
            if head[0].split()[1:2] != ["101"] or fields.get("sec-websocket-accept") != accept:
                raise ConnectionError(f"it speaks no WebSocket: {head[0][:200]}")
            # The caller owns the connection now.
            stack.pop_all()
        return cls(reader, writer)

    async def send(self, text: str) -> None:
        """Send a text. Raises: OSError."""
        await self._send(_TEXT, text.encode())

    async def receive(self) -> str:
        """Return the next text. Raises: OSError if the connection has ended or breaks the protocol."""
        whole = bytearray()
        while True:
            try:
                is_final, kind, data = await self._receive(MAX_BYTES - len(whole))
            except asyncio.IncompleteReadError as error:
                raise ConnectionError("it has ended") from error
            if kind == _CLOSE:
                code = struct.unpack(">H", data[:2])[0] if len(data) >= 2 else 1005
                raise ConnectionError(f"it was closed: {code} {data[2:].decode(errors='replace')}".rstrip())
            if kind == _PING:
                await self._send(_PONG, data)
            if kind in (_TEXT, _BINARY, _CONTINUED):
                whole += data
                if is_final:
                    return whole.decode(errors="replace")

    async def close(self) -> None:
        """Send a closing frame, and close the connection."""
        with suppress(OSError):
            await self._send(_CLOSE, struct.pack(">H", 1000))
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()

    async def _send(self, kind: int, data: bytes) -> None:
        size = len(data)
        if size < 126:
            length = bytes([_MASKED | size])
        elif size < 1 << 16:
            length = bytes([_MASKED | 126]) + struct.pack(">H", size)
        else:
            length = bytes([_MASKED | 127]) + struct.pack(">Q", size)
        mask = os.urandom(4)
        repeated = (mask * (size // 4 + 1))[:size]
        masked = (int.from_bytes(data, "big") ^ int.from_bytes(repeated, "big")).to_bytes(size, "big")
        self._writer.write(bytes([_FINAL | kind]) + length + mask + masked)
        await self._writer.drain()

    async def _receive(self, max_bytes: int) -> tuple[bool, int, bytes]:
        """Return whether a frame is the last of its message, its kind and its bytes."""
        first, second = await self._reader.readexactly(2)
        size = second & 0x7F
        if size == 126:
            (size,) = struct.unpack(">H", await self._reader.readexactly(2))
        elif size == 127:
            (size,) = struct.unpack(">Q", await self._reader.readexactly(8))
        if size > max_bytes:
            raise ConnectionError(f"a message of more than {MAX_BYTES} bytes")
        if second & _MASKED:
            raise ConnectionError("a server's frame is masked")
        return bool(first & _FINAL), first & 0x0F, await self._reader.readexactly(size)
