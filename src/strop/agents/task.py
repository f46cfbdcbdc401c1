"""A task whose problems are solved by a user's program, which asks the model as often as it likes.

The command `task.agent` is started once for each attempt, with the problem as JSON on its standard input
(`{"messages", "fields"}`) and OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL in its environment; its answer
is its output.
`{prompt}` and `{folder}` in the command are replaced by the problem's text and an empty folder, which is also
TMPDIR and is removed after the attempt. The task judges the answer as it judges a reply.

A command runs on this machine as this process's user. If attempts have a workspace, it runs in the attempt's
sandbox instead, and its work is graded like that of the workspace's tools. There it runs as the user of the
model's own commands: they can kill it, and then its work is graded as it stands.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shlex
import shutil
import signal
import tempfile
from contextlib import AsyncExitStack, suppress
from urllib.parse import urlsplit

from typing_extensions import override

from strop.agents.face import Face, lease_face
from strop.environments.contract import Environment
from strop.environments.recording import Recorder
from strop.environments.single_turn import Answered
from strop.environments.workspace import Guest, Workspace
from strop.environments.worlds import PlayedWorld, WorldTask
from strop.errors import ConfigError
from strop.rollout import Example, FailureOwner, Message
from strop.sandbox.contract import ExecKind
from strop.spec.task import EnvironmentSection, TaskSection
from strop.tasks import Task
from strop.tasks.failures import AttemptFailed
from strop.tasks.judging import Judge
from strop.tasks.prompt import pose
from strop.tasks.task import TaskLimits, TaskWrapper

_MAX_ERROR_CHARS = 2000
_MODEL = "policy"
_MANY = 1 << 30
_KEPT_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "VIRTUAL_ENV", "PYTHONPATH")
"""The variables of this process that a program gets; none has a key of the run."""


class AgentTask(TaskWrapper):
    """A task whose problems a program solves."""

    def __init__(self, task: Task, spec: TaskSection) -> None:
        """Check the program. Raises: ConfigError if the task's attempts cannot run it."""
        super().__init__(task)
        self.world = self
        assert spec.agent is not None
        self.agent, self.limit_s, self.max_tokens = spec.agent, spec.agent_limit_s, spec.agent_tokens
        self.paths: tuple[str, ...] = getattr(spec, "agent_paths", ())
        self.workspaces = task if isinstance(task, WorldTask) else None
        """The world, if the program works in the sandboxes of its attempts."""
        self._check_place(spec)

    def _check_place(self, spec: TaskSection) -> None:
        """Refuse a program that the task's attempts cannot run. Raises: ConfigError."""
        world, place = self.workspaces, getattr(spec, "sandbox", "auto")
        servers = spec.mcp_servers if isinstance(spec, EnvironmentSection) else ()
        faults = {
            "its environments have their own agents": not world and self._task.world,
            f"task.agent_paths={list(self.paths)}: it works in no sandbox": not world and self.paths,
            "its attempts consist of turns and have no workspace": world and not world.is_workspace,
            "task.sandbox=ray: the model is not reached from there": world and place == "ray",
            f"task.mcp_servers={list(servers)}: a program works with its own tools": servers,
        }
        fault = next((fault for fault, is_so in faults.items() if is_so), "")
        if fault:
            raise ConfigError(
                f"task.agent={self.agent} for {self.name}: {fault}",
                allowed="a command for a task of one reply; one with its paths for an environment with a"
                " workspace in sandboxes of this machine",
                next_step="remove task.agent, or correct the setting that does not go with it",
            )

    @property
    def version(self) -> str:
        """A hash of the task's version and the command's words."""
        parts = [super().version, self.agent, self.limit_s, self.max_tokens]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]

    def make_environment(self, judge: Judge | None = None) -> AgentEnvironment | WorkspaceAttempt:
        """Make one attempt."""
        world = self.workspaces
        return AgentEnvironment(self, judge) if world is None else WorkspaceAttempt(self, world)

    def attempt_tokens(self, limits: TaskLimits) -> int:
        """Return the limit on sampled tokens of an attempt."""
        return self.max_tokens

    def render(self, example: Example) -> tuple[Message, ...]:
        """Render the example as the task does, without its tools: a program has its own."""
        return pose(super().render(example))


class Conducted(Environment):
    """An attempt that a program conducts: it takes no replies and holds no resources."""

    is_conducted = True
    max_turns = _MANY


class AgentEnvironment(Answered, Conducted):
    """One attempt of a program."""

    _task: AgentTask

    def __init__(self, task: AgentTask, judge: Judge | None) -> None:
        super().__init__(task, judge)
        self._messages: tuple[Message, ...] = ()
        self.max_attempt_tokens = task.max_tokens

    async def reset(self, example: Example, seed: int) -> tuple[Message, ...]:
        """Pose the example; the program does not use the seed."""
        self._example, self.answer = example, ""
        self._messages = self._task.render(example)
        return self._messages

    async def act(self, recorder: Recorder) -> None:
        """Run the program until it ends or its time limit passes. Raises: AttemptFailed if it fails."""
        assert self._example is not None
        problem = _to_problem(self._example, self._messages)
        folder = await asyncio.to_thread(tempfile.mkdtemp, prefix="strop-agent-")
        async with AsyncExitStack() as stack:
            stack.push_async_callback(asyncio.to_thread, shutil.rmtree, folder, ignore_errors=True)
            face = await stack.enter_async_context(lease_face())
            access = _access(*await stack.enter_async_context(face.open(recorder))) | {"TMPDIR": folder}
            words = _to_words(self._task.agent, folder, self._messages)
            answer = await _run(words, problem, access, self._task.limit_s)
        if answer is None:
            recorder.is_late = True
        else:
            self.answer = answer


class WorkspaceAttempt(PlayedWorld):
    """One attempt of a program that works in the attempt's sandbox, in place of the workspace's tools."""

    is_conducted = True

    def __init__(self, task: AgentTask, world: WorldTask) -> None:
        super().__init__(world)
        self._agent = task
        self._messages: tuple[Message, ...] = ()
        self._held = AsyncExitStack()
        self._face: Face | None = None
        self.max_turns, self.max_attempt_tokens = _MANY, task.max_tokens

    @override
    async def reset(self, example: Example, seed: int) -> tuple[Message, ...]:
        self._face = await self._held.enter_async_context(lease_face())
        self._messages = pose(await super().reset(example, seed))
        return self._messages

    @override
    def _make_own(self) -> Workspace:
        assert self._face is not None
        workspace: Workspace = super()._make_own()
        workspace.guest = Guest(endpoint=urlsplit(self._face.url).netloc, paths=self._agent.paths)
        return workspace

    async def act(self, recorder: Recorder) -> None:
        """Run the program in the sandbox until it ends or its time limit passes.

        Raises: AttemptFailed if it cannot be started there, or its exit code is not 0.
        """
        assert self._face is not None
        workspace: Workspace = self._own
        words = _to_words(self._agent.agent, workspace.folder or workspace.sandbox.scratch, self._messages)
        problem = json.dumps(_to_problem(workspace.example, self._messages)).encode()
        async with self._face.open(recorder) as opened:
            result = await workspace.run_program(
                words, stdin=problem, env=_access(*opened), wall_limit_s=self._agent.limit_s
            )
        if result is None:
            return
        recorder.is_late = result.timed_out
        output = result.stderr or result.stdout
        if result.kind is ExecKind.NOT_STARTED:
            raise _failed("agent_missing", f"{words[0]} cannot be started in the sandbox", output)
        # A program that the model's commands killed is the policy's doing; an exit code is the program's.
        if result.kind is ExecKind.EXITED and result.exit_code:
            raise _failed("agent_failed", f"{words[0]} ended with code {result.exit_code}", output)

    @override
    async def close(self) -> None:
        try:
            await super().close()
        finally:
            await self._held.aclose()


def _failed(kind: str, what: str, output: bytes) -> AttemptFailed:
    words = output.decode(errors="replace").strip()[-_MAX_ERROR_CHARS:]
    return AttemptFailed(FailureOwner.TASK, kind, f"{what}: {words}")


def _to_problem(example: Example, messages: tuple[Message, ...]) -> dict[str, object]:
    return {"messages": [message.to_json() for message in messages], "fields": dict(example.fields)}


def _to_words(command: str, folder: str, messages: tuple[Message, ...]) -> list[str]:
    prompt = "\n\n".join(message.text for message in messages)
    return [word.replace("{folder}", folder).replace("{prompt}", prompt) for word in shlex.split(command)]


def _access(base_url: str, key: str) -> dict[str, str]:
    """Return the environment variables by which a program finds the model."""
    # OPENAI_API_BASE is an older name of OPENAI_BASE_URL, which litellm reads too.
    urls = dict.fromkeys(("OPENAI_BASE_URL", "OPENAI_API_BASE"), base_url)
    return {**urls, "OPENAI_API_KEY": key, "OPENAI_MODEL": _MODEL}


async def _run(
    words: list[str], problem: dict[str, object], access: dict[str, str], limit_s: float
) -> str | None:
    """Run a program; return its answer, None if its time limit passed.

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
        )
    except OSError as error:
        raise _failed("agent_missing", f"{words[0]} cannot be started: {error.strerror}", b"") from error
    talking = asyncio.ensure_future(process.communicate(json.dumps(problem).encode()))
    try:
        done, _ = await asyncio.wait([talking], timeout=limit_s)
    finally:
        # Kill the processes that it started too.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await asyncio.gather(talking, return_exceptions=True)
    stdout, stderr = talking.result()
    if done and process.returncode:
        raise _failed("agent_failed", f"{words[0]} ended with code {process.returncode}", stderr)
    return stdout.decode(errors="replace").strip() if done else None
