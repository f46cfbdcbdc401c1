"""Environments as authors write them: a plain class, one object of it for each attempt.

    class Guess:
        max_turns = 5

        def examples(self, split): ...               # tables of fields, as a task's
        def reset(self, example, seed): ...          # the opening: a text, or messages
        def step(self, text): ...                    # the next message to the policy, or `Done()`
        def score(self): ...                         # a number, true or false, None, a table of them

Its other public methods are tools: typed, with a docstring, called by the model in its family's syntax.
With tools, `step` may be absent: then a reply without a call ends the attempt. Any method may be a coroutine.
"""

from __future__ import annotations

import asyncio
import inspect
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from typing_extensions import override

from strop.environments.contract import Action, Done, Environment, StepResult
from strop.environments.mcp import McpServer, find_served_tools, require_apart
from strop.environments.tools import (
    CallRefused,
    ToolError,
    cut_text,
    find_tools,
    read_facts,
    run_here,
    to_text,
)
from strop.environments.workspace import Workspace
from strop.errors import ConfigError, SandboxError
from strop.rollout import Example, FailureOwner, FinishReason, Message, Outcome, Split, ToolCall, make_example
from strop.sandbox.contract import IsolationLevel
from strop.spec.task import EnvironmentSection, UserEnvironmentSpec
from strop.tasks.failures import AttemptFailed
from strop.tasks.judging import Judge
from strop.tasks.prompt import pose_example
from strop.tasks.task import TURN, Task, TaskLimits, fit_limits, hash_version, within_bounds
from strop.tasks.tool_calls import Spoken, list_schemas, read_reply
from strop.tasks.user.own_task import OPENING_SEED, OwnTask, require_whole, to_messages
from strop.tasks.user.rewards import as_outcome, call_foreign

_MAX_BAD_REPLIES = 3
"""Consecutive replies with a malformed call that end an attempt: who has lost the form rarely recovers."""


class WorldTask(Task):
    """A class with `reset` as a task whose attempts have turns; subclasses load the class."""

    section: EnvironmentSection
    is_workspace: bool
    """Whether the class is a `Workspace`, whose attempts have sandboxes."""
    facts: Mapping[str, Any]
    """The class's tools, `has_step` and `max_turns`; see `read_facts`."""

    @abstractmethod
    def make_own(self) -> Any:
        """Make an object of the class."""

    @abstractmethod
    def to_outcome(self, score: Any, /) -> Outcome:
        """Convert the result of `score` to an outcome. Raises: TypeError or ValueError as `to_parts`."""

    def make_environment(self, judge: Judge | None = None) -> PlayedWorld:
        """Make one attempt; the class judges it, not `judge`."""
        return PlayedWorld(self)

    def forgeries(self, example: Example) -> list[list[str]]:
        """Return the attempts of a workspace that its own class says must earn nothing."""
        own = self.make_own()
        return [list(replies) for replies in own.forgeries(example)] if isinstance(own, Workspace) else []

    @cached_property
    def tools(self) -> Mapping[str, str]:
        """The schemas of its tools, by name. Raises: ConfigError if it has neither `step` nor a tool."""
        own, served = self.facts["tools"], self.served_tools
        require_apart(own, served)
        tools: Mapping[str, str] = {**own, **{name: schema for name, (_, schema) in served.items()}}
        if not tools and not self.facts["has_step"]:
            raise ConfigError(
                f"the environment {self.name} has neither step nor a tool: the policy could do nothing",
                allowed="a method step(text), or public methods with types, which are tools",
                next_step="add one",
            )
        return tools

    @cached_property
    def served_tools(self) -> Mapping[str, tuple[str, str]]:
        """Server and schema of each tool of an MCP server. Raises: ConfigError like `find_served_tools`."""
        return find_served_tools(self.section.mcp_servers, self.section.tool_limit_s)

    @cached_property
    def max_turns(self) -> int:
        """Largest number of replies. Raises: ConfigError if neither the run file nor the class has it."""
        max_turns = self.section.max_turns or self.facts["max_turns"]
        if not isinstance(max_turns, int) or max_turns < 1:
            raise ConfigError(
                f"the environment {self.name} does not say how many turns an attempt has",
                allowed="max_turns of the class, or environment.max_turns, 1 or more",
                next_step="set one of them",
            )
        return max_turns

    def pose(self, opening: Sequence[Message], example: Example) -> tuple[Message, ...]:
        """Add the run's system message, the tools and the thinking setting to an opening."""
        return pose_example(self.section, example, opening, tools=tuple(self.tools.values()))

    async def verify(self, example: Example, text: str) -> Outcome:
        """Play an attempt without a model: `text` holds the replies, with `TURN` between them.

        The last one is repeated until the attempt is over; calls are written as fenced blocks.
        Raises: as the environment does.
        """
        replies, environment = text.split(TURN), self.make_environment()
        try:
            await environment.reset(example, OPENING_SEED)
            for turn in range(environment.max_turns):
                reply = replies[min(turn, len(replies) - 1)]
                if (await environment.step(Action(text=reply, finish_reason=FinishReason.EOS))).done:
                    break
            return await environment.score()
        finally:
            await environment.close()

    @override
    def attempt_tokens(self, limits: TaskLimits) -> int:
        in_turns = self.max_turns * limits.max_reply_tokens
        return min(in_turns, self.section.max_attempt_tokens or in_turns)


class BuiltInWorld(WorldTask):
    """A built-in environment, made from its section."""

    def __init__(self, section: EnvironmentSection, kind: Any) -> None:
        self.section, self.world = section, self
        self._kind = kind
        self._specimen = own = self.make_own()
        self.name = own.name
        self.is_workspace, self.facts = isinstance(own, Workspace), read_facts(own)
        self.limits = fit_limits(own.limits, section)
        self._examples: dict[Split, Sequence[Example]] = {}

    @cached_property
    def version(self) -> str:
        """Hash over settings, limits, the class's own version, and its data if it has any."""
        own, section = self._specimen, self.section
        digest = getattr(own, "data_digest", "")
        return hash_version(self.name, own.version, "world-1", self.limits, section, digest)

    @override
    def make_own(self) -> Any:
        return self._kind(self.section)

    @override
    def examples(self, split: Split) -> Sequence[Example]:
        if split not in self._examples:
            rows = self._specimen.examples(split)
            self._examples[split] = tuple(
                row if isinstance(row, Example) else make_example(self.name, row, None) for row in rows
            )
        return self._examples[split]

    @override
    def render(self, example: Example) -> tuple[Message, ...]:
        return self.pose(to_messages(_open(self.make_own(), example)), example)

    @override
    def problem_of(self, example: Example) -> str:
        # An opening seldom states the whole problem.
        return example.example_id

    @override
    def part_of(self, example: Example) -> str | None:
        find = getattr(self._specimen, "part_of", None)
        return None if find is None else str(find(example))

    @override
    def gold_replies(self, example: Example) -> tuple[str, ...]:
        find = getattr(self._specimen, "gold_replies", lambda _: ())
        return tuple(TURN.join(replies) for replies in find(example))

    @override
    def to_outcome(self, score: Any, /) -> Outcome:
        return as_outcome(score, self.name, self.limits.max_reward)


class OwnWorld(WorldTask, OwnTask):
    """A user's environment."""

    section: UserEnvironmentSpec

    def __init__(self, spec: UserEnvironmentSpec) -> None:
        """Inspect the class without loading it. Raises: ConfigError like `OwnTask`."""
        OwnTask.__init__(self, spec)
        self.section, self.world = spec, self
        self.is_workspace = self._inspected.has_sandbox

    @override
    def problem_of(self, example: Example) -> str:
        return OwnTask.problem_of(self, example) or example.example_id

    @cached_property
    def facts(self) -> Mapping[str, Any]:  # type: ignore[override]
        """Those of an object of the class."""
        return read_facts(self._own)

    make_own = OwnTask.make_own
    to_outcome = OwnTask.to_outcome

    @override
    def open(self, example: Example) -> Any:
        """Return the opening of an example. Raises: ValueError if it varies with equal seeds."""
        first, second = (_open(self.make_own(), example) for _ in range(2))
        if first != second:
            raise ValueError(f"its reset returns for the same seed {first!r:.80}, then {second!r:.80}")
        return first

    @override
    def render(self, example: Example) -> tuple[Message, ...]:
        return self.pose(self.say(example), example)


def _open(own: Any, example: Example) -> Any:
    """Return the opening of an example by an object of its own, which then is closed."""

    async def open_and_close() -> Any:
        try:
            # `opening` has no other effect.
            return await call_foreign(getattr(own, "opening", own.reset), example, OPENING_SEED)
        finally:
            if callable(getattr(own, "close", None)):
                await finished(own.close())

    return run_here(open_and_close())


class PlayedWorld(Environment):
    """One attempt; it holds the object."""

    def __init__(self, task: WorldTask) -> None:
        self._task = task
        self._section = section = task.section
        self.max_turns = task.max_turns
        self.stop_strings = task.limits.stop_strings
        self.base_stop_strings = task.limits.base_stop_strings
        self.max_attempt_tokens = section.max_attempt_tokens
        self._own: Any = None
        self._servers: dict[str, McpServer] = {}
        self._num_turns = 0
        self._is_over = False
        """Whether the world ended the attempt."""
        self._has_replied = False
        self._num_bad_replies = 0
        """Consecutive ones up to now."""
        self._counts = dict.fromkeys(("num_tool_calls", "num_format_errors", "num_tool_errors"), 0.0)

    @override
    async def reset(self, example: Example, seed: int) -> tuple[Message, ...]:
        require_whole(self._task.name, example)
        self._own = self._make_own()
        limit_s = self._section.tool_limit_s  # A server starts with its first call.
        self._servers = {name: McpServer(name, limit_s) for name in set(self._section.mcp_servers)}
        return self._task.pose(to_messages(await finished(self._own.reset(example, seed))), example)

    @override
    async def step(self, action: Action) -> StepResult:
        assert self._own is not None
        assert not self._is_over
        assert self._num_turns < self.max_turns
        self._num_turns += 1
        self._has_replied |= bool(action.text.strip())
        spoken = self._read(action)
        num_wrong = self._counts["num_format_errors"]
        messages: list[Message] = []
        for call in spoken.calls:
            if not self._is_over:
                text = await self._call(call)
                messages.append(Message(role="tool", content=text, tool_call_id=call.call_id, name=call.name))
        messages += [Message(role="user", content=mistake) for mistake in spoken.mistakes]
        self._counts["num_format_errors"] += len(spoken.mistakes)
        is_wrong = self._counts["num_format_errors"] > num_wrong
        self._num_bad_replies = self._num_bad_replies + 1 if is_wrong else 0
        self._is_over |= self._num_bad_replies >= _MAX_BAD_REPLIES
        if not spoken.calls and not spoken.mistakes:
            messages += await self._answer(spoken.content)
        is_done = self._is_over or self._num_turns == self.max_turns
        return StepResult(messages=() if is_done else tuple(messages), done=is_done)

    @override
    async def score(self) -> Outcome:
        assert self._own is not None
        outcome = self._task.to_outcome(await finished(self._own.score()))
        metrics = dict(outcome.metrics)
        if self._task.tools and not self.is_conducted:
            metrics |= self._counts
            if outcome.format_ok is None:
                is_formed = self._has_replied and not self._counts["num_format_errors"]
                outcome = replace(outcome, format_ok=is_formed)
        if not self._is_over and self._num_turns == self.max_turns:
            metrics["out_of_turns"] = 1.0
        return within_bounds(replace(outcome, metrics=metrics), self._task.limits)

    @override
    async def close(self) -> None:
        own, servers, self._own, self._servers = self._own, self._servers, None, {}
        try:
            if callable(getattr(own, "close", None)):
                await finished(own.close())
        finally:
            for server in servers.values():
                await server.close()

    def _make_own(self) -> Any:
        own = self._task.make_own()
        if isinstance(own, Workspace):
            # Its section has sandbox settings.
            section: Any = self._section
            own.backend, own.command_limit_s = section.sandbox, section.tool_limit_s
            own.min_level = IsolationLevel[section.min_isolation.upper()]
        return own

    def _read(self, action: Action) -> Spoken:
        """Return the parts of a reply; of one that nobody has parsed, calls are fenced blocks."""
        if not self._task.tools:
            return Spoken(content=action.text)
        schemas = list_schemas(tuple(self._task.tools.values())) if action.spoken is None else {}
        return action.spoken or read_reply(action.text, "fence", schemas)

    async def _answer(self, text: str) -> Sequence[Message]:
        """Give a reply without a call to the object's `step`; without one the attempt is over."""
        if not self._task.facts["has_step"]:
            self._is_over = True
            return ()
        returned = await finished(self._own.step(text))
        if returned is None and self._num_turns == self.max_turns:
            return ()
        if isinstance(returned, Message | list | tuple | None):
            return to_messages(returned)
        return (Message(role="user", content=self._show(returned, "step")),)

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
            returned = f"error: {error}"
        except ToolError as error:
            returned = error
        except SandboxError as error:
            if not isinstance(self._own, Workspace):
                raise
            returned = self._own.explain_error(error)
        if isinstance(returned, ToolError):
            self._counts["num_tool_errors"] += 1
            returned = f"error: {returned}"
        return self._show(returned, call.name)

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
                returned = getattr(self._own, call.name)(**arguments)
                return await returned if inspect.isawaitable(returned) else returned
        except TimeoutError as error:
            if not timeout.expired():
                raise
            raise AttemptFailed(*late, f"the tool {call.name} was not done after {limit_s:g} s") from error

    def _show(self, returned: Any, name: str) -> str:
        """Return a result as text within the budget, and note whether it ends the attempt."""
        self._is_over |= isinstance(returned, Done)
        text = returned.text if isinstance(returned, Done) else to_text(returned, name)
        return cut_text(text, self._section.max_observation_chars)


async def finished(returned: Any) -> Any:
    """Return a value, awaited if it must be."""
    return await returned if inspect.isawaitable(returned) else returned
