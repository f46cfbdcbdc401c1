"""Where code of a model runs: the settings that tasks and environments share whose code is in sandboxes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from strop.spec.base import Section, expert


class SandboxSettings(Section):
    """Which sandboxes a task makes."""

    min_isolation: Literal["none", "rlimit", "namespace", "container", "vm"] = Field(
        default="namespace",
        description="How well the sandbox that code of the model runs in must be isolated, at least; a host"
        " without such a sandbox is refused. 'rlimit' and 'none' let that code reach this machine's files"
        " and network.",
        json_schema_extra=expert("a machine without namespaces can still judge code that its user trusts"),
    )
    sandbox: Literal["auto", "bubblewrap", "podman", "docker", "process", "remote"] = Field(
        default="auto",
        description="What makes the sandboxes that code of the model runs in. 'auto': the first of this"
        " machine's that is isolated enough. 'remote': the run's sandbox service, `[runtime]`, on whichever"
        " node it has room; there code has the standard library only.",
        json_schema_extra=expert(
            "a machine with accelerators may have few processors, or allow no sandboxes"
        ),
    )


class RoomSettings(SandboxSettings):
    """And how much room the sandboxes of an environment have, where an example does not say it."""

    memory_gib: float = Field(
        default=4.0,
        gt=0.0,
        le=4096.0,
        description="Memory of a sandbox, where the example does not say it.",
        json_schema_extra=expert("builds, tests and training need more than editing"),
    )
    disk_gib: float = Field(
        default=4.0,
        gt=0.0,
        le=4096.0,
        description="What may be written in a sandbox, where the example does not say it.",
        json_schema_extra=expert("data sets, checkpoints and builds differ"),
    )
