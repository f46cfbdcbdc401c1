"""A task whose problems are solved by a program of the user's, which asks the model as often as it likes.

A command is started once for each attempt, with the problem as JSON on its standard input (`{"messages",
"fields"}`) and OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL in its environment; its answer is what it
prints. `{prompt}` and `{folder}` in it are the problem's text and an empty folder of the attempt's own, which
is TMPDIR too and ends with it. A function, `FILE.py:NAME`, is called in a process of its own with those of
`prompt`, `messages`, `folder`, `base_url`, `api_key`, `model` and the example's fields that it names; its
answer is what it returns. The task judges the answer as it judges a reply.

Where attempts have a workspace, a command works there, in the attempt's sandbox, and its work is graded as
that of the workspace's tools is: see `attempts.WorkspaceAttempt`.
"""

from __future__ import annotations

import hashlib
import json

from strop.agents.attempts import AgentEnvironment, WorkspaceAttempt
from strop.environments.gpus import require_gpus
from strop.environments.worlds import WorldTask
from strop.errors import ConfigError
from strop.rollout import Example, Message, Outcome
from strop.spec.sandboxing import SandboxSettings
from strop.spec.task import EnvironmentSection, TaskSection
from strop.tasks import Task
from strop.tasks.contract import TaskLimits
from strop.tasks.judging import Judge
from strop.tasks.prompt import without_tools
from strop.tasks.traits import TaskWrapper, world_of
from strop.user_code import CodeRef, hash_sources, inspect_function, is_code


class AgentTask(TaskWrapper):
    """A task, and the program that solves its problems."""

    def __init__(self, task: Task, spec: TaskSection) -> None:
        """Look at the program: a function is imported in a process apart.

        Raises: ConfigError if the file has no such function, or the task's attempts have no place for it.
        """
        super().__init__(task)
        assert spec.agent is not None
        self.agent = spec.agent
        self.paths = _paths_of(spec)
        self.workspaces = task if isinstance(task, WorldTask) else None
        """Where the program works in a sandbox."""
        _refuse_misplaced(self.workspaces, spec)
        self.limit_s = spec.agent_limit_s
        self.max_tokens = spec.agent_tokens
        digest = self.agent
        if is_code(self.agent):
            ref = CodeRef.parse(self.agent)
            inspect_function(ref)
            digest = f"{ref.name} {hash_sources(ref.path)}"
        self._digest = digest

    @property
    def version(self) -> str:
        """The task's, with what the program is: a command's words, a function's sources."""
        parts = [super().version, self._digest, self.limit_s, self.max_tokens]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]

    @property
    def world(self) -> AgentWorld:
        """Where the program acts."""
        return AgentWorld(self)

    def render(self, example: Example) -> tuple[Message, ...]:
        """Pose the example as the task does; a program brings its own tools."""
        return without_tools(super().render(example))

    async def play(self, example: Example, text: str) -> Outcome:
        """Judge a text as the program's answer; in a workspace, as replies to its tools."""
        world = world_of(self._task)
        found: Outcome = (
            self._task.verify(example, text) if world is None else await world.play(example, text)
        )
        return found


class AgentWorld:
    """Makes attempts of a program; see `tasks.traits`."""

    def __init__(self, task: AgentTask) -> None:
        self._task = task

    def make_environment(self, judge: Judge | None = None) -> AgentEnvironment | WorkspaceAttempt:
        """Make one attempt. Raises: CheckRefused like `require_gpus`."""
        task = self._task
        if task.workspaces is not None:
            require_gpus(task.workspaces.section)
            return WorkspaceAttempt(task, task.workspaces)
        return AgentEnvironment(task, judge)

    def attempt_tokens(self, limits: TaskLimits) -> int:
        """Return how many tokens the program may have sampled."""
        return self._task.max_tokens

    async def play(self, example: Example, text: str) -> Outcome:
        """Judge a text as the program's answer, without the program."""
        return await self._task.play(example, text)


def _paths_of(spec: TaskSection | SandboxSettings) -> tuple[str, ...]:
    return spec.agent_paths if isinstance(spec, SandboxSettings) else ()


def _refuse_misplaced(world: WorldTask | None, spec: TaskSection) -> None:
    """Refuse a program that could not conduct the attempts. Raises: ConfigError."""
    given = f"task.agent={spec.agent}"
    if world is None:
        if paths := _paths_of(spec):
            raise ConfigError(
                f"task.agent_paths={list(paths)}: a program that answers a task works in no sandbox",
                allowed="paths for a program that works in an environment's workspace",
                next_step="remove task.agent_paths",
            )
        return
    if not world.is_workspace:
        raise ConfigError(
            f"{given}: the attempts of {world.name} are turns, and no workspace",
            allowed="a program for a task of one reply, or for an environment with a workspace",
            next_step="remove task.agent",
        )
    assert isinstance(spec, EnvironmentSection)
    place = getattr(spec, "sandbox", "auto")
    if is_code(str(spec.agent)) or place == "remote" or spec.mcp_servers:
        raise ConfigError(
            f"{given} with task.sandbox={place}, task.mcp_servers={list(spec.mcp_servers)}: the program works"
            " in the attempts' sandboxes",
            allowed="a command, with its own tools, in sandboxes of this machine: a function cannot be called"
            " there, and from another machine's the model is not reached",
            next_step="name a command, remove task.mcp_servers, or set another task.sandbox",
        )
