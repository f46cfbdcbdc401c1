"""Tools of real MCP servers: an environment that has them, and what becomes of servers that fail."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from strop.environments.mcp import McpServer
from strop.errors import ConfigError
from strop.rollout import FailureOwner, Rollout, ToolCall
from strop.spec.reader import load_spec
from strop.tasks import Task, build_task
from strop.tasks.failures import AttemptFailed
from tests.conftest import require_system_part
from tests.environments.test_worlds import attempt, call, tokenizer_of

SERVER = '''
import os, sys, time
from mcp.server import MCPServer

server = MCPServer("notes")
notes = []

@server.tool()
def note(text: str, times: int = 1) -> str:
    """Keep a note."""
    notes.extend([text] * times)
    return " ".join(notes)

@server.tool()
def fail() -> str:
    """Fail."""
    raise ValueError("that cannot be")

@server.tool()
def end() -> str:
    """Die."""
    os._exit(3)

@server.tool()
def hang() -> str:
    """Wait."""
    time.sleep(60)
    return ""

if len(sys.argv) > 1:
    server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
else:
    server.run()
'''
WORLD = '''
class Shelf:
    """A world with a tool of its own, and those of servers."""

    max_turns = 4

    def examples(self, split):
        return [{"goal": 1 if split == "train" else 2}]

    def reset(self, example, seed):
        self.seen = ""
        return "Keep a note."

    def look(self, place: str) -> str:
        """Look."""
        self.seen = place
        return f"{place} is empty."

    def score(self):
        return self.seen == "shelf"
'''


@pytest.fixture(autouse=True)
def environment() -> None:
    """The package mcp."""
    require_system_part("the package mcp (pip install 'strop[mcp]')", find_spec("mcp") is not None)


@pytest.fixture
def command(tmp_path: Path) -> str:
    path = tmp_path / "notes.py"
    path.write_text(textwrap.dedent(SERVER))
    return f"{sys.executable} {path}"


@pytest.fixture
def url(command: str) -> Iterator[str]:
    """The same server, by HTTP."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([*command.split(), str(port)], stderr=subprocess.DEVNULL)
    try:
        while process.poll() is None:
            with socket.socket() as asking:
                if asking.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


def world(tmp_path: Path, *servers: str, limit_s: float = 300.0) -> Task:
    path = tmp_path / "shelf.py"
    path.write_text(WORLD)
    words = [f"environment.name={path}:Shelf", f"environment.mcp_servers={json.dumps(servers)}"]
    words.append(f"environment.tool_limit_s={limit_s}")
    return build_task(load_spec(None, ["name=x", *words]).spec.task)


def play(tmp_path: Path, task: Task, *replies: str) -> Rollout:
    return attempt(task, tokenizer_of(tmp_path, "hermes"), list(replies))


def test_tools_of_a_server_join_those_of_the_environment(tmp_path: Path, command: str) -> None:
    task = world(tmp_path, command)
    notes = [call("note", "hermes", text="a", times=2), call("note", "hermes", text="é")]
    wrong = call("note", "hermes", times="many") + call("fail", "hermes")
    for _ in range(2):
        # Each attempt has a server of its own: nothing is left of the first.
        rollout = play(tmp_path, task, *notes, wrong, call("look", "hermes", place="shelf"))
        assert rollout.outcome.reward == 1.0, rollout.outcome
        told = [turn.text for turn in rollout.turns if not turn.is_sampled]
        assert '"name": "note"' in told[0]
        assert "Keep a note." in told[0]
        assert "a a é" in told[2]
        assert "error:" in told[3]
        assert "Error executing tool fail" in told[3]
        assert rollout.outcome.metrics["num_tool_calls"] == 5.0
    assert task.version != world(tmp_path).version


def test_a_server_by_http_is_the_same(tmp_path: Path, url: str) -> None:
    rollout = play(
        tmp_path,
        world(tmp_path, url),
        call("note", "hermes", text="b"),
        call("look", "hermes", place="shelf"),
        "Done.",
    )
    assert rollout.outcome.reward == 1.0, rollout.outcome
    assert "\nb\n" in rollout.turns[2].text


def test_a_server_that_dies_gives_no_score(tmp_path: Path, command: str) -> None:
    rollout = play(tmp_path, world(tmp_path, command), call("end", "hermes"), "Done.")
    failure = rollout.outcome.failure
    assert rollout.outcome.reward is None
    assert failure is not None
    assert (failure.owner, failure.kind) == (FailureOwner.TASK, "mcp_server")


def test_a_server_that_is_silent_is_given_up(command: str) -> None:
    async def ask() -> None:
        server = McpServer(command, 300.0)
        try:
            await server.list_tools()
            server._limit_s = 0.2
            await server.call(ToolCall(name="hang"))
        finally:
            await server.close()

    with pytest.raises(AttemptFailed) as failed:
        asyncio.run(ask())
    assert failed.value.kind == "tool_timeout"


def test_servers_that_cannot_be_had_are_refused_before_the_run(tmp_path: Path, command: str) -> None:
    for server, said in (
        ("/no/such/server", "No such file"),
        ("false", "the MCP server 'false'"),
        ("http://127.0.0.1:9/mcp", "ConnectError"),
    ):
        with pytest.raises(ConfigError, match=said):
            play(tmp_path, world(tmp_path, server))
    with pytest.raises(ConfigError, match="two tools"):
        play(tmp_path, world(tmp_path, command, command))
