"""Task directories of Harbor as workspaces, graded by their own tests.

If a task runs its tests in the model's container (`shared`, Harbor's default), so does strop: the model's
files and installed packages are there, its running programs are not. The model could have changed programs
that the tests call, so such an attempt has the metric `unsealed`. A task with `environment_mode = "separate"`
is graded in a fresh container, which gets only its `artifacts`. In both cases the model never shares a
container with `tests/` or `solution/`.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import math
import re
import shlex
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from strop.environments.contract import Done
from strop.environments.harbor.directories import HarborTask, digest_tree, list_directories
from strop.environments.workspace import Workspace, room_limits, submitted
from strop.errors import ConfigError, SandboxError, SandboxLost
from strop.io import FileLock
from strop.io.variables import user_cache_dir
from strop.rollout import Example, FailureOwner, Outcome, Split
from strop.sandbox.contract import SandboxSpec
from strop.sandbox.engine import ENGINES, Engine, engine_environ
from strop.sandbox.local import find_program
from strop.sandbox.served import ServedSandbox
from strop.spec.base import Unhashed, expert
from strop.spec.sandboxing import RoomSettings
from strop.spec.task import EnvironmentSection
from strop.tasks.failures import AttemptFailed
from strop.tasks.task import TaskLimits

_LOGS = "/logs/verifier"
_ARTIFACTS = "/logs/artifacts"
_REWARD_BYTES = 64 * 1024
_ORDER_LIMIT_S = 60.0
_PULL_LIMIT_S = 1800.0
_PREPARE = "mkdir -p /logs/agent /logs/verifier /logs/artifacts"
_CLEAR = f"rm -rf /tests {_LOGS} && {_PREPARE}"
_TEST = f'chmod +x "$0" && exec "$0" > {_LOGS}/test-stdout.txt 2>&1'
_METRIC = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class HarborSpec(RoomSettings, EnvironmentSection):
    """Task directories in Harbor's form."""

    name: Literal["harbor"]
    root: Unhashed[str] = Field(
        min_length=1,
        description="A task directory of Harbor's, or a folder of them. Nothing in it is changed.",
        json_schema_extra=expert("task directories may lie anywhere"),
    )
    tasks: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description="Names of task directories. Empty = all.",
        json_schema_extra=expert("a run may be about some of them"),
    )
    open_network: bool = Field(
        default=False,
        description="Whether tasks with a public network, Harbor's default, get this machine's network with"
        " its own services. false = they get none. Lists of allowed hosts work in either case.",
        json_schema_extra=expert("some tests install packages when they run"),
    )
    num_held_out: int | None = Field(
        default=None,
        ge=0,
        description="Number of held-out tasks, the last by name. none = a tenth of them, one at least.",
    )

    @property
    def num_train(self) -> int | None:
        """None: known only from the task directories."""
        return None


class Harbor(Workspace):
    """The tests write the reward: `reward` of /logs/verifier/reward.json, or reward.txt.

    Tests that write none, or exceed their limit, are a failure of the task if they do so in an untouched
    container too; else the attempt broke them, and earns 0.
    """

    name = "harbor"
    version = "harbor-1"
    max_turns = 50
    limits = TaskLimits(max_reply_tokens=4096, max_goldless_frac=1.0)
    _image: Image
    _used_s = 0.0
    """Wall time of the model's commands so far."""

    def __init__(self, spec: HarborSpec) -> None:
        self._spec = spec

    @property
    def data_digest(self) -> str:
        """Hash over the task directories. Raises: DataError, ConfigError as `list_directories`."""
        return " ".join(task.digest for task in self._tasks().values())

    def examples(self, split: Split) -> Iterator[Mapping[str, Any]]:
        """Yield the tasks of a split. Raises: DataError, ConfigError as `list_directories`."""
        tasks = list(self._tasks().values())
        number = self._spec.num_held_out
        number = math.ceil(len(tasks) / 10) if number is None else number
        first = max(0, len(tasks) - number)
        for task in tasks[first:] if split is Split.HELD_OUT else tasks[:first]:
            yield {"task": task.name, "digest": task.digest}

    def part_of(self, example: Example) -> str:
        """Return the task's name."""
        return str(example.fields["task"])

    def opening(self, example: Example, seed: int) -> str:
        """Return the instruction, unchanged."""
        return self._task_of(example).instruction

    def gold_replies(self, example: Example) -> Iterator[tuple[str, ...]]:
        """Yield the task's solution, uploaded and run, if it has one."""
        task = self._task_of(example)
        folder = task.folder / "solution"
        if not (folder / "solve.sh").is_file():
            return
        lines = [f"export {name}={shlex.quote(value)}" for name, value in task.config.solution.env.items()]
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            place = shlex.quote(f"/solution/{path.relative_to(folder)}")
            lines += [f"mkdir -p $(dirname {place})", f"base64 -d > {place} <<'END_OF_FILE'"]
            lines += [base64.b64encode(path.read_bytes()).decode(), "END_OF_FILE"]
        lines += ["chmod +x /solution/solve.sh", "/solution/solve.sh"]
        yield submitted("\n".join(lines))

    def sandbox_for(self, example: Example) -> SandboxSpec:
        """Return the spec of the model's container."""
        return self._container_of(self._task_of(example).agent_network)

    def grader_for(self, example: Example) -> SandboxSpec:
        """Return the spec of a fresh container for tests."""
        return self._container_of(self._task_of(example).test_network)

    async def reset(self, example: Example, seed: int) -> str:
        """Pull or build the image, then open. Raises: ConfigError, AttemptFailed, as `Workspace.reset`."""
        task = self._task = self._task_of(example)
        self.place = replace(self.place, backend=choose_engine(self.place.backend))
        self._command_limit_s = self.place.command_limit_s
        self._image = await asyncio.to_thread(find_image, task, self.place.backend)
        self.folder = task.config.environment.workdir or self._image.workdir
        self.carried = (*task.config.artifacts, _ARTIFACTS) if task.is_separate else ()
        return str(await super().reset(example, seed))

    async def prepare(self, example: Example, seed: int) -> None:
        """Make the directories that Harbor's programs expect."""
        await self._order(self.sandbox, _PREPARE)

    async def grade(self, sandbox: ServedSandbox) -> Outcome:
        """Run the tests and read their reward."""
        rewards = await self._test(sandbox)
        metrics = {} if self._task.is_separate else {"unsealed": 1.0}
        if rewards is None:
            await self._require_tests()
            metrics["no_reward"] = 1.0
            return Outcome(parts={"reward": 0.0}, is_correct=False, metrics=metrics)
        if len(rewards) > 1 and "reward" not in rewards:
            names = ", ".join(sorted(rewards))
            detail = f"the tests of {self._task.name} write {names}, and no `reward`"
            raise AttemptFailed(FailureOwner.TASK, "no_reward", detail)
        reward = rewards.get("reward", next(iter(rewards.values())))
        metrics |= {name: value for name, value in rewards.items() if _METRIC.fullmatch(name)}
        metrics.pop("reward", None)
        return Outcome(parts={"reward": reward}, is_correct=reward == self.limits.max_reward, metrics=metrics)

    async def _judge_work(self) -> Any:
        return await (super()._judge_work() if self._task.is_separate else self.grade(self.sandbox))

    async def bash(self, command: str) -> str | Done:
        """Run a command in a shell that stays: its directory, variables and functions are kept."""
        limit_s = self._task.config.agent.timeout_sec or math.inf
        left_s = max(1.0, limit_s - self._used_s)
        self.place = replace(self.place, command_limit_s=min(self._command_limit_s, left_s))
        began = time.monotonic()
        try:
            result = await super().bash(command)
        finally:
            self._used_s += time.monotonic() - began
        return Done("the time is up") if self._used_s >= limit_s else result

    async def _require_tests(self) -> None:
        """Raise AttemptFailed if the tests write no reward for an untouched container either."""
        async with self._open_grader() as sandbox:
            await self._order(sandbox, _PREPARE)
            if await self._test(sandbox) is None:
                detail = f"the tests of {self._task.name} write no reward for an untouched container"
                raise AttemptFailed(FailureOwner.TASK, "no_reward", detail)

    async def _test(self, sandbox: ServedSandbox) -> dict[str, float] | None:
        """Upload and run the tests; return their rewards, or None if they write none."""
        cleared = await sandbox.exec(["/bin/sh", "-c", _CLEAR], wall_limit_s=_ORDER_LIMIT_S, cwd="/")
        if cleared.exit_code:
            return None
        try:
            await sandbox.upload(self._task.folder / "tests", "/tests")
        except SandboxLost:
            raise
        except SandboxError:
            # The disk is full, or a file is in the way.
            return None
        argv = ["/bin/sh", "-c", _TEST, "/tests/test.sh"]
        tests = self._task.config.verifier
        # The exit code is not the reward.
        result = await sandbox.exec(argv, wall_limit_s=tests.timeout_sec, env=tests.env, cwd=self.folder)
        return None if result.timed_out else await _read_rewards(sandbox)

    def _container_of(self, network: str) -> SandboxSpec:
        spec, asked = self._spec, self._task.config.environment
        limits = replace(room_limits(spec), cpus=asked.cpus)
        if (memory_bytes := asked.memory_bytes) is not None:
            limits = replace(limits, memory_bytes=memory_bytes)
        if (disk_bytes := asked.disk_bytes) is not None:
            limits = replace(limits, file_bytes=disk_bytes, scratch_bytes=disk_bytes)
        return SandboxSpec(
            limits=limits,
            image=self._image.name,
            user=0,
            env={**self._image.env, **asked.env},
            network="none" if network == "host" and not spec.open_network else network,
        )

    async def _order(self, sandbox: ServedSandbox, script: str) -> None:
        """Run a set-up script in an untouched container. Raises: AttemptFailed if the image fails at it."""
        result = await sandbox.exec(["/bin/sh", "-c", script], wall_limit_s=_ORDER_LIMIT_S, cwd="/")
        if result.exit_code:
            stderr = result.stderr.decode(errors="replace").strip()[-400:]
            detail = f"the image of {self._task.name}: {result.kind}: {stderr}"
            raise AttemptFailed(FailureOwner.TASK, "bad_image", detail)

    def _task_of(self, example: Example) -> HarborTask:
        return self._tasks()[example.fields["task"]]

    def _tasks(self) -> dict[str, HarborTask]:
        return _read_root(self._spec.root, self._spec.tasks)


@cache
def _read_root(root: str, wanted: tuple[str, ...]) -> dict[str, HarborTask]:
    return list_directories(Path(root).expanduser(), wanted)


async def _read_rewards(sandbox: ServedSandbox) -> dict[str, float] | None:
    """Return the numbers of reward.json, else of reward.txt; None if they are missing or malformed."""
    for name in ("reward.json", "reward.txt"):
        try:
            data = await sandbox.read(f"{_LOGS}/{name}", max_bytes=_REWARD_BYTES)
        except SandboxError as error:
            if error.kind == "missing":
                continue
            if error.kind in ("directory", "not_regular", "denied", "too_large"):
                return None
            raise
        return parse_rewards(data)
    return None


def parse_rewards(data: bytes) -> dict[str, float] | None:
    """Return finite numbers by name, or a bare one as `reward`; None for anything else."""
    try:
        parsed = json.loads(data)
        rewards = parsed if isinstance(parsed, dict) else {"reward": parsed}
        if any(not isinstance(value, int | float) for value in rewards.values()):
            return None
        values = {str(name): float(value) for name, value in rewards.items()}
    except (ValueError, OverflowError, RecursionError):
        return None
    return values if values and all(map(math.isfinite, values.values())) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Image:
    """The image of a task's sandboxes."""

    name: str
    """A name in the engine's store, or the path of a directory tree."""
    workdir: str = "/"
    env: dict[str, str] = field(default_factory=dict)


def choose_engine(backend: str) -> str:
    """Return the container engine for a backend setting. Raises: ConfigError if it is none."""
    if backend == "auto":
        return next((name for name in ENGINES if shutil.which(name)), ENGINES[0])
    if backend not in ENGINES:
        raise ConfigError(
            f"task.sandbox={backend} has no images, and tasks of Harbor's are images",
            allowed="podman or docker",
            next_step="set task.sandbox",
        )
    return backend


def find_image(task: HarborTask, backend: str) -> Image:
    """Return a task's image; pull or build it if it is not in the store.

    Raises: AttemptFailed if that fails; SandboxRefused if there is no such engine.
    """
    own_image = task.config.environment.docker_image
    if own_image is not None and Path(own_image).is_absolute():
        return Image(name=own_image)
    engine = Engine(name=backend, program=find_program(backend, backend), environ=engine_environ())
    # A digest of the build context alone: other tests need no other image.
    name = own_image or f"localhost/strop-harbor:{digest_tree(task.folder / 'environment')[:24]}"
    # Concurrent attempts need the same image.
    lock = hashlib.sha256(f"{backend} {name}".encode()).hexdigest()[:16]
    folder = user_cache_dir() / "harbor"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / f"{lock}.lock"):
            try:
                return _inspect(engine, name)
            except OSError:
                if own_image is not None:
                    engine.run("pull", "--quiet", name, limit_s=_PULL_LIMIT_S)
                else:
                    context = str(task.folder / "environment")
                    limit_s = task.config.environment.build_timeout_sec
                    engine.run("build", "--quiet", "--tag", name, context, limit_s=limit_s)
                return _inspect(engine, name)
    except OSError as error:
        detail = f"the image of {task.name}: {error}"
        raise AttemptFailed(FailureOwner.INFRA, "no_image", detail) from error


def _inspect(engine: Engine, name: str) -> Image:
    """Read an image of the store. Raises: OSError if it is not there."""
    config = json.loads(engine.run("image", "inspect", "--format", "{{json .Config}}", name))
    env = dict(variable.split("=", 1) for variable in config.get("Env") or () if "=" in variable)
    return Image(name=name, workdir=config.get("WorkingDir") or "/", env=env)
