"""Environments as authors write them: a plain class, one object of it for each attempt.

    class Guess:
        max_turns = 5

        def examples(self, split): ...               # tables of fields, as a task's
        def reset(self, example, seed): ...          # the opening: a text, or messages
        def step(self, text): ...                    # the next message to the policy, or `Done()`
        def score(self): ...                         # a number, true or false, None, a table of them

Its other public methods are tools: typed, with a docstring, called by the model in its family's syntax.
With tools, `step` may be absent: then a reply without a call ends the attempt. Any method may be a coroutine.
The class of a user's file is loaded in the rollout process; its examples are made in a separate process, like
a task's.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from abc import abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

from strop.environments import looking
from strop.environments.contract import Action
from strop.environments.looking import read_facts
from strop.environments.mcp import find_served_tools, require_apart
from strop.environments.played import PlayedWorld, to_messages
from strop.environments.workspace import Place, Workspace
from strop.errors import ConfigError
from strop.rollout import Example, FinishReason, Message, Outcome, Split, make_example
from strop.spec.task import EnvironmentSection, UserEnvironmentSpec
from strop.tasks.judging import Judge
from strop.tasks.prompt import pose_messages, with_system
from strop.tasks.task import TURN, Task, TaskLimits
from strop.tasks.user.own_task import OwnTask
from strop.tasks.user.posing import OPENING_SEED, opening_of
from strop.tasks.user.rewards import as_outcome
from strop.tasks.version import fit_limits, hash_version


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

    @property
    def world(self) -> WorldTask:
        """Itself."""
        return self

    def make_environment(self, judge: Judge | None = None) -> PlayedWorld:
        """Make one attempt; the class judges it, not `judge`."""
        return PlayedWorld(self)

    def make_placed(self) -> Any:
        """Make an object of the class with the run file's sandbox settings."""
        own = self.make_own()
        if isinstance(own, Workspace):
            own.place = Place.of(self.section, self.section.tool_limit_s)
        return own

    def forgeries(self, example: Example) -> list[list[str]]:
        """Return the attempts of a workspace that its own class says must earn nothing."""
        own = self.make_own()
        return [list(replies) for replies in own.forgeries(example)] if isinstance(own, Workspace) else []

    @property
    def has_step(self) -> bool:
        """Whether it accepts replies without a tool call."""
        return bool(self.facts["has_step"])

    @cached_property
    def tools(self) -> Mapping[str, str]:
        """The schemas of its tools, by name. Raises: ConfigError if it has neither `step` nor a tool."""
        own, served = self.facts["tools"], self.served_tools
        require_apart(own, served)
        tools: Mapping[str, str] = {**own, **{name: schema for name, (_, schema) in served.items()}}
        if not tools and not self.has_step:
            raise ConfigError(
                f"the environment {self.name} has neither step nor a tool: the policy could do nothing",
                allowed="a method step(text), or public methods with types, which are tools",
                next_step="add one",
            )
        return tools

    @cached_property
    def parameters(self) -> Mapping[str, Any]:
        """The JSON Schema of each tool's arguments, by the tool's name."""
        return {name: json.loads(tool)["function"]["parameters"] for name, tool in self.tools.items()}

    @cached_property
    def served_tools(self) -> Mapping[str, tuple[str, str]]:
        """Server and schema of each tool of an MCP server. Raises: ConfigError like `find_served_tools`."""
        return find_served_tools(self.section.mcp_servers, self.section.tool_limit_s)

    @cached_property
    def max_turns(self) -> int:
        """Largest number of replies. Raises: ConfigError if neither the run file nor the class has it."""
        own = self.facts["max_turns"]
        max_turns = own if self.section.max_turns is None else self.section.max_turns
        if not isinstance(max_turns, int) or max_turns < 1:
            raise ConfigError(
                f"the environment {self.name} does not say how many turns an attempt has",
                allowed="max_turns of the class, or environment.max_turns, 1 or more",
                next_step="set one of them",
            )
        return max_turns

    def pose(self, opening: Sequence[Message], example: Example) -> tuple[Message, ...]:
        """Add the run's system message, the tools and the thinking setting to an opening."""
        posed = pose_messages(opening, self.section.thinking, tuple(self.tools.values()))
        return with_system(posed, self.section.system_prompt, example)

    async def verify(self, example: Example, text: str) -> Outcome:
        """Play an attempt without a model: `text` holds the replies, with `TURN` between them.

        The last one is repeated until the attempt is over; calls are written as fenced blocks.
        Raises: as the environment does; ConfigError if an earlier process saw another opening.
        """
        replies, environment = text.split(TURN), self.make_environment()
        try:
            # Before `reset`, and in a thread: it may open an attempt too, and wait for others' slots.
            posed = await asyncio.to_thread(self.render, example)
            opening = await environment.reset(example, OPENING_SEED)
            first, second = ([message.to_json() for message in messages] for messages in (posed, opening))
            if first != second:
                raise ConfigError(
                    f"{self.name} opens {dict(example.fields)!r:.80} for the same seed with {first!r:.200},"
                    f" and in another process with {second!r:.200}",
                    allowed="a reset that draws from its seed alone",
                    next_step="sort what comes from a set, and ask neither the clock nor the machine",
                )
            for turn in range(environment.max_turns):
                reply = replies[min(turn, len(replies) - 1)]
                result = await environment.step(Action(text=reply, finish_reason=FinishReason.EOS))
                if result.done:
                    break
            return await environment.score()
        finally:
            await environment.close()

    def attempt_tokens(self, limits: TaskLimits) -> int:
        """Return the token limit of all turns together."""
        in_turns = self.max_turns * limits.max_reply_tokens
        return min(in_turns, self.section.max_attempt_tokens or in_turns)


class BuiltInWorld(WorldTask):
    """A built-in environment, made from its section."""

    def __init__(self, section: EnvironmentSection, kind: Any) -> None:
        self.section = section
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

    def make_own(self) -> Any:
        """Make an object of the class."""
        return self._kind(self.section)

    def examples(self, split: Split) -> Sequence[Example]:
        """Return the class's examples of a split."""
        if split not in self._examples:
            rows = self._specimen.examples(split)
            self._examples[split] = tuple(
                row if isinstance(row, Example) else make_example(self.name, row, None) for row in rows
            )
        return self._examples[split]

    def render(self, example: Example) -> tuple[Message, ...]:
        """Return the opening of an example."""
        own = self.make_own()
        opening = opening_of(own)(example, OPENING_SEED)
        if inspect.isawaitable(opening):

            async def open_and_close(opening: Awaitable[Any]) -> Any:
                try:
                    return await opening
                finally:
                    await own.close()

            # In a thread: an event loop may be running here.
            with ThreadPoolExecutor(1) as thread:
                opening = thread.submit(asyncio.run, open_and_close(opening)).result()
        return self.pose(to_messages(opening), example)

    def problem_of(self, example: Example) -> str:
        """Return the example's id: an opening seldom states the whole problem."""
        return example.example_id

    def part_of(self, example: Example) -> str | None:
        """Return the task of a suite that an example belongs to; None without a suite."""
        find = getattr(self._specimen, "part_of", None)
        return None if find is None else str(find(example))

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        """Return attempts that earn full marks, their replies joined with `TURN`."""
        find = getattr(self._specimen, "gold_replies", lambda _: ())
        return tuple(TURN.join(replies) for replies in find(example))

    def to_outcome(self, score: Any, /) -> Outcome:
        """Convert the result of `score` to an outcome."""
        return as_outcome(score, self.name, self.limits.max_reward)


class OwnWorld(WorldTask, OwnTask):
    """A user's environment."""

    poser = looking.__name__
    section: UserEnvironmentSpec

    def __init__(self, spec: UserEnvironmentSpec) -> None:
        """Inspect the class without loading it. Raises: ConfigError like `OwnTask`."""
        OwnTask.__init__(self, spec)
        self.section, self.is_workspace = spec, self._inspected.has_sandbox

    def problem_of(self, example: Example) -> str:
        """Return the class's name of the problem, or the example's id."""
        return OwnTask.problem_of(self, example) or example.example_id

    @cached_property
    def facts(self) -> Mapping[str, Any]:  # type: ignore[override]
        """Those that another process has read (`looking`)."""
        facts: Mapping[str, Any] = self._posed["facts"]
        return facts

    make_own = OwnTask.make_own
    to_outcome = OwnTask.to_outcome

    def render(self, example: Example) -> tuple[Message, ...]:
        """Return the opening that the class made together with its examples."""
        return self.pose(OwnTask.render(self, example), example)
