"""Tools of servers that speak the Model Context Protocol (2025-06-18), beside an environment's own.

`environment.mcp_servers` lists commands, each started for every attempt and used over its standard streams,
and URLs. An error of a server's tool is reported to the model; a server that dies, times out or breaks the
protocol is a failure of the task.
The protocol is implemented here: its own package brings thirty others for three requests.
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
_MAX_STDERR_BYTES = 2000
_END_S = 2.0
"""How long a server that has closed its output may take to end."""
_INVALID_PARAMS = -32602
_METHOD_NOT_FOUND = -32601
_KEPT_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "VIRTUAL_ENV", "PYTHONPATH")
_HELLO = {
    "protocolVersion": PROTOCOL,
    "capabilities": {},
    "clientInfo": {"name": "strop", "version": "1"},
}


class _Broken(Exception):
    """Raised if a server has ended or broken the protocol."""


class _ErrorAnswer(Exception):
    """Raised if a server answers with an error."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class _Wire(Protocol):
    """The connection to one server."""

    async def send(self, message: Mapping[str, Any]) -> Any:
        """Send a message; return its answer if it has an id. Raises: _Broken."""
        ...

    async def close(self) -> None: ...


class _Process:
    """A server started here, with JSON lines on its standard streams."""

    def __init__(self, command: str) -> None:
        self._command = command
        self._process: asyncio.subprocess.Process | None = None
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the server)

    async def send(self, message: Mapping[str, Any]) -> Any:
        """Write a line, and read lines until the answer."""
        if self._process is None:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *shlex.split(self._command),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=self._stderr,
                    env={name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ},
                    start_new_session=True,
                    limit=_MAX_LINE_BYTES,
                )
            except OSError as error:
                raise _Broken(f"it cannot be started: {error.strerror}") from error
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            await _write(stdin, message)
            while "id" in message:
                line = await stdout.readline()
                if not line:
                    # It may still be writing why.
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._process.wait(), _END_S)
                    raise _Broken(f"it has ended: {self._last_words()}")
                received = json.loads(line)
                if "method" not in received and received.get("id") == message["id"]:
                    return received
                if "method" in received and "id" in received:
                    # A request of the server: this client supports ping alone.
                    reply = {"error": {"code": _METHOD_NOT_FOUND, "message": "not supported"}}
                    reply = {"result": {}} if received["method"] == "ping" else reply
                    await _write(stdin, {"jsonrpc": "2.0", "id": received["id"], **reply})
        except (OSError, ValueError, AttributeError) as error:
            raise _Broken(f"{type(error).__name__}: {error}; {self._last_words()}") from error
        return None

    def _last_words(self) -> str:
        """Return the last line of its errors: older ones are its log, or where an exception came from."""
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - _MAX_STDERR_BYTES))
        return (self._stderr.read().decode(errors="replace").strip().splitlines() or ["without a word"])[-1]

    async def close(self) -> None:
        """Kill the server and its children."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.communicate()
        self._stderr.close()


async def _write(stdin: asyncio.StreamWriter, message: Mapping[str, Any]) -> None:
    stdin.write(json.dumps(message, ensure_ascii=False).encode() + b"\n")
    await stdin.drain()


class _Url:
    """A server reached over HTTP; each attempt has a separate session."""

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
            return next(
                event for event in events if "method" not in event and event.get("id") == message["id"]
            )
        except self._errors as error:
            raise _Broken(f"{type(error).__name__}: {error}") from error

    async def close(self) -> None:
        """End the session."""
        with suppress(*self._errors):
            if "mcp-session-id" in self._client.headers:
                await self._client.delete(self._url)
        await self._client.aclose()


class McpServer:
    """A session with one server."""

    def __init__(self, name: str, limit_s: float) -> None:
        """`name` is a command or a URL; `limit_s` limits each request."""
        self._name = name
        self._limit_s = limit_s
        is_url = name.startswith(("http://", "https://"))
        self._wire: _Wire = _Url(name) if is_url else _Process(name)
        self._numbers = itertools.count(1)
        self._is_open = False

    async def list_tools(self) -> dict[str, str]:
        """Return its tools as functions of OpenAI's chat API, as JSON, by name. Raises: AttemptFailed."""
        schemas: dict[str, str] = {}
        parameters: dict[str, Any] = {}
        while True:
            page = await self._ask("tools/list", parameters)
            for tool in page["tools"]:
                function = {
                    "name": tool["name"],
                    "description": tool.get("description") or "",
                    "parameters": {"properties": {}, **tool["inputSchema"]},
                }
                schemas[tool["name"]] = json.dumps(
                    {"type": "function", "function": function}, ensure_ascii=False
                )
            if not page.get("nextCursor"):
                return schemas
            parameters = {"cursor": page["nextCursor"]}

    async def call(self, call: ToolCall) -> str:
        """Call a tool. Raises: CallRefused, ToolError, AttemptFailed."""
        parameters = {"name": call.name, "arguments": json.loads(call.arguments)}
        try:
            answer = await self._ask("tools/call", parameters)
        except _ErrorAnswer as error:
            if error.code == _INVALID_PARAMS:
                raise CallRefused(str(error)) from error
            raise self._failed("mcp_server", str(error)) from error
        text = _read_content(answer)
        if answer.get("isError"):
            raise ToolError(text)
        return text

    async def close(self) -> None:
        """End the session."""
        await self._wire.close()

    async def _ask(self, method: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
        try:
            async with asyncio.timeout(self._limit_s):
                if not self._is_open:
                    await self._request("initialize", _HELLO)
                    await self._wire.send({"jsonrpc": "2.0", "method": "notifications/initialized"})
                    self._is_open = True
                return await self._request(method, parameters)
        except TimeoutError as error:
            raise self._failed("tool_timeout", f"no answer after {self._limit_s:g} s") from error
        except _Broken as error:
            raise self._failed("mcp_server", str(error)) from error

    async def _request(self, method: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
        message = {"jsonrpc": "2.0", "id": next(self._numbers), "method": method, "params": parameters}
        answer = await self._wire.send(message)
        if "error" in answer:
            raise _ErrorAnswer(answer["error"].get("code", 0), str(answer["error"].get("message", "")))
        result = answer.get("result")
        if not isinstance(result, dict):
            raise _Broken(f"an answer to {method} without a result: {answer!s:.200}")
        return result

    def _failed(self, kind: str, why: str) -> AttemptFailed:
        return AttemptFailed(FailureOwner.TASK, kind, f"the MCP server {self._name!r:.200}: {why}")


class ServedObject:
    """An author's object together with the tools of MCP servers."""

    def __init__(
        self, inner: WorldObject, owners: Mapping[str, str], servers: Sequence[str], limits: ObjectLimits
    ) -> None:
        """`owners`: the server of each served tool."""
        self._inner = inner
        self._owners = owners
        self._servers = {name: McpServer(name, limits.tool_limit_s) for name in servers}
        self._max_chars = limits.max_observation_chars

    async def reset(self, example: Example, seed: int) -> tuple[Message, ...]:
        """Open the attempt; a server starts with its first call."""
        return await self._inner.reset(example, seed)

    async def step(self, text: str) -> tuple[tuple[Message, ...], bool]:
        """Pass a reply to the object."""
        return await self._inner.step(text)

    async def call(self, call: ToolCall) -> tuple[str, bool]:
        """Call a tool of a server, or of the object."""
        owner = self._owners.get(call.name)
        if owner is None:
            return await self._inner.call(call)
        return cut_text(await self._servers[owner].call(call), self._max_chars), False

    async def score(self) -> Outcome:
        """Score the attempt."""
        return await self._inner.score()

    async def close(self) -> None:
        """Close the object, and end every session."""
        try:
            await self._inner.close()
        finally:
            for server in self._servers.values():
                await server.close()


def find_served_tools(servers: Sequence[str], limit_s: float) -> dict[str, tuple[str, str]]:
    """Ask servers for their tools; return server and schema by the tool's name.

    Raises: ConfigError if a server does not answer, or two tools have the same name.
    """

    async def ask_all() -> dict[str, tuple[str, str]]:
        served: dict[str, tuple[str, str]] = {}
        for name in servers:
            server = McpServer(name, limit_s)
            try:
                tools = await server.list_tools()
            finally:
                await server.close()
            require_apart(served, tools)
            served |= {tool: (name, schema) for tool, schema in tools.items()}
        return served

    try:
        # In a thread: a rollout's event loop may be running here.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, ask_all()).result()
    except (AttemptFailed, _ErrorAnswer, LookupError, TypeError) as error:
        raise ConfigError(
            f"environment.mcp_servers: {error}",
            allowed="commands and URLs of servers that answer tools/list",
            next_step="start the command by hand, or ask the URL, and see what it says",
        ) from error


def require_apart(tools: Mapping[str, Any], others: Mapping[str, Any]) -> None:
    """Refuse two tools with the same name. Raises: ConfigError."""
    if both := sorted(tools.keys() & others.keys()):
        raise ConfigError(
            f"environment.mcp_servers: there are two tools {both[0]}",
            allowed="tools whose names differ, those of the environment among them",
            next_step="leave one of the servers out, or rename the environment's method",
        )


def _read_content(answer: Mapping[str, Any]) -> str:
    """Return a tool's result as text; binary data becomes a note."""
    texts = []
    for part in answer.get("content") or ():
        inner = part.get("resource") or part
        if "text" in inner:
            # No tokenizer accepts a lone surrogate.
            texts.append(str(inner["text"]).encode("utf-8", "replace").decode("utf-8"))
        else:
            texts.append(f"({part.get('type')} of the type {inner.get('mimeType')}, not shown)")
    if not texts and answer.get("structuredContent") is not None:
        texts = [json.dumps(answer["structuredContent"], ensure_ascii=False)]
    return "\n".join(texts)
