"""A task whose problems are solved by a program of the user's, which asks the model as often as it likes.

A command is started once for each attempt, with the problem as JSON on its standard input (`{"messages",
"fields"}`) and OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL in its environment; its answer is what it
prints. `{prompt}` and `{folder}` in it are the problem's text and an empty folder of the attempt's own, which
is TMPDIR too and ends with it. A function, `FILE.py:NAME`, is called in a process of its own with those of
`prompt`, `messages`, `folder`, `base_url`, `api_key`, `model` and the example's fields that it names; its
answer is what it returns. The task judges the answer as it judges a reply.
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
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from strop.agents import calling
from strop.agents.face import Face
from strop.environments.contract import Action, StepResult
from strop.environments.recording import Recorder
from strop.errors import DataError
from strop.rollout import Example, FailureOwner, Message, Outcome
from strop.spec.task import TaskSection
from strop.tasks import Task
from strop.tasks.contract import TaskLimits, within_bounds
from strop.tasks.failures import AttemptFailed
from strop.tasks.judging import InlineJudge, Judge
from strop.tasks.traits import TaskWrapper, limits_of
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

        Raises: ConfigError if the file has no such function.
        """
        super().__init__(task)
        assert spec.agent is not None
        self.agent = spec.agent
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

    def judge_here(self, example: Example, text: str) -> Outcome:
        """Judge an answer as the task does."""
        return self._task.verify(example, text)


class AgentWorld:
    """Makes attempts of a program; see `tasks.traits`."""

    def __init__(self, task: AgentTask) -> None:
        self._task = task

    def make_environment(self, judge: Judge | None = None) -> AgentEnvironment:
        """Make one attempt."""
        return AgentEnvironment(self._task, judge)

    def attempt_tokens(self, limits: TaskLimits) -> int:
        """Return how many tokens the program may have sampled."""
        return self._task.max_tokens

    async def play(self, example: Example, text: str) -> Outcome:
        """Judge a text as the program's answer, without the program."""
        return self._task.judge_here(example, text)


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
        problem: dict[str, object] = {
            "messages": [one.to_json() for one in self._messages],
            "fields": dict(self._example.fields),
        }
        async with AsyncExitStack() as stack:
            face = await stack.enter_async_context(lease_face())
            base_url, key = await stack.enter_async_context(face.open(recorder))
            access = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": key, "OPENAI_MODEL": _MODEL}
            # An older name of the first, which litellm reads too.
            access["OPENAI_API_BASE"] = base_url
            folder = await stack.enter_async_context(_own_folder())
            access["TMPDIR"] = folder
            prompt = "\n\n".join(one.text for one in self._messages)
            words = shlex.split(self._task.agent)
            if is_code(self._task.agent):
                ref = CodeRef.parse(self._task.agent)
                words = [sys.executable, "-m", calling.__name__]
                problem |= {"place": ref.place, "name": ref.name, "prompt": prompt}
            else:
                words = [word.replace("{folder}", folder).replace("{prompt}", prompt) for word in words]
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
