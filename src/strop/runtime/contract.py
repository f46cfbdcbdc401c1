"""What clients and the service tell each other: OpenHands' protocol (openhands-workspace 1.58.0).

A client sends a `StartRequest` and receives records (`session`).
"""

from __future__ import annotations

import math
import shlex
from enum import StrEnum
from typing import Any, Literal
from urllib.parse import unquote

from pydantic import BaseModel, Field, field_validator, model_validator

SERVICE_KEY_HEADER = "X-API-Key"
"""Holds the caller's key in requests to the service."""
MAX_ID_CHARS = 256
MAX_FACTOR = 1024.0
INSIDE_PORT = 60000
"""Where a sandbox's own server listens; the clients' commands name it."""

_NO_ID = (1 << 32) - 1


class State(StrEnum):
    """The state of a sandbox. Clients see each as a pair of words (`session.WORDS`)."""

    QUEUED = "queued"
    """It waits for a slot."""
    IMAGE = "image"
    """Its image is being pulled."""
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
    """It can never fit, or no slot was free before its deadline."""


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


class StartRequest(BaseModel, frozen=True):
    """`POST /start`. Fields that are null count as left out; others, such as `runtime_class`, are ignored."""

    image: str = Field(pattern=r"^[^-\x00][^\x00]*$")
    command: tuple[str, ...]
    """Split into words as a shell would. The first replaces the image's entrypoint."""
    working_dir: str = Field(default="/", pattern=r"^/[^\x00]*$")
    environment: dict[str, str] = Field(default_factory=dict)
    session_id: str
    resource_factor: float = Field(default=1.0, gt=0.0, le=MAX_FACTOR, allow_inf_nan=False)
    """Multiplies memory, processes and processors of a slot."""
    run_as_user: int | None = Field(default=None, ge=0, lt=_NO_ID)
    """A hint: the image's user that runs the programs, with the group of the same number, where the node can
    arrange it. `isolation` has their user on the host."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        return {name: value for name, value in fields.items() if value is not None}

    @field_validator("session_id")
    @classmethod
    def _check_session_id(cls, value: str) -> str:
        # Clients put an id into a path unescaped, so a sandbox with another id could not be asked for.
        is_plain = not any(letter in value for letter in "/?#\\\0") and unquote(value) == value
        if not (is_plain and 0 < len(value) <= MAX_ID_CHARS and value not in (".", "..")):
            raise ValueError(
                f"it has to have 1 to {MAX_ID_CHARS} characters, none of / ? # \\ or NUL, no % before two"
                " hexadecimal digits, and not to be . or .."
            )
        return value

    @field_validator("command", mode="before")
    @classmethod
    def _split_command(cls, value: Any) -> Any:
        if not isinstance(value, str | tuple):
            raise ValueError("it is not a text")
        words = tuple(shlex.split(value)) if isinstance(value, str) else value
        if not words or not words[0] or any("\0" in word for word in words):
            raise ValueError("it names no program")
        return words

    @field_validator("environment", mode="before")
    @classmethod
    def _read_environment(cls, variables: Any) -> Any:
        if not isinstance(variables, dict):
            raise ValueError("it is not an object")
        texts = {}
        for name, value in variables.items():
            if not isinstance(value, bool | int | float | str) or "\0" in str(value):
                raise ValueError(f"variable {name!r} is not a text")
            if not name or "=" in name or "\0" in name:
                raise ValueError(f"{name!r} cannot be the name of a variable")
            texts[name] = str(value).lower() if isinstance(value, bool) else str(value)
        return texts
