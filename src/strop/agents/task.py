"""A task whose problems are solved by a program of the user's, which asks the model as often as it likes.

A command is started once for each attempt, with the problem as JSON on its standard input (`{"messages",
"fields"}`) and OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL in its environment; its answer is what it
prints. `{prompt}` and `{folder}` in it are the problem's text and an empty folder of the attempt's own, which
is TMPDIR too and ends with it. A function, `FILE.py:NAME`, is called in a process of its own with those of
`prompt`, `messages`, `folder`, `base_url`, `api_key`, `model` and the example's fields that it names; its
answer is what it returns. The task judges the answer as it judges a reply.

A command's process runs here, as this process's user. Where attempts have a workspace, it works there, in
the attempt's sandbox, and its work is graded as that of the workspace's tools is. It runs there as what the
model's own commands run as: they can end it, and then its work is graded as it stands.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from urllib.parse import urlsplit

from strop.agents import calling
from strop.agents.face import Face, lease_face
from strop.environments.contract import Action, StepResult
from strop.environments.gpus import NO_GPUS, lease_gpus, require_gpus
from strop.environments.objects import to_messages
from strop.environments.recording import Recorder
from strop.environments.workspace import Guest, Workspace
from strop.environments.worlds import WorldTask
from strop.errors import ConfigError, DataError
from strop.rollout import Example, FailureOwner, Message, Outcome
from strop.sandbox.contract import ExecKind
from strop.spec.sandboxing import SandboxSettings
from strop.spec.task import EnvironmentSection, TaskSection
from strop.tasks import Task
from strop.tasks.contract import TaskLimits, within_bounds
from strop.tasks.failures import AttemptFailed
from strop.tasks.judging import InlineJudge, Judge
from strop.tasks.prompt import without_tools
from strop.tasks.traits import TaskWrapper, limits_of, world_of
from strop.user_code import CodeRef, hash_sources, inspect_function, is_code

_MAX_ANSWER_BYTES = 16 << 20
_MAX_TOLD_CHARS = 2000
_MODEL = "policy"
_KEPT_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "VIRTUAL_ENV", "PYTHONPATH")
"""What a program finds of this process's environment: no keys of the run's."""


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
        self._require_place(spec)
        self.limit_s = spec.agent_limit_s
        self.max_tokens = spec.agent_tokens
        digest = self.agent
        if is_code(self.agent):
            ref = CodeRef.parse(self.agent)
            inspect_function(ref)
            digest = f"{ref.name} {hash_sources(ref.path)}"
        self._digest = digest

    def _require_place(self, spec: TaskSection) -> None:
        """Refuse a program that could not conduct the attempts. Raises: ConfigError."""
        world, given = self.workspaces, f"task.agent={self.agent}"
        if world is None:
            if self.paths:
                raise ConfigError(
                    f"task.agent_paths={list(self.paths)}: a program that answers a task works in no sandbox",
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
        if is_code(self.agent) or place == "remote" or spec.mcp_servers:
            raise ConfigError(
                f"{given} with task.sandbox={place}, task.mcp_servers={list(spec.mcp_servers)}: the program"
                " works in the attempts' sandboxes",
                allowed="a command, with its own tools, in sandboxes of this machine: a function cannot be"
                " called there, and from another machine's the model is not reached",
                next_step="name a command, remove task.mcp_servers, or set another task.sandbox",
            )

    @property
    def version(self) -> str:
        """The task's, with what the program is: a command's words, a function's sources."""
        parts = [super().version, self._digest, self.limit_s, self.max_tokens]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]

    @property
    def world(self) -> AgentTask:
        """Itself; see `tasks.traits`."""
        return self

    def make_environment(self, judge: Judge | None = None) -> AgentEnvironment | WorkspaceAttempt:
        """Make one attempt. Raises: CheckRefused like `require_gpus`."""
        if self.workspaces is None:
            return AgentEnvironment(self, judge)
        require_gpus(self.workspaces.section)
        return WorkspaceAttempt(self, self.workspaces)

    def attempt_tokens(self, limits: TaskLimits) -> int:
        """Return how many tokens the program may have sampled."""
        return self.max_tokens

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


class Conducted:
    """An attempt that a program conducts: it takes no replies, and holds nothing."""

    max_turns = 1 << 30
    stop_strings = ()
    max_attempt_s = None

    async def step(self, action: Action) -> StepResult:
        """Refuse replies. Raises: DataError."""
        raise DataError("step of an attempt that a program conducts")

    async def close(self) -> None:
        """Do nothing."""


class AgentEnvironment(Conducted):
    """One attempt of a program."""

    def __init__(self, task: AgentTask, judge: Judge | None) -> None:
        self._task = task
        self._judge = judge
        self._example: Example | None = None
        self._messages: tuple[Message, ...] = ()
        self._answer = ""
        self.max_attempt_tokens = task.max_tokens

    async def reset(self, example: Example, seed: int) -> tuple[Message, ...]:
        """Pose the example; the program draws from no seed of the run's."""
        self._example, self._answer = example, ""
        self._messages = self._task.render(example)
        return self._messages

    async def act(self, recorder: Recorder) -> None:
        """Run the program until it ends, or its time does.

        Raises: AttemptFailed if it fails.
        """
        assert self._example is not None
        problem = _to_problem(self._example, self._messages)
        async with AsyncExitStack() as stack:
            face = await stack.enter_async_context(lease_face())
            access = await stack.enter_async_context(_open(face, recorder))
            folder = await stack.enter_async_context(_own_folder())
            access["TMPDIR"] = folder
            if is_code(self._task.agent):
                ref = CodeRef.parse(self._task.agent)
                words = [sys.executable, "-m", calling.__name__]
                problem |= {"place": ref.place, "name": ref.name, "prompt": _to_prompt(self._messages)}
            else:
                words = _to_words(self._task.agent, folder, self._messages)
            answer = await _run(words, problem, access, self._task.limit_s)
        if answer is None:
            recorder.is_late = True
        else:
            self._answer = answer

    async def score(self) -> Outcome:
        """Have the answer judged."""
        if self._example is None:
            raise DataError(f"{self._task.name}: score before reset")
        judge = self._judge or InlineJudge(self._task)
        outcome = await judge.judge(self._example, self._answer)
        return within_bounds(outcome, limits_of(self._task, self._example))


class WorkspaceAttempt(Conducted):
    """One attempt of a program that works in the attempt's sandbox, in place of the workspace's tools."""

    def __init__(self, task: AgentTask, world: WorldTask) -> None:
        self._task = task
        self._world = world
        self._messages: tuple[Message, ...] = ()
        self._own: Workspace | None = None
        self._held = AsyncExitStack()
        self._face: Face | None = None
        self._lease = NO_GPUS
        self.max_attempt_tokens = task.max_tokens

    async def reset(self, example: Example, seed: int) -> tuple[Message, ...]:
        """Make the sandbox, with a way to the model, and pose the example.

        Raises: as `lease_gpus` and the workspace do.
        """
        await self.close()
        self._face = await self._held.enter_async_context(lease_face())
        self._lease = self._held.enter_context(await lease_gpus(self._world.section))
        own: Workspace = self._world.make_placed(self._lease.names)
        guest = Guest(endpoint=urlsplit(self._face.url).netloc, paths=self._task.paths)
        own.place = replace(own.place, guest=guest)
        self._held.push_async_callback(own.close)
        self._own = own
        asked = to_messages(await own.reset(example, seed))
        self._messages = without_tools(self._world.pose(asked, example))
        return self._messages

    async def act(self, recorder: Recorder) -> None:
        """Run the program in the sandbox until it ends, or its time does.

        Raises: AttemptFailed if it cannot be started there, or says by its exit code that it failed.
        """
        assert self._own is not None
        assert self._face is not None
        own = self._own
        words = _to_words(self._task.agent, own.folder or own.sandbox.scratch, self._messages)
        problem = json.dumps(_to_problem(own.example, self._messages)).encode()
        async with _open(self._face, recorder) as access:
            result = await own.run_program(words, stdin=problem, env=access, wall_limit_s=self._task.limit_s)
        if result is None:
            return
        recorder.is_late = result.timed_out
        # What the model's commands do to the program is the policy's doing; what it says of itself is not.
        told = (result.stderr or result.stdout).decode(errors="replace").strip()[-_MAX_TOLD_CHARS:]
        if result.kind is ExecKind.NOT_STARTED:
            detail = f"{words[0]} cannot be started in the sandbox: {told}"
            raise AttemptFailed(FailureOwner.TASK, "agent_missing", detail)
        if result.kind is ExecKind.EXITED and result.exit_code:
            detail = f"{words[0]} ended with code {result.exit_code}: {told}"
            raise AttemptFailed(FailureOwner.TASK, "agent_failed", detail)

    async def score(self) -> Outcome:
        """Have the work graded. Raises: DataError before `reset`."""
        if self._own is None:
            raise DataError(f"{self._task.name}: score before reset")
        outcome = self._world.to_outcome(await self._own.score())
        outcome = replace(outcome, metrics={**outcome.metrics, **self._lease.metrics})
        return within_bounds(outcome, self._world.limits)

    async def close(self) -> None:
        """Stop the sandbox."""
        self._own = None
        await self._held.aclose()


def _to_problem(example: Example, messages: tuple[Message, ...]) -> dict[str, object]:
    return {"messages": [one.to_json() for one in messages], "fields": dict(example.fields)}


def _to_prompt(messages: tuple[Message, ...]) -> str:
    return "\n\n".join(one.text for one in messages)


def _to_words(command: str, folder: str, messages: tuple[Message, ...]) -> list[str]:
    prompt = _to_prompt(messages)
    return [word.replace("{folder}", folder).replace("{prompt}", prompt) for word in shlex.split(command)]


@asynccontextmanager
async def _open(face: Face, recorder: Recorder) -> AsyncIterator[dict[str, str]]:
    """Let a program ask; yield the variables that tell it how."""
    async with face.open(recorder) as (base_url, key):
        # The last is an older name of the first, which litellm reads too.
        yield {
            "OPENAI_BASE_URL": base_url,
            "OPENAI_API_KEY": key,
            "OPENAI_MODEL": _MODEL,
            "OPENAI_API_BASE": base_url,
        }


@asynccontextmanager
async def _own_folder() -> AsyncIterator[str]:
    """Make an empty folder, and remove it with whatever is in it."""
    folder = await asyncio.to_thread(tempfile.mkdtemp, prefix="strop-agent-")
    try:
        yield folder
    finally:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


async def _run(
    words: list[str], problem: dict[str, object], access: dict[str, str], limit_s: float
) -> str | None:
    """Run a program; return its answer, None where its time was up.

    Raises: AttemptFailed if it cannot be started, or fails.
    """
    environ = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ} | access
    try:
        process = await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environ,
            start_new_session=True,
            limit=_MAX_ANSWER_BYTES,
        )
    except OSError as error:
        detail = f"{words[0]} cannot be started: {error.strerror}"
        raise AttemptFailed(FailureOwner.TASK, "agent_missing", detail) from error
    talking = asyncio.ensure_future(process.communicate(json.dumps(problem).encode()))
    try:
        done, _ = await asyncio.wait([talking], timeout=limit_s)
    finally:
        # What it started goes with it.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await asyncio.gather(talking, return_exceptions=True)
    if not done:
        return None
    stdout, stderr = talking.result()
    if process.returncode:
        told = stderr.decode(errors="replace").strip()[-_MAX_TOLD_CHARS:]
        detail = f"{words[0]} ended with code {process.returncode}: {told}"
        raise AttemptFailed(FailureOwner.TASK, "agent_failed", detail)
    return stdout.decode(errors="replace").strip()


def _paths_of(spec: TaskSection | SandboxSettings) -> tuple[str, ...]:
    return spec.agent_paths if isinstance(spec, SandboxSettings) else ()
