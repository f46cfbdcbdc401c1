"""One attempt on an object of an author's class: its turns and its tool calls."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from strop.environments.contract import Action, Done, Environment, StepResult
from strop.environments.mcp import McpServer
from strop.environments.tools import CallRefused, ToolError, cut_text, find_tools, to_text
from strop.environments.workspace import Workspace
from strop.errors import DataError, SandboxError
from strop.rollout import Example, FailureOwner, Message, Outcome, ToolCall
from strop.tasks.failures import AttemptFailed
from strop.tasks.task import within_bounds
from strop.tasks.tool_calls import CallFormat, Spoken, read_reply
from strop.tasks.user.own_task import require_whole

if TYPE_CHECKING:
    from strop.environments.worlds import WorldTask


class PlayedWorld(Environment):
    """One attempt; it holds the object."""

    def __init__(self, task: WorldTask) -> None:
        self._task = task
        self._section = section = task.section
        self.max_turns = task.max_turns
        self.stop_strings = task.limits.stop_strings
        self.base_stop_strings = task.limits.base_stop_strings
        self.max_attempt_tokens = section.max_attempt_tokens
        self.max_attempt_s = section.max_attempt_s
        self._own: Any = None
        self._servers: dict[str, McpServer] = {}
        self._num_turns = 0
        self._is_over = False
        """Whether the world ended the attempt."""
        self._has_replied = False
        self._num_bad_replies = 0
        """Consecutive ones up to now."""
        self._counts = dict.fromkeys(("num_tool_calls", "num_format_errors", "num_tool_errors"), 0.0)

    async def reset(self, example: Example, seed: int) -> tuple[Message, ...]:
        """Make a new object, and open the attempt. Raises: DataError if the example is incomplete."""
        require_whole(self._task.name, example)
        await self.close()
        self._own = self._task.make_placed()
        # A server starts with its first call.
        limit_s = self._section.tool_limit_s
        self._servers = {name: McpServer(name, limit_s) for name in set(self._section.mcp_servers)}
        self._num_turns, self._is_over, self._has_replied = 0, False, False
        return self._task.pose(to_messages(await finished(self._own.reset(example, seed))), example)

    async def step(self, action: Action) -> StepResult:
        """Give the reply to the object, or to the tools that it calls."""
        if self._own is None or self._is_over or self._num_turns == self.max_turns:
            raise DataError(f"{self._task.name}: step before reset, or after the attempt's end")
        self._num_turns += 1
        self._has_replied |= bool(action.text.strip())
        spoken = self._read(action)
        num_wrong = self._counts["num_format_errors"]
        messages: list[Message] = []
        for call in spoken.calls:
            if not self._is_over:
                text = cut_text(await self._call(call), self._section.max_observation_chars)
                messages.append(Message(role="tool", content=text, tool_call_id=call.call_id, name=call.name))
        messages += [Message(role="user", content=mistake) for mistake in spoken.mistakes]
        self._counts["num_format_errors"] += len(spoken.mistakes)
        is_wrong = self._counts["num_format_errors"] > num_wrong
        self._num_bad_replies = self._num_bad_replies + 1 if is_wrong else 0
        self._is_over |= self._num_bad_replies >= self._section.max_format_errors
        if not spoken.calls and not spoken.mistakes and not self._is_over:
            messages += await self._answer(spoken.content)
        is_done = self._is_over or self._num_turns == self.max_turns
        return StepResult(messages=() if is_done else tuple(messages), done=is_done)

    async def score(self) -> Outcome:
        """Score the attempt. Raises: DataError before `reset`."""
        if self._own is None:
            raise DataError(f"{self._task.name}: score before reset")
        outcome = self._task.to_outcome(await finished(self._own.score()))
        metrics = dict(outcome.metrics)
        if self._task.tools:
            metrics |= self._counts
            if outcome.format_ok is None:
                is_formed = self._has_replied and not self._counts["num_format_errors"]
                outcome = replace(outcome, format_ok=is_formed)
        if not self._is_over and self._num_turns == self.max_turns:
            metrics["out_of_turns"] = 1.0
        return within_bounds(replace(outcome, metrics=metrics), self._task.limits)

    async def close(self) -> None:
        """Close the object, if it has `close`, and end every server's session."""
        own, servers, self._own, self._servers = self._own, self._servers, None, {}
        try:
            if own is not None and callable(getattr(own, "close", None)):
                await finished(own.close())
        finally:
            for server in servers.values():
                await server.close()

    def _read(self, action: Action) -> Spoken:
        """Return the parts of a reply; of one that nobody has parsed, calls are fenced blocks."""
        if not self._task.tools:
            return Spoken(content=action.text)
        return action.spoken or read_reply(action.text, CallFormat.FENCE, self._task.parameters)

    async def _answer(self, text: str) -> Sequence[Message]:
        """Give a reply without a call to the object's `step`; without one the attempt is over."""
        if not self._task.has_step:
            self._is_over = True
            return ()
        returned = await finished(self._own.step(text))
        if isinstance(returned, Message | list | tuple):
            return to_messages(returned)
        self._is_over = isinstance(returned, Done)
        shown = returned.text if isinstance(returned, Done) else to_text(returned, "step")
        return (Message(role="user", content=cut_text(shown, self._section.max_observation_chars)),)

    async def _call(self, call: ToolCall) -> str:
        """Execute one call; return the text for the model, also of what went wrong.

        Raises: AttemptFailed if it is not done in time or its result has no text form; any other exception of
            the tool.
        """
        self._counts["num_tool_calls"] += 1
        try:
            returned = await self._execute(call)
        except CallRefused as error:
            self._counts["num_format_errors"] += 1
            return f"error: {error}"
        except ToolError as error:
            returned = error
        except SandboxError as error:
            if not isinstance(self._own, Workspace):
                raise
            returned = self._own.explain_error(error)
        if isinstance(returned, ToolError):
            self._counts["num_tool_errors"] += 1
            return f"error: {returned}"
        self._is_over = isinstance(returned, Done)
        return to_text(returned.text if isinstance(returned, Done) else returned, call.name)

    async def _execute(self, call: ToolCall) -> Any:
        """Return what a tool of a server or of the object returns."""
        server, _ = self._task.served_tools.get(call.name, ("", ""))
        if server:
            return await self._servers[server].call(call)
        tool = find_tools(type(self._own)).get(call.name)
        if tool is None:
            raise CallRefused(f"there is no tool {call.name!r:.60}; there is {', '.join(self._task.tools)}")
        arguments = tool.read_arguments(call)
        limit_s, late = self._section.tool_limit_s, (FailureOwner.TASK, "tool_timeout")
        if isinstance(self._own, Workspace):
            # It ends slow commands itself, and a silent sandbox is the machine's failure.
            limit_s, late = limit_s + self._own.spare_limit_s, (FailureOwner.INFRA, "sandbox_silent")
        try:
            async with asyncio.timeout(limit_s) as timeout:
                return await finished(getattr(self._own, call.name)(**arguments))
        except TimeoutError as error:
            if not timeout.expired():
                raise
            raise AttemptFailed(*late, f"the tool {call.name} was not done after {limit_s:g} s") from error


async def finished(returned: Any) -> Any:
    """Return a value, awaited if it must be."""
    return await returned if inspect.isawaitable(returned) else returned


def to_messages(returned: Any) -> tuple[Message, ...]:
    """Convert an author's text or messages to messages. Raises: DataError for anything else."""
    parts = [returned] if isinstance(returned, str | Message) else [*(returned or ())]
    if not parts:
        raise DataError(
            f"an environment says {returned!r:.80}",
            allowed="a text, or messages with role and content",
            next_step="correct its reset or step",
        )
    asked = (Message(role="user", content=part) if isinstance(part, str) else part for part in parts)
    return tuple(part if isinstance(part, Message) else Message.from_json(part) for part in asked)
