"""Environments as authors write them: a plain class, one object of it for each attempt.

    class Guess:
        max_turns = 5

        def examples(self, split): ...               # tables of fields, as a task's
        def reset(self, example, seed): ...          # the opening: a text, or messages
        def step(self, text): ...                    # what the policy is told next, or `Done()`
        def score(self): ...                         # a number, true or false, None, a table of them

Its other public methods are tools: typed, with a docstring, called by the model in the form of its family.
With tools, `step` may be absent: then a reply without a call ends the attempt. Any method may be a coroutine.
The class of the user's file is loaded where rollouts run; its examples are made in a process of their own, as
those of a task.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from strop.environments.contract import Action, Done, StepResult
from strop.environments.tools import CallRefused, Tool, ToolError, call_tool, cut_text, find_tools, to_text
from strop.errors import ConfigError, DataError
from strop.rollout import Example, FinishReason, Message, Outcome, Split, ToolCall, make_example
from strop.spec.task import EnvironmentSection, UserEnvironmentSpec
from strop.tasks.contract import TURN, TaskLimits, within_bounds
from strop.tasks.judging import Judge
from strop.tasks.prompt import pose_messages
from strop.tasks.prompting import hash_prompting, with_stops, with_system
from strop.tasks.user.own_task import OwnTask, as_outcome, require_whole
from strop.tasks.user.posing import OPENING_SEED
from strop.tasks.version import fit_limits, hash_version
from strop.tool_calls import CallFormat, Spoken, read_reply


class WorldTask:
    """A class with `reset`, as a task whose attempts have turns; subclasses say how it is had."""

    name: str
    section: EnvironmentSection

    @property
    def limits(self) -> TaskLimits:
        """The class's limits within the run file's."""
        raise NotImplementedError

    def make_own(self) -> Any:
        """Make an object of the class."""
        raise NotImplementedError

    def to_outcome(self, found: Any) -> Outcome:
        """Return what `score` said as an outcome. Raises: TypeError or ValueError as `to_parts`."""
        raise NotImplementedError

    @property
    def world(self) -> World:
        """Where its examples are attempted; see `tasks.traits`."""
        return World(self)

    @cached_property
    def tools(self) -> Mapping[str, Tool]:
        """Its tools, by name. Raises: ConfigError like `find_tools`; if it has neither `step` nor a tool."""
        kind = type(self._specimen)
        tools = find_tools(kind)
        if not tools and not callable(getattr(kind, "step", None)):
            raise ConfigError(
                f"the environment {self.name} has neither step nor a tool: the policy could do nothing",
                allowed="a method step(text), or public methods with types, which are tools",
                next_step="add one",
            )
        return tools

    @cached_property
    def max_turns(self) -> int:
        """Replies of an attempt. Raises: ConfigError if neither the run file nor the class says."""
        own = getattr(self._specimen, "max_turns", None)
        found = own if self.section.max_turns is None else self.section.max_turns
        if not isinstance(found, int) or found < 1:
            raise ConfigError(
                f"the environment {self.name} does not say how many turns an attempt has",
                allowed="max_turns of the class, or environment.max_turns, 1 or more",
                next_step="set one of them",
            )
        return found

    @cached_property
    def _specimen(self) -> Any:
        """An object to look at; no attempt is made on it."""
        return self.make_own()

    def pose(self, asked: Any, example: Example) -> tuple[Message, ...]:
        """Return an opening as messages: with the run's system message, its tools, and whether to think."""
        schemas = tuple(tool.schema for tool in self.tools.values())
        posed = pose_messages(_to_messages(asked), self.section.thinking, schemas)
        return with_system(posed, self.section.system_prompt, example)

    def verify(self, example: Example, text: str) -> Outcome:
        """Play an attempt of which the replies are the text's: see `World.play`."""
        return asyncio.run(self.world.play(example, text))


class World:
    """Where the examples of one environment are attempted."""

    def __init__(self, task: WorldTask) -> None:
        self._task = task

    def make_environment(self, judge: Judge | None = None) -> PlayedWorld:
        """Make one attempt; the class judges it by itself."""
        return PlayedWorld(self._task)

    def attempt_tokens(self, limits: TaskLimits) -> int:
        """Return how many tokens the policy may say in all turns together."""
        section = self._task.section
        in_turns = self._task.max_turns * limits.max_reply_tokens
        return min(in_turns, section.max_attempt_tokens or in_turns)

    async def play(self, example: Example, text: str) -> Outcome:
        """Play an attempt without a model: the replies stand in the text, with `TURN` between them.

        The last is said again until the attempt is over; calls are written as fenced blocks.
        """
        environment = self.make_environment()
        replies = text.split(TURN)
        try:
            await environment.reset(example, OPENING_SEED)
            for turn in range(environment.max_turns):
                reply = replies[min(turn, len(replies) - 1)]
                result = await environment.step(Action(text=reply, finish_reason=FinishReason.EOS))
                if result.done:
                    break
            return await environment.score()
        finally:
            await environment.close()


class PlayedWorld:
    """One attempt, on an object of an author's class."""

    def __init__(self, task: WorldTask) -> None:
        self._task = task
        self._section = task.section
        self.max_turns = task.max_turns
        self.stop_strings = task.limits.stop_strings
        self.base_stop_strings = task.limits.base_stop_strings
        self.max_attempt_tokens = task.section.max_attempt_tokens
        self.max_attempt_s = task.section.max_attempt_s
        self._own: Any = None
        self._num_turns = 0
        self._is_over = False
        """Whether the world ended the attempt by itself."""
        self._num_bad_replies = 0
        """In a row, up to now."""
        self._counts = dict.fromkeys(("num_tool_calls", "num_format_errors", "num_tool_errors"), 0.0)

    async def reset(self, example: Example, seed: int) -> tuple[Message, ...]:
        """Make a new object, and have it open the attempt. Raises: DataError if the example is not whole."""
        require_whole(self._task.name, example)
        self._own = self._task.make_own()
        self._num_turns, self._is_over = 0, False
        return self._task.pose(await _finished(self._own.reset(example, seed)), example)

    async def step(self, action: Action) -> StepResult:
        """Give the reply to the object, or to the tools that it calls."""
        if self._own is None or self._is_over or self._num_turns == self.max_turns:
            raise DataError(f"{self._task.name}: step before reset, or after the attempt's end")
        self._num_turns += 1
        if self._task.tools:
            messages = await self._act(action)
        else:
            messages = await self._say(action.text)
        is_done = self._is_over or self._num_turns == self.max_turns
        return StepResult(messages=() if is_done else messages, done=is_done)

    async def score(self) -> Outcome:
        """Have the object score the attempt. Raises: DataError before `reset`."""
        if self._own is None:
            raise DataError(f"{self._task.name}: score before reset")
        outcome = self._task.to_outcome(await _finished(self._own.score()))
        metrics = dict(outcome.metrics)
        if self._task.tools:
            metrics |= self._counts
            if outcome.format_ok is None:
                outcome = replace(outcome, format_ok=not self._counts["num_format_errors"])
        if not self._is_over and self._num_turns == self.max_turns:
            metrics["out_of_turns"] = 1.0
        return within_bounds(replace(outcome, metrics=metrics), self._task.limits)

    async def close(self) -> None:
        """Close the object, where it has `close`."""
        own, self._own = self._own, None
        if own is not None and callable(getattr(own, "close", None)):
            await _finished(own.close())

    async def _say(self, text: str) -> tuple[Message, ...]:
        returned = await _finished(self._own.step(text))
        self._is_over = isinstance(returned, Done)
        if isinstance(returned, Message | list | tuple):
            return _to_messages(returned)
        shown = returned.text if isinstance(returned, Done) else to_text(returned, "step")
        return (Message(role="user", content=cut_text(shown, self._section.max_observation_chars)),)

    async def _act(self, action: Action) -> tuple[Message, ...]:
        """Make the calls of a reply, and tell of those that were written wrongly."""
        spoken = action.spoken or self._read(action.text)
        messages, num_wrong = [], len(spoken.mistakes)
        for call in spoken.calls:
            if not self._is_over:
                text, is_wrong = await self._call(call)
                num_wrong += is_wrong
                messages.append(Message(role="tool", content=text, tool_call_id=call.call_id, name=call.name))
        messages += [Message(role="user", content=mistake) for mistake in spoken.mistakes]
        self._counts["num_format_errors"] += num_wrong
        self._num_bad_replies = self._num_bad_replies + 1 if num_wrong else 0
        if self._num_bad_replies >= self._section.max_format_errors:
            self._is_over = True
        if spoken.calls or spoken.mistakes or self._is_over:
            return tuple(messages)
        if not callable(getattr(self._own, "step", None)):
            self._is_over = True
            return ()
        return await self._say(spoken.content)

    async def _call(self, call: ToolCall) -> tuple[str, bool]:
        """Make one call; return what the model is told, and whether the call was written wrongly."""
        self._counts["num_tool_calls"] += 1
        section = self._section
        max_chars = section.max_observation_chars
        try:
            text, self._is_over = await call_tool(
                self._own, self._task.tools, call, limit_s=section.tool_limit_s, max_chars=max_chars
            )
        except CallRefused as error:
            return cut_text(f"error: {error}", max_chars), True
        except ToolError as error:
            self._counts["num_tool_errors"] += 1
            return cut_text(f"error: {error}", max_chars), False
        return text, False

    def _read(self, text: str) -> Spoken:
        schemas = {name: tool.parameters for name, tool in self._task.tools.items()}
        return read_reply(text, CallFormat.FENCE, schemas)


class BuiltInWorld(WorldTask):
    """An environment of strop's own, made from its section."""

    def __init__(self, section: EnvironmentSection, kind: Any) -> None:
        self.section = section
        self._kind = kind
        own = self._specimen
        self.name: str = own.name
        limits = fit_limits(own.limits, section)
        self._limits = with_stops(limits, section.stop)
        version = hash_version(self.name, own.version, "world-1", limits, section)
        self.version = hash_prompting(version, section) if section.prompting else version
        self._examples: dict[Split, Sequence[Example]] = {}

    @property
    def limits(self) -> TaskLimits:
        """The class's limits within the run file's."""
        return self._limits

    def make_own(self) -> Any:
        """Make an object of the class."""
        return self._kind(self.section)

    def examples(self, split: Split) -> Sequence[Example]:
        """Return what the class makes for a split."""
        if split not in self._examples:
            rows = self._specimen.examples(split)
            self._examples[split] = tuple(make_example(self.name, row, None) for row in rows)
        return self._examples[split]

    def render(self, example: Example) -> tuple[Message, ...]:
        """Return the opening of an example."""
        return self.pose(self.make_own().reset(example, OPENING_SEED), example)

    def problem_of(self, example: Example) -> str:
        """Return the example's id: an opening seldom says all of a problem."""
        return example.example_id

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        """Return attempts that deserve full marks, their replies with `TURN` between them."""
        return tuple(TURN.join(replies) for replies in self._specimen.gold_replies(example))

    def to_outcome(self, found: Any) -> Outcome:
        """Return what `score` said as an outcome."""
        return as_outcome(found, self.name, self._limits.max_reward)


class OwnWorld(WorldTask, OwnTask):
    """An environment of the user's."""

    def __init__(self, spec: UserEnvironmentSpec) -> None:
        """Inspect the class; it is not loaded. Raises: ConfigError like `OwnTask`."""
        OwnTask.__init__(self, spec)
        self.section = spec

    @cached_property
    def limits(self) -> TaskLimits:
        """The class's limits within the run file's."""
        return with_stops(self.own_limits(), self.section.stop)

    @cached_property
    def version(self) -> str:
        """As `OwnTask.version`, and over what the run says of how a model is asked."""
        version = self.own_version()
        return hash_prompting(version, self.section) if self.section.prompting else version

    def problem_of(self, example: Example) -> str:
        """Return the class's name for the problem, or the example's id: an opening seldom says all of it."""
        return OwnTask.problem_of(self, example) or example.example_id

    make_own = OwnTask.make_own
    to_outcome = OwnTask.to_outcome

    def render(self, example: Example) -> tuple[Message, ...]:
        """Return how the class opened an example when it was asked for its examples."""
        return self.pose(OwnTask.render(self, example), example)


async def _finished(returned: Any) -> Any:
    return await returned if inspect.isawaitable(returned) else returned


def _to_messages(asked: Any) -> tuple[Message, ...]:
    """Return an author's words as messages. Raises: DataError for another form."""
    parts = [asked] if isinstance(asked, str | Message) else [*(asked or ())]
    found = [
        Message(role="user", content=one)
        if isinstance(one, str)
        else one
        if isinstance(one, Message)
        else Message.from_json(one)
        for one in parts
    ]
    if not found:
        raise DataError(
            f"an environment says {asked!r:.80}",
            allowed="a text, or messages with role and content",
            next_step="correct its reset or step",
        )
    return tuple(found)
