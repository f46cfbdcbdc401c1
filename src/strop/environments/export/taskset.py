"""A strop environment as a taskset of verifiers v1, with the environment and the harness that play it.

strop runs in a separate process under its own Python (`python` of the taskset); one process plays all
attempts. verifiers converses with the model, in the model's own syntax of tool calls. Tried with verifiers
0.4.0.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import Any, Literal

import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.errors import SandboxError, TaskError

_HERE = Path(__file__).parent
_EXPORTED = json.loads((_HERE / "environment.json").read_text(encoding="utf-8"))
_MODULE = "strop.environments.export.playing"


class Player:
    """The process that plays; it ends with this one. Usable from any thread and event loop."""

    def __init__(self, python: str) -> None:
        section = dict(_EXPORTED["section"])
        if _EXPORTED["source"]:
            section["name"] = f"{_HERE / _EXPORTED['source']}:{_EXPORTED['class']}"
        folder = _EXPORTED["folder"]
        self._pending: dict[int, Future[Any]] = {0: Future()}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        try:
            # In another session, out of reach of the terminal's signals: this process ends it.
            self._process = subprocess.Popen(
                [python, "-P", "-m", _MODULE],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=folder if Path(folder).is_dir() else None,
                start_new_session=True,
            )
        except OSError as error:
            raise RuntimeError(
                f"strop cannot be started by {python}: {error}; name a Python that has strop:"
                " --env.taskset.python"
            ) from error
        threading.Thread(target=self._read_answers, daemon=True).start()
        self._write({"section": section, "version": _EXPORTED["version"]})
        self._pending[0].result()

    def ask(self, do: str, **arguments: Any) -> Any:
        """Call a method of the process and wait. Raises: RuntimeError with its error."""
        return self._send(do, arguments)[1].result()

    async def do(self, do: str, **arguments: Any) -> Any:
        """Call a method of the process; a cancellation is passed on to it.

        Raises: RuntimeError with its error; SandboxError or TaskError if the attempt has no score.
        """
        number, future = self._send(do, arguments)
        try:
            answer = await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self._write({"id": 0, "do": "cancel", "other": number})
            raise
        failure = answer.get("failure")
        if failure is not None:
            kind = TaskError if failure["owner"] == "task" else SandboxError
            raise kind(f"{failure['kind']}: {failure['detail']}")
        return answer

    def _send(self, do: str, arguments: dict[str, Any]) -> tuple[int, Future[Any]]:
        number, future = next(self._numbers), Future[Any]()
        with self._lock:
            if self._process.stdout is None or self._process.stdout.closed:
                raise RuntimeError("strop's process has ended")
            self._pending[number] = future
        self._write({**arguments, "id": number, "do": do})
        return number, future

    def _write(self, line: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with self._lock:
            try:
                self._process.stdin.write(json.dumps(line).encode() + b"\n")
                self._process.stdin.flush()
            except (OSError, ValueError):
                # It has ended: `_read_answers` fails every pending request.
                return

    def _read_answers(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = json.loads(line)
            with self._lock:
                future = self._pending.pop(answer["id"], None)
            if future is None or not future.set_running_or_notify_cancel():
                continue
            if "error" in answer:
                future.set_exception(RuntimeError(f"{answer['kind']}: {answer['error']}"))
            else:
                future.set_result(answer["found"])
        with self._lock:
            self._process.stdout.close()
            left = [*self._pending.values()]
            self._pending.clear()
        code = self._process.wait()
        for future in left:
            if future.set_running_or_notify_cancel():
                future.set_exception(
                    RuntimeError(f"strop's process has ended with {code}; it says why above")
                )


_starting = threading.Lock()
_start = cache(Player)


def player_of(python: str) -> Player:
    """Return the process of a Python; start one if there is none."""
    with _starting:
        return _start(python)


class StropData(vf.TaskData):  # type: ignore[misc]
    """One example and its tools."""

    split: str
    example: int
    tools: list[dict[str, Any]]


class StropConfig(vf.TasksetConfig):  # type: ignore[misc]
    """The split, and the Python that plays."""

    split: Literal["train", "held_out"] = "train"
    python: str = _EXPORTED["python"]
    """A Python that has strop, of the release that exported this package."""


class StropTask(vf.Task[StropData, vf.State, vf.TaskConfig]):  # type: ignore[misc]
    """One example; the environment judges the attempt."""


class StropTaskset(vf.Taskset[StropTask, StropConfig]):  # type: ignore[misc]
    """The examples of a split."""

    def load(self) -> Iterator[StropTask]:
        """Yield the examples in strop's order."""
        for row in player_of(self.config.python).ask("tasks", split=self.config.split):
            yield StropTask(StropData(**row), self.config.task)


class StropHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
    """Sends the conversation so far, and keeps the reply; runs no program."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> Any:
        """Call the model once, through verifiers' own recorder."""
        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or ()]
        tools = {"tools": data.tools} if data.tools else {}
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            await client.chat.completions.create(model=ctx.model, messages=messages, **tools)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


class StropEnvConfig(vf.EnvConfig):  # type: ignore[misc]
    """The agent, within strop's limits of an attempt."""

    agent: vf.AgentConfig = vf.AgentConfig(**_EXPORTED["agent"])


class StropEnv(vf.Env[StropEnvConfig]):  # type: ignore[misc]
    """Lets the model and strop's environment take turns; the rewards come from strop."""

    async def run(self, task: Any, agents: Any) -> None:
        """Play an attempt and score it, also if a limit of verifiers ended it."""
        player = player_of(self.config.taskset.python)
        opened = await player.do("open", split=task.data.split, example=task.data.example)
        number = opened["number"]
        try:
            async with agents.agent.interaction(task) as interaction:
                segment = await interaction.turn()
                while not segment.terminated:
                    result = await player.do("step", number=number, **_read(segment, interaction.trace))
                    if result["is_done"]:
                        break
                    segment = await interaction.turn(result["messages"])
            trace = interaction.trace
            if trace.errors:
                return
            outcome = await player.do("score", number=number)
        finally:
            await player.do("close", number=number)
        for name, value in outcome["parts"].items():
            if value is None:
                trace.rewards[name] = None
            else:
                trace.record_reward(name, value)
        trace.record_metrics(outcome["metrics"])


def _read(segment: Any, trace: Any) -> dict[str, Any]:
    """Return a reply as arguments of strop's `step`."""
    reply = segment.messages[-1]
    calls = [(call.id, call.name, call.arguments) for call in reply.tool_calls or ()]
    model_call = next(call for call in reversed(trace.calls) if call.error is None)
    return {"text": reply.content or "", "calls": calls, "is_cut": model_call.finish_reason == "length"}


__all__ = ["StropEnv", "StropHarness", "StropTaskset"]
