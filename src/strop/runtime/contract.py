"""What a client asks for by OpenHands' protocol (openhands-workspace 1.58.0), and the options of a service.

A client sends a `StartRequest` and receives records (`session`).
"""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, field_validator

from strop.hardware.ports import LOOPBACK

SERVICE_KEY_HEADER = "X-API-Key"
"""Holds the caller's key in requests to the service."""
INSIDE_PORT = 60000
"""Where a sandbox's own server listens; the clients' commands name it."""
_Text = Annotated[str, Field(pattern=r"^[^\x00]*$")]
_Name = Annotated[str, Field(pattern=r"^[^=\x00]+$")]


class State(StrEnum):
    """The state of a sandbox. Clients see each as a pair of words (`session.WORDS`)."""

    QUEUED = "queued"
    """It waits for a slot."""
    IMAGE = "image"
    """Its image is fetched, and it is made."""
    STARTING = "starting"
    """It exists; its server does not answer yet."""
    READY = "ready"
    PAUSED = "paused"
    STOPPED = "stopped"
    """Its client stopped it, or a limit of idleness, age or lease."""
    FAILED = "failed"
    """It ended by itself or never began; `FailureKind` says whose fault that was."""


class FailureKind(StrEnum):
    """Why a sandbox failed, for the code that decides about its reward. None of these is a reward of 0."""

    IMAGE_ERROR = "image_error"
    """The image is missing, denied or of another architecture, or nothing in it can be started."""
    TASK_OOM = "task_oom"
    """The sandbox reached its memory limit, by the control group's own count."""
    AGENT_ERROR = "agent_error"
    """Its server ended or stopped answering."""
    INFRA_LOST = "infra_lost"
    """Its node, allocation, disk or network is gone."""
    CAPACITY = "capacity"
    """It can never fit."""


class Slot(BaseModel, frozen=True):
    """The resources of a sandbox."""

    cpus: float
    memory_bytes: int
    disk_bytes: int
    """Its files are in memory, beside `memory_bytes`."""
    processes: int

    def times(self, factor: float) -> Slot:
        """Return the slot multiplied, rounded up. Disk stays: the size of images does not change."""
        return Slot(
            cpus=self.cpus * factor,
            memory_bytes=math.ceil(self.memory_bytes * factor),
            disk_bytes=self.disk_bytes,
            processes=math.ceil(self.processes * factor),
        )


_PLAIN_SLOT = Slot(cpus=1.0, memory_bytes=2 << 30, disk_bytes=2 << 30, processes=512)


class StartRequest(BaseModel, frozen=True):
    """`POST /start`. Other fields, such as `runtime_class`, are ignored."""

    image: str = Field(pattern=r"^[^-\x00][^\x00]*$")
    command: tuple[_Text, ...] = Field(min_length=1)
    """A text is split into words as a shell would. The first replaces the image's entrypoint."""
    working_dir: str = Field(default="/", pattern=r"^/[^\x00]*$")
    environment: dict[_Name, _Text] = Field(default_factory=dict)
    session_id: str = Field(max_length=256, pattern=r"^[^./?#%\\\x00][^/?#%\\\x00]*$")
    """Clients put it into a path unescaped, so a sandbox with another id could not be asked for."""
    resource_factor: float = Field(default=1.0, gt=0.0, le=1024.0, allow_inf_nan=False)
    """Multiplies memory, processes and processors of a slot."""
    run_as_user: int | None = Field(default=None, ge=0, lt=(1 << 32) - 1)
    """A hint: the image's user that runs the programs, with the group of the same number, where the node can
    arrange it. `isolation` has their user on the host."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"

    @field_validator("command", mode="before")
    @classmethod
    def _split_command(cls, value: Any) -> Any:
        return tuple(shlex.split(value)) if isinstance(value, str) else value


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """The resources of a sandbox and its time limits, in seconds."""

    slot: Slot = _PLAIN_SLOT
    """The slot of a sandbox with a resource factor of 1."""
    cpu_factor: float = 4.0
    """How often a processor may be promised."""
    idle_limit_s: float = 3600.0
    """Since its address was used or its client asked for it. A paused sandbox is not idle."""
    age_limit_s: float = 24 * 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Options of a service and its hosts."""

    folder: Path
    """Holds the keys and the address of this service alone."""
    address: str = LOOPBACK
    port: int = 0
    """0: a free one."""
    num_nodes: int = 1
    """With more, hosts are actors of Ray on that many nodes, and on each that joins later."""
    policy: Policy = field(default_factory=Policy)
    backends: tuple[str, ...] = ()
    """The allowed backends; the first that fits an image is taken. None: all that work on a node."""
    network: str = "none"
    registries: tuple[str, ...] = ()
    """Where clients' images may be pulled from, as HOST or HOST:PORT."""
