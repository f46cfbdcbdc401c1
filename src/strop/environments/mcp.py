"""Tools of MCP servers, beside an environment's own; the package mcp speaks to the servers.

`environment.mcp_servers` lists commands, each started for every attempt and used over its standard streams,
and URLs. An error of a server's tool is reported to the model; a server that dies, times out or breaks the
protocol is a failure of the task.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from strop.environments.tools import ToolError, run_here
from strop.errors import ConfigError
from strop.rollout import FailureOwner, ToolCall
from strop.tasks.failures import AttemptFailed
from strop.tasks.registry import import_extra

if TYPE_CHECKING:
    from mcp import Client

_KEPT_VARIABLES = ("LANG", "LC_ALL", "TMPDIR", "VIRTUAL_ENV", "PYTHONPATH")
"""Beside those that the package mcp gives to every server, such as PATH and HOME."""


class McpServer:
    """A session with one server."""

    def __init__(self, name: str, limit_s: float) -> None:
        """`name` is a command or a URL; `limit_s` limits each request."""
        self._name = name
        self._limit_s = limit_s
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  (closed with the server)
        self._session: asyncio.Task[None] | None = None
        self._client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._left = asyncio.Event()

    async def list_tools(self) -> dict[str, str]:
        """Return its tools as functions of OpenAI's chat API, as JSON, by name. Raises: AttemptFailed."""
        schemas: dict[str, str] = {}
        cursor = None
        while True:
            page = await self._ask("list_tools", cursor=cursor)
            for tool in page.tools:
                named = {"name": tool.name, "description": tool.description or ""}
                function = {**named, "parameters": {"properties": {}, **tool.input_schema}}
                schema = {"type": "function", "function": function}
                schemas[tool.name] = json.dumps(schema, ensure_ascii=False)
            cursor = page.next_cursor
            if not cursor:
                return schemas

    async def call(self, call: ToolCall) -> str:
        """Call a tool. Raises: ToolError, AttemptFailed."""
        answer = await self._ask("call_tool", name=call.name, arguments=json.loads(call.arguments))
        text = _read_content(answer)
        if answer.is_error:
            raise ToolError(text)
        return text

    async def close(self) -> None:
        """End the session, and a command with its children."""
        self._left.set()
        if self._session is not None:
            await asyncio.gather(self._session, return_exceptions=True)
        self._errors.close()

    async def _ask(self, method: str, **arguments: Any) -> Any:
        """Call a method of the client, whose session begins with the first. Raises: AttemptFailed."""
        from mcp import MCPError

        if self._session is None:
            # In a task of its own: a session must end in the task in which it began.
            self._session = asyncio.create_task(self._hold())
        begun: list[asyncio.Future[Any]] = [self._session, self._client]
        cause: Exception
        try:
            async with asyncio.timeout(self._limit_s):
                await asyncio.wait(begun, return_when=asyncio.FIRST_COMPLETED)
                if self._session.done():
                    self._session.result()
                return await getattr(self._client.result(), method)(**arguments)
        except TimeoutError as error:
            kind, why, cause = "tool_timeout", f"no answer after {self._limit_s:g} s", error
        except (MCPError, OSError, ValueError, RuntimeError, ExceptionGroup) as error:
            self._errors.seek(0)
            # The last line: older ones are its log, or where an error came from.
            said = (self._errors.read().strip().splitlines() or ["without a word"])[-1]
            kind, why, cause = "mcp_server", f"{error!r}; {said}", error
        raise AttemptFailed(FailureOwner.TASK, kind, f"the MCP server {self._name!r:.200}: {why}") from cause

    async def _hold(self) -> None:
        from mcp import Client, StdioServerParameters, stdio_client

        server: Any = self._name
        if not self._name.startswith(("http://", "https://")):
            command, *words = shlex.split(self._name)
            env = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
            parameters = StdioServerParameters(command=command, args=words, env=env)
            server = stdio_client(parameters, errlog=self._errors)
        # Not by asking first which protocol is newest: simple servers know the handshake alone.
        async with Client(server, mode="legacy") as client:
            self._client.set_result(client)
            await self._left.wait()


def find_served_tools(servers: Sequence[str], limit_s: float) -> dict[str, tuple[str, str]]:
    """Ask servers for their tools; return server and schema by the tool's name.

    Raises: ConfigError if a server does not answer, two tools have the same name, or mcp is not installed.
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

    if servers:
        import_extra("mcp", "mcp")
    try:
        return run_here(ask_all())
    except (AttemptFailed, ValueError) as error:
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


def _read_content(answer: Any) -> str:
    """Return a tool's result as text; binary data becomes a note."""
    texts = []
    for part in answer.content:
        inner = getattr(part, "resource", part)
        text = getattr(inner, "text", None)
        # No tokenizer accepts a lone surrogate.
        shown = None if text is None else text.encode("utf-8", "replace").decode("utf-8")
        texts.append(shown or f"({part.type} of the type {getattr(inner, 'mime_type', None)}, not shown)")
    if not texts and answer.structured_content is not None:
        texts = [json.dumps(answer.structured_content, ensure_ascii=False)]
    return "\n".join(texts)
