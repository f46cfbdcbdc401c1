"""Task directories of Harbor as workspaces, graded by their own tests.

It reads schemas up to 1.4, for single-step tasks of one container. A directory that needs an unsupported
feature is refused by the feature's name; no setting is silently ignored.
Tests run in the model's container after its programs have ended (metric `unsealed`: it may have changed what
they call), or in a fresh one if the task says so. The model never has `tests/` or `solution/`.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import math
import re
import shlex
import time
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from strop.environments.contract import Done
from strop.environments.workspace import Workspace, room_limits, submitted
from strop.errors import ConfigError, DataError, SandboxError, SandboxLost
from strop.io import FileLock
from strop.io.variables import user_cache_dir
from strop.rollout import Example, FailureOwner, Outcome, Split
from strop.sandbox.contract import MIB, SandboxSpec
from strop.sandbox.engine import Engine, engine_environ
from strop.sandbox.local import find_program
from strop.sandbox.served import ServedSandbox
from strop.spec.base import Unhashed, expert
from strop.spec.sandboxing import RoomSettings
from strop.spec.task import EnvironmentSection
from strop.tasks.failures import AttemptFailed
from strop.tasks.task import TaskLimits

_CONFIG = "task.toml"
_UNITS = {"K": 1 / 1024, "M": 1.0, "G": 1024.0}
_Path = Annotated[str, Field(pattern="^/")]
_Variables = dict[str, Annotated[str, Field(pattern=r"^([^$]|\$+[^${])*\$*$")]]
"""None names a variable of this machine (`${NAME}`), which no sandbox gets."""
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
    sandbox: Literal["podman", "docker"] = Field(
        default="podman",
        description="Container engine of the sandboxes: Harbor's tasks are images.",
        json_schema_extra=expert("a machine may have docker alone"),
    )
    open_network: bool = Field(
        default=False,
        description="Whether tasks with a public network, Harbor's default, get this machine's network with"
        " its own services. false = they get none.",
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
        return self._container_of(self._task.config.agent)

    def grader_for(self, example: Example) -> SandboxSpec:
        """Return the spec of a fresh container for tests."""
        return self._container_of(self._task.config.verifier)

    async def reset(self, example: Example, seed: int) -> str:
        """Pull or build the image, then open. Raises: ConfigError, AttemptFailed, as `Workspace.reset`."""
        task = self._task = self._task_of(example)
        self._command_limit_s = self.place.command_limit_s
        self._image = await asyncio.to_thread(find_image, task, self.place.backend)
        self.folder = task.config.environment.workdir or self._image.workdir
        self.carried = (*task.artifacts, _ARTIFACTS) if task.is_separate else ()
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

    def _container_of(self, phase: _Phase) -> SandboxSpec:
        asked, network = self._task.config.environment, self._task.network_of(phase)
        limits = replace(room_limits(self._spec), cpus=asked.cpus)
        if asked.memory_mb is not None:
            limits = replace(limits, memory_bytes=int(asked.memory_mb * MIB))
        if asked.storage_mb is not None:
            disk_bytes = int(asked.storage_mb * MIB)
            limits = replace(limits, file_bytes=disk_bytes, scratch_bytes=disk_bytes)
        return SandboxSpec(
            limits=limits,
            image=self._image.name,
            user=0,
            env={**self._image.env, **asked.env},
            network=network if self._spec.open_network else "none",
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
        return _list_once(Path(self._spec.root).expanduser(), self._spec.tasks)


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


class _Table(BaseModel):
    """A table of `task.toml`. Unsupported keys are accepted if their value is empty."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_empty(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if key in cls.model_fields or value}


class _Phase(_Table):
    network_mode: Literal["no-network", "public"] | None = None
    user: Literal["root", "0", 0] | None = None


class _Agent(_Phase):
    timeout_sec: float | None = Field(default=None, gt=0.0)


class _Verifier(_Phase):
    timeout_sec: float = Field(default=600.0, gt=0.0)
    env: _Variables = {}
    environment_mode: Literal["shared", "separate"] = "shared"


class _Environment(_Table):
    os: Literal["linux"] = "linux"
    docker_image: str | None = None
    build_timeout_sec: float = Field(default=600.0, gt=0.0)
    cpus: float | None = Field(default=None, gt=0.0)
    memory_mb: float | None = Field(default=None, gt=0.0)
    storage_mb: float | None = Field(default=None, gt=0.0)
    network_mode: Literal["no-network", "public"] = "public"
    env: _Variables = {}
    workdir: str | None = Field(default=None, pattern="^/")

    @model_validator(mode="before")
    @classmethod
    def _read_older(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Read sizes such as '2G', and whether there is a network, in their older form."""
        data = dict(data)
        for name in ("memory", "storage"):
            if text := data.pop(name, None):
                data[f"{name}_mb"] = float(text[:-1]) * _UNITS.get(text[-1].upper(), math.nan)
        if not data.pop("allow_internet", True):
            data.setdefault("network_mode", "no-network")
        return data


class _Solution(_Table):
    env: _Variables = {}


class _Artifact(_Table):
    source: str = Field(pattern="^/")


class _Config(_Table):
    schema_version: str = "1.4"
    version: str | None = None
    """Used by schemas before 1.0."""
    source: str | None = None
    task: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    agent: _Agent = _Agent()
    verifier: _Verifier = _Verifier()
    environment: _Environment = _Environment()
    solution: _Solution = _Solution()
    artifacts: tuple[_Artifact | _Path, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class HarborTask:
    """One task directory."""

    name: str
    folder: Path
    config: _Config
    instruction: str
    digest: str
    """Hash over every file of the directory."""

    @property
    def is_separate(self) -> bool:
        """Whether tests run in a fresh container, which gets only the `artifacts`."""
        return self.config.verifier.environment_mode == "separate"

    @property
    def artifacts(self) -> tuple[str, ...]:
        """The paths that the tests' container gets."""
        return tuple(one if isinstance(one, str) else one.source for one in self.config.artifacts)

    def network_of(self, phase: _Phase) -> Literal["none", "host"]:
        """Return a sandbox's network for the model or the tests."""
        mode = phase.network_mode or self.config.environment.network_mode
        return "host" if mode == "public" else "none"


def list_directories(root: Path, wanted: tuple[str, ...]) -> dict[str, HarborTask]:
    """Read a task directory, or all below a folder, by name.

    Raises: ConfigError if there is none, or a wanted one is missing; DataError for an unsupported one.
    """
    folders = [root] if (root / _CONFIG).is_file() else [path.parent for path in root.glob(f"*/{_CONFIG}")]
    by_name = {folder.resolve().name: folder for folder in folders}
    missing = sorted(set(wanted) - by_name.keys())
    if missing or not by_name:
        raise ConfigError(
            f"{root}: no task directory {', '.join(missing)}".rstrip(),
            allowed=f"a folder with {_CONFIG}, or one of such folders; here: {', '.join(sorted(by_name))}",
            next_step="correct task.root, or task.tasks",
        )
    return {name: _read(name, by_name[name]) for name in sorted(wanted or by_name)}


def _read(name: str, folder: Path) -> HarborTask:
    try:
        config = _Config.model_validate(tomllib.loads((folder / _CONFIG).read_text("utf-8")))
        instruction = (folder / "instruction.md").read_text("utf-8")
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "it"
        raise _refused(folder, f"{place}: {first['msg']} ({first['input']!r:.60})") from error
    except (OSError, ValueError) as error:
        raise _refused(folder, str(error)) from error
    digest = digest_tree(folder)
    task = HarborTask(name=name, folder=folder, config=config, instruction=instruction, digest=digest)
    networks = {task.network_of(phase) for phase in (config.agent, config.verifier)}
    has_image = config.environment.docker_image or (folder / "environment/Dockerfile").is_file()
    refusals = {
        "it has no tests/test.sh": not (folder / "tests/test.sh").is_file(),
        "it has several containers (compose)": any((folder / "environment").glob("*compose*.y*ml")),
        "it has a conversation before the first turn": (folder / "trajectory.json").exists(),
        "it has neither environment.docker_image nor environment/Dockerfile": not has_image,
        "its tests have another network than the model, in one container": (
            len(networks) > 1 and not task.is_separate
        ),
        "it has links or special files": any(
            path.is_symlink() or not (path.is_file() or path.is_dir()) for path in folder.rglob("*")
        ),
    }
    if why := next((why for why, is_so in refusals.items() if is_so), None):
        raise _refused(folder, why)
    return task


def digest_tree(folder: Path) -> str:
    """Hash every file below a folder: path, executable bits and bytes."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        data = path.read_bytes()
        digest.update(f"{path.relative_to(folder)}\0{path.stat().st_mode & 0o111}\0{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()


def _refused(folder: Path, why: str) -> DataError:
    return DataError(
        f"the task directory {folder}: {why}",
        allowed="tasks of one step and one Linux container, run by root, without GPUs and MCP servers",
        next_step="correct it, or name the others in task.tasks",
    )


_list_once = cache(list_directories)
