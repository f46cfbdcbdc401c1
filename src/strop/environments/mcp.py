"""Tools of servers that speak the Model Context Protocol (2025-06-18), beside an environment's own.

`environment.mcp_servers` names commands, each started anew for every attempt and spoken to by its standard
streams, and URLs. What a server says of an error of its tool is told to the model; a server that dies, is
silent for too long or speaks otherwise is a failure of the task's.
The protocol is spoken here: its own package brings thirty others for what is three requests.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shlex
import signal
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import IO, Any, Protocol

from strop.engine.wire import require_server_part
from strop.environments.objects import ObjectLimits, WorldObject
from strop.environments.tools import CallRefused, ToolError, cut_text
from strop.errors import ConfigError
from strop.rollout import Example, FailureOwner, Message, Outcome, ToolCall
from strop.tasks.failures import AttemptFailed

PROTOCOL = "2025-06-18"
_MAX_LINE_BYTES = 64 << 20
_MAX_TOLD_CHARS = 2000
_INVALID_PARAMS = -32602
_METHOD_NOT_FOUND = -32601
_KEPT_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "VIRTUAL_ENV", "PYTHONPATH")
_HELLO = {
    "protocolVersion": PROTOCOL,
    "capabilities": {},
    "clientInfo": {"name": "strop", "version": "1"},
}


class _Broken(Exception):
    """Raised where a server cannot be spoken to any more; the message says why."""


class _Told(Exception):
    """Raised with the code of an error that a server answered."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class _Wire(Protocol):
    """The way to one server."""

    async def send(self, message: Mapping[str, Any]) -> Any:
        """Send a message; return the answer to it where it has an id. Raises: _Broken."""
        ...

    async def close(self) -> None: ...


class _Process:
    """A server that was started here, and is spoken to in lines."""

    def __init__(self, command: str) -> None:
        self._command = command
        self._process: asyncio.subprocess.Process | None = None
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the server)

    async def _start(self) -> asyncio.subprocess.Process:
        try:
            return await asyncio.create_subprocess_exec(
                *shlex.split(self._command),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=self._errors,
                env={name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ},
                start_new_session=True,
                limit=_MAX_LINE_BYTES,
            )
        except OSError as error:
            raise _Broken(f"it cannot be started: {error.strerror}") from error

    async def send(self, message: Mapping[str, Any]) -> Any:
        """Write a line, and read those that come back until the answer."""
        if self._process is None:
            self._process = await self._start()
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            await _write(stdin, message)
            while "id" in message:
                line = await stdout.readline()
                if not line:
                    raise _Broken(f"it has ended: {self._last_words()}")
                found = json.loads(line)
                if "method" not in found and found.get("id") == message["id"]:
                    return found
                if "method" in found and "id" in found:
                    # It may ask whether we live; of what else a client may have, this one has nothing.
                    reply = {"error": {"code": _METHOD_NOT_FOUND, "message": "not supported"}}
                    reply = {"result": {}} if found["method"] == "ping" else reply
                    await _write(stdin, {"jsonrpc": "2.0", "id": found["id"], **reply})
        except (OSError, ValueError, AttributeError) as error:
            raise _Broken(f"{type(error).__name__}: {error}; {self._last_words()}") from error
        return None

    def _last_words(self) -> str:
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - _MAX_TOLD_CHARS))
        return self._errors.read().decode(errors="replace").strip()

    async def close(self) -> None:
        """End the server with whatever it started."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.communicate()
        self._errors.close()


async def _write(stdin: asyncio.StreamWriter, message: Mapping[str, Any]) -> None:
    stdin.write(json.dumps(message, ensure_ascii=False).encode() + b"\n")
    await stdin.drain()


class _Url:
    """A server that is spoken to by HTTP; a session of its own for each attempt."""

    def __init__(self, url: str) -> None:
        require_server_part("httpx")
        import httpx

        self._url = url
        self._errors: tuple[type[Exception], ...] = (
            httpx.HTTPError,
            httpx.InvalidURL,
            ValueError,
            StopIteration,
        )
        self._client = httpx.AsyncClient(
            headers={"accept": "application/json, text/event-stream"}, timeout=None
        )

    async def send(self, message: Mapping[str, Any]) -> Any:
        """Post a message; the answer is the body, or an event in it."""
        try:
            answer = await self._client.post(self._url, json=message)
            answer.raise_for_status()
            if (session := answer.headers.get("mcp-session-id")) is not None:
                self._client.headers["mcp-session-id"] = session
            self._client.headers["mcp-protocol-version"] = PROTOCOL
            if "id" not in message:
                return None
            if not answer.headers.get("content-type", "").startswith("text/event-stream"):
                return answer.json()
            lines = (line.removeprefix("data:") for line in answer.text.splitlines() if line[:5] == "data:")
            events = [json.loads(line) for line in lines if line.strip()]
            return next(one for one in events if "method" not in one and one.get("id") == message["id"])
        except self._errors as error:
            raise _Broken(f"{type(error).__name__}: {error}") from error

    async def close(self) -> None:
        """End the session."""
        with suppress(*self._errors):
            if "mcp-session-id" in self._client.headers:
                await self._client.delete(self._url)
        await self._client.aclose()


class McpServer:
    """A conversation with one server."""

    def __init__(self, name: str, limit_s: float) -> None:
        """`name` is a command or a URL; `limit_s` holds for each request."""
        self._name = name
        self._limit_s = limit_s
        is_url = name.startswith(("http://", "https://"))
        self._wire: _Wire = _Url(name) if is_url else _Process(name)
        self._numbers = itertools.count(1)
        self._is_open = False

    async def list_tools(self) -> dict[str, str]:
        """Return its tools as functions of OpenAI's chat API, as JSON, by name. Raises: AttemptFailed."""
        found: dict[str, str] = {}
        given: dict[str, Any] = {}
        while True:
            page = await self._ask("tools/list", given)
            for tool in page["tools"]:
                function = {
                    "name": tool["name"],
                    "description": tool.get("description") or "",
                    "parameters": {"properties": {}, **tool["inputSchema"]},
                }
                found[tool["name"]] = json.dumps(
                    {"type": "function", "function": function}, ensure_ascii=False
                )
            if not page.get("nextCursor"):
                return found
            given = {"cursor": page["nextCursor"]}

    async def call(self, call: ToolCall) -> str:
        """Call a tool. Raises: CallRefused, ToolError, AttemptFailed."""
        given = {"name": call.name, "arguments": json.loads(call.arguments)}
        try:
            answer = await self._ask("tools/call", given)
        except _Told as error:
            if error.code == _INVALID_PARAMS:
                raise CallRefused(str(error)) from error
            raise self._failed("mcp_server", str(error)) from error
        text = _read_content(answer)
        if answer.get("isError"):
            raise ToolError(text)
        return text

    async def close(self) -> None:
        """End the conversation."""
        await self._wire.close()

    async def _ask(self, method: str, given: Mapping[str, Any]) -> dict[str, Any]:
        try:
            async with asyncio.timeout(self._limit_s):
                if not self._is_open:
                    await self._request("initialize", _HELLO)
                    await self._wire.send({"jsonrpc": "2.0", "method": "notifications/initialized"})
                    self._is_open = True
                return await self._request(method, given)
        except TimeoutError as error:
            raise self._failed("tool_timeout", f"no answer after {self._limit_s:g} s") from error
        except _Broken as error:
            raise self._failed("mcp_server", str(error)) from error

    async def _request(self, method: str, given: Mapping[str, Any]) -> dict[str, Any]:
        number = next(self._numbers)
        found = await self._wire.send({"jsonrpc": "2.0", "id": number, "method": method, "params": given})
        if "error" in found:
            raise _Told(found["error"].get("code", 0), str(found["error"].get("message", "")))
        result = found.get("result")
        if not isinstance(result, dict):
            raise _Broken(f"an answer to {method} without a result: {found!s:.200}")
        return result

    def _failed(self, kind: str, why: str) -> AttemptFailed:
        return AttemptFailed(FailureOwner.TASK, kind, f"the MCP server {self._name!r:.200}: {why}")


class ServedObject:
    """An author's object, and servers whose tools join its own; one conversation with each."""

    def __init__(
        self, made: WorldObject, owners: Mapping[str, str], servers: Sequence[str], limits: ObjectLimits
    ) -> None:
        """`owners`: the server of each of their tools."""
        self._made = made
        self._owners = owners
        self._servers = {name: McpServer(name, limits.tool_limit_s) for name in servers}
        self._max_chars = limits.max_observation_chars

    async def reset(self, example: Example, seed: int) -> tuple[Message, ...]:
        """Have the object open the attempt; a server starts with the first call of it."""
        return await self._made.reset(example, seed)

    async def step(self, text: str) -> tuple[tuple[Message, ...], bool]:
        """Give a reply to the object."""
        return await self._made.step(text)

    async def call(self, call: ToolCall) -> tuple[str, bool]:
        """Call a tool of a server's, or of the object."""
        owner = self._owners.get(call.name)
        if owner is None:
            return await self._made.call(call)
        return cut_text(await self._servers[owner].call(call), self._max_chars), False

    async def score(self) -> Outcome:
        """Have the object score the attempt."""
        return await self._made.score()

    async def close(self) -> None:
        """Close the object, and end every conversation."""
        try:
            await self._made.close()
        finally:
            for server in self._servers.values():
                await server.close()


def find_served_tools(servers: Sequence[str], limit_s: float) -> dict[str, tuple[str, str]]:
    """Ask servers for their tools: each one's server and schema, by name.

    Raises: ConfigError if one cannot be asked, or two have a tool of one name.
    """

    async def ask_all() -> dict[str, tuple[str, str]]:
        found: dict[str, tuple[str, str]] = {}
        for name in servers:
            server = McpServer(name, limit_s)
            try:
                tools = await server.list_tools()
            finally:
                await server.close()
            require_apart(found, tools)
            found |= {tool: (name, schema) for tool, schema in tools.items()}
        return found

    try:
        # A rollout's loop may run in this thread.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, ask_all()).result()
    except (AttemptFailed, _Told, LookupError, TypeError) as error:
        raise ConfigError(
            f"environment.mcp_servers: {error}",
            allowed="commands and URLs of servers that answer tools/list",
            next_step="start the command by hand, or ask the URL, and see what it says",
        ) from error


def require_apart(tools: Mapping[str, Any], others: Mapping[str, Any]) -> None:
    """Refuse tools of one name. Raises: ConfigError."""
    if both := sorted(tools.keys() & others.keys()):
        raise ConfigError(
            f"environment.mcp_servers: there are two tools {both[0]}",
            allowed="tools whose names differ, those of the environment among them",
            next_step="leave one of the servers out, or rename the environment's method",
        )


def _read_content(answer: Mapping[str, Any]) -> str:
    """Return what a tool said as text; binary data as a note."""
    texts = []
    for part in answer.get("content") or ():
        inner = part.get("resource") or part
        if "text" in inner:
            # A lone surrogate is no character, and no tokenizer takes it.
            texts.append(str(inner["text"]).encode("utf-8", "replace").decode("utf-8"))
        else:
            texts.append(f"({part.get('type')} of the type {inner.get('mimeType')}, not shown)")
    if not texts and answer.get("structuredContent") is not None:
        texts = [json.dumps(answer["structuredContent"], ensure_ascii=False)]
    return "\n".join(texts)
