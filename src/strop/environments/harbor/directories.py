"""Reader of Harbor's task directories: `task.toml`, `instruction.md`, `environment/`, `tests/`, `solution/`.

It reads schemas up to 1.4, for single-step tasks of one container. A directory that needs an unsupported
feature is refused by the feature's name; no setting is silently ignored.
"""

from __future__ import annotations

import hashlib
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from strop.errors import ConfigError, DataError
from strop.sandbox.contract import MIB

CONFIG = "task.toml"
_UNITS = {"K": 1 / 1024, "M": 1.0, "G": 1024.0}
_PORTS = (80, 443)
"""Ports of an allowed host: Harbor's list has no ports."""
_Network = Literal["no-network", "public", "allowlist"]


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
    network_mode: _Network | None = None
    allowed_hosts: tuple[str, ...] = ()
    user: Literal["root", "0", 0] | None = None


class _Agent(_Phase):
    timeout_sec: float | None = Field(default=None, gt=0.0)


class _Verifier(_Phase):
    timeout_sec: float = Field(default=600.0, gt=0.0)
    env: dict[str, str] = Field(default_factory=dict)
    environment_mode: Literal["shared", "separate"] = "shared"


class _Environment(_Table):
    os: Literal["linux"] = "linux"
    docker_image: str | None = None
    build_timeout_sec: float = Field(default=600.0, gt=0.0)
    cpus: float | None = Field(default=None, gt=0.0)
    memory_mb: float | None = Field(default=None, gt=0.0)
    storage_mb: float | None = Field(default=None, gt=0.0)
    memory: str | None = None
    """An older form of memory_mb, such as '2G'."""
    storage: str | None = None
    network_mode: _Network | None = None
    allow_internet: bool = True
    allowed_hosts: tuple[str, ...] = ()
    env: dict[str, str] = Field(default_factory=dict)
    workdir: str | None = Field(default=None, pattern="^/")

    @property
    def memory_bytes(self) -> int | None:
        """The memory of a container; None: the run file's."""
        return _bytes_of(self.memory_mb, self.memory)

    @property
    def disk_bytes(self) -> int | None:
        """The disk of a container; None: the run file's."""
        return _bytes_of(self.storage_mb, self.storage)


def _bytes_of(size_mib: float | None, text: str | None) -> int | None:
    """Return a size in either form. Raises: ValueError, KeyError."""
    mib = size_mib if text is None else float(text[:-1]) * _UNITS[text[-1:].upper()]
    return None if mib is None else int(mib * MIB)


class _Solution(_Table):
    env: dict[str, str] = Field(default_factory=dict)


class _Config(_Table):
    schema_version: str = "1.4"
    version: str | None = None
    """Used by schemas before 1.0."""
    source: str | None = None
    task: dict[str, Any] = Field(default_factory=dict)
    metadata: dict[str, Any] = Field(default_factory=dict)
    agent: _Agent = Field(default_factory=_Agent)
    verifier: _Verifier = Field(default_factory=_Verifier)
    environment: _Environment = Field(default_factory=_Environment)
    solution: _Solution = Field(default_factory=_Solution)
    artifacts: tuple[str, ...] = ()

    @field_validator("artifacts", mode="before")
    @classmethod
    def _name_sources(cls, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        return tuple(
            entry["source"] if isinstance(entry, dict) and set(entry) == {"source"} else entry
            for entry in value
        )

    @model_validator(mode="after")
    def _require_possible(self) -> Self:
        variables = [*self.environment.env.items(), *self.verifier.env.items(), *self.solution.env.items()]
        for name, value in variables:
            if "${" in value:
                raise ValueError(f"{name}={value}: variables of this machine are not given to sandboxes")
        if any(not path.startswith("/") for path in self.artifacts):
            raise ValueError(f"artifacts={list(self.artifacts)}: paths begin with /")
        return self


@dataclass(frozen=True, kw_only=True, slots=True)
class HarborTask:
    """One task directory."""

    name: str
    folder: Path
    config: _Config
    instruction: str
    digest: str
    """Hash over every file of the directory."""
    agent_network: str
    """A sandbox's network: 'none', 'host' (Harbor's public network), or 'allow:HOST:PORT,...'."""
    test_network: str

    @property
    def is_separate(self) -> bool:
        """Whether tests run in a fresh container, which gets only the `artifacts`."""
        return self.config.verifier.environment_mode == "separate"


def list_directories(root: Path, wanted: tuple[str, ...]) -> dict[str, HarborTask]:
    """Read a task directory, or all below a folder, by name.

    Raises: ConfigError if there is none, or a wanted one is missing; DataError for an unsupported one.
    """
    folders = [root] if (root / CONFIG).is_file() else [path.parent for path in root.glob(f"*/{CONFIG}")]
    by_name = {folder.resolve().name: folder for folder in folders}
    missing = sorted(set(wanted) - by_name.keys())
    if missing or not by_name:
        raise ConfigError(
            f"{root}: no task directory {', '.join(missing)}".rstrip(),
            allowed=f"a folder with {CONFIG}, or one of such folders"
            + (f"; there are: {', '.join(sorted(by_name))}" if by_name else ""),
            next_step="correct task.root, or task.tasks",
        )
    return {name: _read(name, by_name[name]) for name in sorted(wanted or by_name)}


def _read(name: str, folder: Path) -> HarborTask:
    try:
        config = _Config.model_validate(tomllib.loads((folder / CONFIG).read_text("utf-8")))
        environment = config.environment
        # Raise where a size is no size.
        _ = environment.memory_bytes, environment.disk_bytes
        networks = [_network(environment, phase) for phase in (config.agent, config.verifier)]
        instruction = (folder / "instruction.md").read_text("utf-8")
    except ValidationError as error:
        fault = error.errors()[0]
        place = ".".join(map(str, fault["loc"])) or "it"
        raise _refused(folder, f"{place}: {fault['msg']} ({fault['input']!r:.60})") from error
    except (OSError, ValueError, KeyError) as error:
        raise _refused(folder, str(error)) from error
    _require_whole(folder, config, networks)
    return HarborTask(
        name=name,
        folder=folder,
        config=config,
        instruction=instruction,
        digest=digest_tree(folder),
        agent_network=networks[0],
        test_network=networks[1],
    )


def _network(environment: _Environment, phase: _Phase) -> str:
    """Return a phase's network. Raises: ValueError for hosts that no sandbox can enforce."""
    mode, hosts = phase.network_mode, phase.allowed_hosts
    if mode is None:
        mode, hosts = environment.network_mode, environment.allowed_hosts
    mode = mode or ("public" if environment.allow_internet else "no-network")
    if mode != "allowlist":
        return "host" if mode == "public" else "none"
    if not hosts or any("*" in host or "/" in host for host in hosts):
        raise ValueError(f"allowed_hosts={list(hosts)}: names and addresses of hosts are possible alone")
    return "allow:" + ",".join(
        f"{f'[{host}]' if ':' in host else host}:{port}" for host in hosts for port in _PORTS
    )


def _require_whole(folder: Path, config: _Config, networks: list[str]) -> None:
    """Refuse an incomplete or unsupported directory. Raises: DataError."""
    refusals = {
        "it has no tests/test.sh": not (folder / "tests/test.sh").is_file(),
        "it has several containers (compose)": any((folder / "environment").glob("*compose*.y*ml")),
        "it has a conversation before the first turn": (folder / "trajectory.json").exists(),
        "it has neither environment.docker_image nor environment/Dockerfile": not (
            config.environment.docker_image or (folder / "environment/Dockerfile").is_file()
        ),
        "its tests have another network than the model, in one container": (
            config.verifier.environment_mode == "shared" and networks[0] != networks[1]
        ),
        "it has links or special files": any(
            path.is_symlink() or not (path.is_file() or path.is_dir()) for path in folder.rglob("*")
        ),
    }
    for why, is_so in refusals.items():
        if is_so:
            raise _refused(folder, why)


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
