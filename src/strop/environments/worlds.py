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
from collections.abc import Awaitable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from strop.environments import looking
from strop.environments.contract import Action
from strop.environments.gpus import require_gpus
from strop.environments.mcp import ServedObject, find_served_tools, require_apart
from strop.environments.objects import ObjectHere, ObjectLimits, WorldObject, read_facts, to_messages
from strop.environments.played import PlayedWorld
from strop.environments.sandboxed import SandboxedClass, SandboxedObject
from strop.environments.workspace import Place, Workspace
from strop.errors import ConfigError
from strop.rollout import Example, FinishReason, Message, Outcome, Split, make_example
from strop.spec.task import EnvironmentSection, UserEnvironmentSpec
from strop.tasks.contract import TURN, TaskLimits
from strop.tasks.judging import Judge
from strop.tasks.prompt import pose_messages
from strop.tasks.prompting import hash_prompting, with_stops, with_system
from strop.tasks.user.own_task import OwnTask
from strop.tasks.user.posing import OPENING_SEED, opening_of
from strop.tasks.user.rewards import as_outcome
from strop.tasks.version import fit_limits, hash_version


class WorldTask:
    """A class with `reset`, as a task whose attempts have turns; subclasses say how it is had."""

    name: str
    section: EnvironmentSection

    @property
    def limits(self) -> TaskLimits:
        """The class's limits within the run file's."""
        raise NotImplementedError

    is_apart = False
    """Whether its class lives in sandboxes."""

    @property
    def file(self) -> Path:
        """The file that its class is in."""
        raise NotImplementedError

    def make_own(self) -> Any:
        """Make an object of the class."""
        raise NotImplementedError

    def to_outcome(self, found: Any) -> Outcome:
        """Return what `score` said as an outcome. Raises: TypeError or ValueError as `to_parts`."""
        raise NotImplementedError

    def render(self, example: Example) -> tuple[Message, ...]:
        """Return how the class opened an example for `OPENING_SEED`."""
        raise NotImplementedError

    @property
    def world(self) -> WorldTask:
        """Itself; see `tasks.traits`."""
        return self

    def make_environment(self, judge: Judge | None = None) -> PlayedWorld:
        """Make one attempt; the class judges it by itself. Raises: CheckRefused like `require_gpus`."""
        require_gpus(self.section)
        return PlayedWorld(self)

    def make_attempt(self, gpus: tuple[str, ...]) -> WorldObject:
        """Return what one attempt is made on, whose sandboxes see GPUs, with the servers of the run file."""
        made, servers = self.make_object(gpus), self.section.mcp_servers
        owners = {name: server for name, (server, _) in self.served_tools.items()}
        return ServedObject(made, owners, servers, self.object_limits) if servers else made

    def make_object(self, gpus: tuple[str, ...] = ()) -> WorldObject:
        """Return the class's part of an attempt."""
        return ObjectHere(partial(self.make_placed, gpus), self.to_outcome, self.object_limits)

    @property
    def object_limits(self) -> ObjectLimits:
        """What one request to an object may take, and may give."""
        return ObjectLimits(
            tool_limit_s=self.section.tool_limit_s, max_observation_chars=self.section.max_observation_chars
        )

    @property
    def is_workspace(self) -> bool:
        """Whether its attempts have sandboxes to work in: its class is a `Workspace`."""
        raise NotImplementedError

    def make_placed(self, gpus: tuple[str, ...]) -> Any:
        """Make an object of the class that knows where the run file wants its sandboxes."""
        own = self.make_own()
        if isinstance(own, Workspace):
            own.place = Place.of(self.section, self.section.tool_limit_s, gpus)
        return own

    @property
    def facts(self) -> Mapping[str, Any]:
        """What the class shows of itself; see `read_facts`. Raises: ConfigError like it."""
        raise NotImplementedError

    @property
    def has_step(self) -> bool:
        """Whether it takes replies that call no tool."""
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
    def served_tools(self) -> Mapping[str, tuple[str, str]]:
        """Server and schema of each tool of an MCP server. Raises: ConfigError like `find_served_tools`."""
        return find_served_tools(self.section.mcp_servers, self.section.tool_limit_s)

    @cached_property
    def max_turns(self) -> int:
        """Replies of an attempt. Raises: ConfigError if neither the run file nor the class says."""
        own = self.facts["max_turns"]
        found = own if self.section.max_turns is None else self.section.max_turns
        if not isinstance(found, int) or found < 1:
            raise ConfigError(
                f"the environment {self.name} does not say how many turns an attempt has",
                allowed="max_turns of the class, or environment.max_turns, 1 or more",
                next_step="set one of them",
            )
        return found

    def pose(self, asked: Sequence[Message], example: Example) -> tuple[Message, ...]:
        """Return an opening with the run's system message, its tools, and whether to think."""
        posed = pose_messages(asked, self.section.thinking, tuple(self.tools.values()))
        return with_system(posed, self.section.system_prompt, example)

    def verify(self, example: Example, text: str) -> Outcome:
        """Play an attempt of which the replies are the text's: see `play`."""
        return asyncio.run(self.play(example, text))

    async def play(self, example: Example, text: str) -> Outcome:
        """Play an attempt without a model: the replies stand in the text, with `TURN` between them.

        The last is said again until the attempt is over; calls are written as fenced blocks.
        """
        environment = self.make_environment()
        try:
            return await self.converse(environment, example, text.split(TURN), [])
        finally:
            await environment.close()

    async def converse(
        self, environment: PlayedWorld, example: Example, replies: Sequence[str], told: list[str]
    ) -> Outcome:
        """Play an attempt with given replies, the last one again and again; keep what the world tells.

        Raises: as the environment does; ConfigError for another opening than an earlier process saw.
        """
        # Before, and in a thread: it may open an attempt too, and wait for room that attempts here hold.
        posed = await asyncio.to_thread(self.render, example)
        opening = await environment.reset(example, OPENING_SEED)
        first, second = ([one.to_json() for one in messages] for messages in (posed, opening))
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
            told += [message.text for message in result.messages]
            if result.done:
                break
        return await environment.score()

    def attempt_tokens(self, limits: TaskLimits) -> int:
        """Return how many tokens the policy may say in all turns together."""
        in_turns = self.max_turns * limits.max_reply_tokens
        return min(in_turns, self.section.max_attempt_tokens or in_turns)


class BuiltInWorld(WorldTask):
    """An environment of strop's own, made from its section."""

    def __init__(self, section: EnvironmentSection, kind: Any) -> None:
        self.section = section
        self._kind = kind
        self._specimen = own = self.make_own()
        self.name: str = own.name
        limits = fit_limits(own.limits, section)
        self._limits = with_stops(limits, section.stop)
        self._examples: dict[Split, Sequence[Example]] = {}

    @property
    def limits(self) -> TaskLimits:
        """The class's limits within the run file's."""
        return self._limits

    @cached_property
    def version(self) -> str:
        """Hash over settings, limits, what the class says of its version, and its data where it has some."""
        own, section = self._specimen, self.section
        limits, digest = fit_limits(own.limits, section), getattr(own, "data_digest", "")
        version = hash_version(self.name, own.version, "world-1", limits, section, digest)
        return hash_prompting(version, section) if section.prompting else version

    def make_own(self) -> Any:
        """Make an object of the class."""
        return self._kind(self.section)

    @property
    def is_workspace(self) -> bool:
        """Whether its class is a `Workspace`."""
        return isinstance(self._specimen, Workspace)

    @cached_property
    def facts(self) -> Mapping[str, Any]:
        """What the class shows of itself."""
        return read_facts(self._specimen)

    @property
    def file(self) -> Path:
        """The file that its class is in."""
        return Path(inspect.getfile(type(self._specimen)))

    def examples(self, split: Split) -> Sequence[Example]:
        """Return what the class makes for a split."""
        if split not in self._examples:
            rows = self._specimen.examples(split)
            self._examples[split] = tuple(
                row if isinstance(row, Example) else make_example(self.name, row, None) for row in rows
            )
        return self._examples[split]

    def render(self, example: Example) -> tuple[Message, ...]:
        """Return the opening of an example."""
        own = self.make_own()
        asked = opening_of(own)(example, OPENING_SEED)
        if inspect.isawaitable(asked):
            # In a thread: an event loop may be running here.
            with ThreadPoolExecutor(1) as thread:
                asked = thread.submit(asyncio.run, _open(own, asked)).result()
        return self.pose(to_messages(asked), example)

    def problem_of(self, example: Example) -> str:
        """Return the example's id: an opening seldom says all of a problem."""
        return example.example_id

    def part_of(self, example: Example) -> str | None:
        """Return the task of a suite that an example belongs to; None where there is one task."""
        find = getattr(self._specimen, "part_of", None)
        return None if find is None else str(find(example))

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        """Return attempts that deserve full marks, their replies with `TURN` between them."""
        return tuple(TURN.join(replies) for replies in self._specimen.gold_replies(example))

    def to_outcome(self, found: Any) -> Outcome:
        """Return what `score` said as an outcome."""
        return as_outcome(found, self.name, self._limits.max_reward)


class OwnWorld(WorldTask, OwnTask):
    """An environment of the user's."""

    poser = looking.__name__
    section: UserEnvironmentSpec

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

    @property
    def facts(self) -> Mapping[str, Any]:
        """What the class shows of itself, as a process of its own saw it."""
        found: Mapping[str, Any] = self._posed["facts"]
        return found

    @cached_property
    def _sandboxed(self) -> SandboxedClass:
        return SandboxedClass.read(
            self._spec.ref,
            self.section,
            self.object_limits,
            digest=self._digest,
            file=self.file,
            values=dict(self._inspected.values),
            where=self.where,
            full_marks=self.limits.max_reward,
        )

    @property
    def is_workspace(self) -> bool:
        """Whether its class is a `Workspace`."""
        return self._inspected.has_sandbox

    def make_object(self, gpus: tuple[str, ...] = ()) -> WorldObject:
        """Return what one attempt is made on: in this process, or in a sandbox."""
        return SandboxedObject(self._sandboxed, gpus) if self.is_apart else super().make_object(gpus)

    @property
    def is_apart(self) -> bool:  # type: ignore[override]
        """Whether its class lives in sandboxes."""
        return self.section.lane == "sandbox"

    @property
    def file(self) -> Path:
        """The file that its class is in."""
        return self._inspected.path

    make_own = OwnTask.make_own
    to_outcome = OwnTask.to_outcome

    def render(self, example: Example) -> tuple[Message, ...]:
        """Return how the class opened an example when it was asked for its examples."""
        return self.pose(OwnTask.render(self, example), example)


async def _open(own: Any, opening: Awaitable[Any]) -> Any:
    """Return how an object opens an attempt, of which nothing more is wanted."""
    try:
        return await opening
    finally:
        await own.close()
