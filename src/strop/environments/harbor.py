"""Task directories of Harbor as workspaces, graded by their own tests.

It reads schemas up to 1.4, for single-step tasks of one container. A directory that needs an unsupported
feature is refused by the feature's name; no setting is silently ignored.
Tests run in the model's container after its programs have ended, as Harbor's do (metric `unsealed`: it may
have changed what they call). The model never has `tests/` or `solution/`.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from typing_extensions import override

from strop.environments.workspace import FILE_ERRORS, FolderTasks, hash_files, room_limits, submitted
from strop.errors import ConfigError, DataError, SandboxError, SandboxLost
from strop.io import FileLock
from strop.io.variables import user_cache_dir
from strop.rollout import Example, FailureOwner, Outcome, Split
from strop.sandbox.container import run_engine
from strop.sandbox.contract import SandboxSpec
from strop.sandbox.local import find_program
from strop.sandbox.served import ServedSandbox
from strop.spec.base import Unhashed, expert
from strop.spec.sandboxing import RoomSettings
from strop.spec.task import EnvironmentSection
from strop.tasks.failures import AttemptFailed
from strop.tasks.task import TaskLimits

_CONFIG = "task.toml"
_UNITS = {"K": 1 / 1024, "M": 1.0, "G": 1024.0}
_Variables = dict[str, Annotated[str, Field(pattern=r"^([^$]|\$+[^${])*\$*$")]]
"""None names a variable of this machine (`${NAME}`), which no sandbox gets."""
_LOGS = "/logs/verifier"
_REWARD_BYTES = 64 * 1024
_CLEAR_LIMIT_S = 60.0
_PULL_LIMIT_S = 1800.0
_PREPARE = "mkdir -p /logs/agent /logs/verifier /logs/artifacts"
_CLEAR = f"rm -rf /tests {_LOGS} && {_PREPARE}"
_TEST = f'chmod +x "$0" && exec "$0" > {_LOGS}/test-stdout.txt 2>&1'
_METRIC = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_Reward = Annotated[StrictFloat, Field(allow_inf_nan=False)] | StrictBool
_REWARDS = TypeAdapter(Annotated[dict[str, _Reward], Field(min_length=1)])


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


class _Table(BaseModel):
    """A table of `task.toml`. Unsupported keys are accepted if their value is empty."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_empty(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if key in cls.model_fields or value}


class _Agent(_Table):
    timeout_sec: float = Field(default=math.inf, gt=0.0)


class _Verifier(_Table):
    timeout_sec: float = Field(default=600.0, gt=0.0)
    env: _Variables = {}
    environment_mode: Literal["shared"] = "shared"


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
    artifacts: list[Any] = []
    """What Harbor copies out of a container for people."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HarborTask:
    """One task directory."""

    name: str
    folder: Path
    config: _Config
    instruction: str
    digest: str
    """Hash over every file of the directory."""


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
    has_image = config.environment.docker_image or (folder / "environment/Dockerfile").is_file()
    refusals = {
        "it has no tests/test.sh": not (folder / "tests/test.sh").is_file(),
        "it has several containers (compose)": any((folder / "environment").glob("*compose*.y*ml")),
        "it has a conversation before the first turn": (folder / "trajectory.json").exists(),
        "it has neither environment.docker_image nor environment/Dockerfile": not has_image,
        "it has links or special files": any(
            path.is_symlink() or not (path.is_file() or path.is_dir()) for path in folder.rglob("*")
        ),
    }
    if why := next((why for why, is_so in refusals.items() if is_so), None):
        raise _refused(folder, why)
    return task


def digest_tree(folder: Path) -> str:
    """Hash every file below a folder."""
    return hash_files({str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()})


def _refused(folder: Path, why: str) -> DataError:
    return DataError(
        f"the task directory {folder}: {why}",
        allowed="tasks of one step and one Linux container, run by root, without GPUs and MCP servers",
        next_step="correct it, or name the others in task.tasks",
    )


class Harbor(FolderTasks):
    """The tests write the reward: `reward` of /logs/verifier/reward.json, or reward.txt.

    Tests that write none, or exceed their limit, are a failure of the task if they do so in an untouched
    container too; else the attempt broke them, and earns 0.
    """

    name = "harbor"
    version = "harbor-1"
    max_turns = 50
    limits = TaskLimits(max_reply_tokens=4096, max_goldless_frac=1.0)
    _task: HarborTask
    _image: Image
    read_tasks = staticmethod(list_directories)

    def examples(self, split: Split) -> Iterator[Mapping[str, Any]]:
        """Yield the tasks of a split. Raises: DataError, ConfigError as `list_directories`."""
        tasks, number = list(self.tasks.values()), self.spec.num_held_out
        first = len(tasks) - min(len(tasks), math.ceil(len(tasks) / 10) if number is None else number)
        for task in tasks[first:] if split is Split.HELD_OUT else tasks[:first]:
            yield {"task": task.name, "digest": task.digest}

    @override
    def opening(self, example: Example, seed: int) -> str:
        return str(self.task_of(example).instruction)

    def gold_replies(self, example: Example) -> Iterator[tuple[str, ...]]:
        """Yield the task's solution, uploaded and run, if it has one."""
        task = self.task_of(example)
        folder = task.folder / "solution"
        if not (folder / "solve.sh").is_file():
            return
        lines = [f"export {name}={shlex.quote(value)}" for name, value in task.config.solution.env.items()]
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            place, data = shlex.quote(f"/solution/{path.relative_to(folder)}"), path.read_bytes()
            lines.append(f"mkdir -p $(dirname {place}) && base64 -d > {place} <<'END_OF_FILE'")
            lines += [base64.b64encode(data).decode(), "END_OF_FILE"]
        yield submitted("\n".join([*lines, "chmod +x /solution/solve.sh", "/solution/solve.sh"]))

    @override
    def sandbox_for(self, example: Example) -> SandboxSpec:
        asked, spec = self._task.config.environment, self.spec
        memory_gib = spec.memory_gib if asked.memory_mb is None else asked.memory_mb / 1024
        disk_gib = spec.disk_gib if asked.storage_mb is None else asked.storage_mb / 1024
        is_open = spec.open_network and asked.network_mode == "public"
        return SandboxSpec(
            limits=replace(room_limits(memory_gib=memory_gib, disk_gib=disk_gib), cpus=asked.cpus),
            image=self._image.name,
            user=0,
            env={**self._image.env, **asked.env},
            network="host" if is_open else "none",
        )

    @override
    async def reset(self, example: Example, seed: int) -> str:
        task = self._task = self.task_of(example)
        self.command_limit_s = min(self.command_limit_s, task.config.agent.timeout_sec)
        self._image = await asyncio.to_thread(find_image, task, self.backend)
        self.folder = task.config.environment.workdir or self._image.workdir
        return str(await super().reset(example, seed))

    @override
    async def prepare(self, example: Example, seed: int) -> None:
        await self._order(self.sandbox, _PREPARE, kind="bad_image", cwd="/")

    @override
    async def grade(self, sandbox: ServedSandbox) -> Outcome:
        rewards = await self._test(sandbox)
        metrics = {"unsealed": 1.0}
        if rewards is None:
            async with self._open_grader() as untouched:
                await self._order(untouched, _PREPARE, kind="bad_image", cwd="/")
                if await self._test(untouched) is None:
                    detail = f"the tests of {self._task.name} write no reward for an untouched container"
                    raise AttemptFailed(FailureOwner.TASK, "no_reward", detail)
            rewards, metrics["no_reward"] = {"reward": 0.0}, 1.0
        if len(rewards) > 1 and "reward" not in rewards:
            names = ", ".join(sorted(rewards))
            detail = f"the tests of {self._task.name} write {names}, and no `reward`"
            raise AttemptFailed(FailureOwner.TASK, "no_reward", detail)
        reward = rewards.get("reward", next(iter(rewards.values())))
        others = {name: rewards[name] for name in rewards.keys() - {"reward"} if _METRIC.fullmatch(name)}
        return Outcome(parts={"reward": reward}, is_correct=reward == 1.0, metrics=metrics | others)

    @override
    async def _judge_work(self) -> Any:
        return await self.grade(self.sandbox)

    async def _test(self, sandbox: ServedSandbox) -> dict[str, float] | None:
        """Upload and run the tests; return their rewards, or None if they write none."""
        cleared = await sandbox.exec(["/bin/sh", "-c", _CLEAR], wall_limit_s=_CLEAR_LIMIT_S, cwd="/")
        if cleared.exit_code:
            return None
        try:
            await sandbox.upload(self._task.folder / "tests", "/tests")
        except SandboxLost:
            raise
        except SandboxError:
            # The disk is full, or a file is in the way.
            return None
        argv, tests = ["/bin/sh", "-c", _TEST, "/tests/test.sh"], self._task.config.verifier
        # The exit code is not the reward.
        result = await sandbox.exec(argv, wall_limit_s=tests.timeout_sec, env=tests.env, cwd=self.folder)
        for name in () if result.timed_out else ("reward.json", "reward.txt"):
            try:
                return parse_rewards(await sandbox.read(f"{_LOGS}/{name}", max_bytes=_REWARD_BYTES))
            except SandboxError as error:
                if error.kind not in FILE_ERRORS:
                    raise
        return None


def parse_rewards(data: bytes) -> dict[str, float] | None:
    """Return finite numbers by name, or a bare one as `reward`; None for anything else."""
    with suppress(ValueError):
        # Not as JSON: `bc` writes .5.
        data = json.dumps({"reward": float(data)}).encode()
    with suppress(ValidationError):
        parsed = _REWARDS.validate_json(data)
        return {name: float(value) for name, value in parsed.items()}
    return None


class Image(NamedTuple):
    """The image of a task's sandboxes, by its name in the engine's store."""

    name: str
    env: Mapping[str, str]
    workdir: str = "/"


def find_image(task: HarborTask, backend: str) -> Image:
    """Return a task's image; pull or build it if it is not in the store.

    Raises: AttemptFailed if that fails; SandboxRefused if there is no such engine.
    """
    own_image = task.config.environment.docker_image
    find_program(backend, backend)
    context = task.folder / "environment"
    # A digest of the build context alone: other tests need no other image.
    name = own_image or f"localhost/strop-harbor:{digest_tree(context)[:24]}"
    with suppress(OSError):
        return _inspect(backend, name)
    user_cache_dir().mkdir(parents=True, exist_ok=True)
    try:
        # Concurrent attempts need the same image.
        with FileLock(user_cache_dir() / "harbor.lock"):
            with suppress(OSError):
                return _inspect(backend, name)
            if own_image is not None:
                run_engine(backend, "pull", "--quiet", name, limit_s=_PULL_LIMIT_S)
            else:
                limit_s = task.config.environment.build_timeout_sec
                run_engine(backend, "build", "--quiet", "--tag", name, str(context), limit_s=limit_s)
            return _inspect(backend, name)
    except OSError as error:
        detail = f"the image of {task.name}: {error}"
        raise AttemptFailed(FailureOwner.INFRA, "no_image", detail) from error


def _inspect(engine: str, name: str) -> Image:
    """Read an image of the store. Raises: OSError if it is not there."""
    config = json.loads(run_engine(engine, "image", "inspect", "--format", "{{json .Config}}", name))
    env = dict(variable.split("=", 1) for variable in config.get("Env") or () if "=" in variable)
    return Image(name, env, config.get("WorkingDir") or "/")
