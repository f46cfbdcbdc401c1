"""Attempts that a program conducts: it asks the model over `Face`, and what it made is judged.

`AgentEnvironment` judges what a program says, which runs as this process's user. `WorkspaceAttempt` grades
what a program did in the attempt's sandbox. There it runs as what the model's own commands run as: they can
end it, and then its work is graded as it stands.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from strop.agents import calling
from strop.agents.face import Face
from strop.environments.contract import Action, StepResult
from strop.environments.gpus import NO_GPUS, lease_gpus
from strop.environments.objects import to_messages
from strop.environments.recording import Recorder
from strop.environments.workspace import Guest, Workspace
from strop.environments.worlds import WorldTask
from strop.errors import DataError
from strop.rollout import Example, FailureOwner, Message, Outcome
from strop.sandbox.contract import ExecKind, ExecResult
from strop.tasks.contract import within_bounds
from strop.tasks.failures import AttemptFailed
from strop.tasks.judging import InlineJudge, Judge
from strop.tasks.prompt import without_tools
from strop.tasks.traits import limits_of
from strop.user_code import CodeRef, is_code

if TYPE_CHECKING:
    from strop.agents.task import AgentTask

_MAX_ANSWER_BYTES = 16 << 20
_MAX_TOLD_CHARS = 2000
_MODEL = "policy"
_KEPT_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "VIRTUAL_ENV", "PYTHONPATH")
"""What a program finds of this process's environment: no keys of the run's."""


class AgentEnvironment:
    """One attempt of a program."""

    max_turns = 1 << 30
    stop_strings = ()
    max_attempt_s = None

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

    async def step(self, action: Action) -> StepResult:
        """Never called: the program conducts the attempt."""
        raise DataError(f"{self._task.name}: step of an attempt that a program conducts")

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

    async def close(self) -> None:
        """Hold nothing."""


class WorkspaceAttempt:
    """One attempt of a program that works in the attempt's sandbox, in place of the workspace's tools."""

    max_turns = 1 << 30
    stop_strings = ()
    max_attempt_s = None

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

    async def step(self, action: Action) -> StepResult:
        """Never called: the program conducts the attempt."""
        raise DataError(f"{self._task.name}: step of an attempt that a program conducts")

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
        if result is not None:
            recorder.is_late = result.timed_out
            _require_started(words[0], result)

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


def _require_started(program: str, result: ExecResult) -> None:
    """Refuse what a program says of itself; what the model's commands do to it is the policy's doing.

    Raises: AttemptFailed.
    """
    told = (result.stderr or result.stdout).decode(errors="replace").strip()[-_MAX_TOLD_CHARS:]
    if result.kind is ExecKind.NOT_STARTED:
        detail = f"{program} cannot be started in the sandbox: {told}"
        raise AttemptFailed(FailureOwner.TASK, "agent_missing", detail)
    if result.kind is ExecKind.EXITED and result.exit_code:
        detail = f"{program} ended with code {result.exit_code}: {told}"
        raise AttemptFailed(FailureOwner.TASK, "agent_failed", detail)


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


@dataclass(kw_only=True, eq=False)
class _Shared:
    """The face of an event loop."""

    face: Face = field(default_factory=Face)
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    num_users: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


_shared: WeakKeyDictionary[asyncio.AbstractEventLoop, _Shared] = WeakKeyDictionary()


@asynccontextmanager
async def lease_face() -> AsyncIterator[Face]:
    """Return the face of this event loop; its server ends with the last attempt that uses it."""
    shared = _shared.setdefault(asyncio.get_running_loop(), _Shared())
    async with shared.lock:
        if not shared.num_users:
            await shared.stack.enter_async_context(shared.face.serving())
        shared.num_users += 1
    try:
        yield shared.face
    finally:
        async with shared.lock:
            shared.num_users -= 1
            if not shared.num_users:
                await shared.stack.aclose()


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
        _kill_group(process.pid)
        await asyncio.gather(talking, return_exceptions=True)
    if not done:
        return None
    stdout, stderr = talking.result()
    if process.returncode:
        told = stderr.decode(errors="replace").strip()[-_MAX_TOLD_CHARS:]
        detail = f"{words[0]} ended with code {process.returncode}: {told}"
        raise AttemptFailed(FailureOwner.TASK, "agent_failed", detail)
    return stdout.decode(errors="replace").strip()


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
