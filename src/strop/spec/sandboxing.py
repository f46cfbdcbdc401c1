"""Where code of a model runs: the settings that tasks and environments share whose code is in sandboxes."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from strop.spec.base import Section, SpecConflict, expert


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
        " node it has room; there programs have the standard library, and a class of task.lane the packages.",
        json_schema_extra=expert(
            "a machine with accelerators may have few processors, or allow no sandboxes"
        ),
    )
    agent_paths: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description="Files and directories of this machine that task.agent needs where it works in an"
        " attempt's sandbox, such as its Python environment and its script: shown there by the same paths,"
        " read-only.",
        json_schema_extra=expert("a sandbox shows nothing of this machine but /usr"),
    )

    @model_validator(mode="after")
    def _check_agent_paths(self) -> Self:
        if self.agent_paths and getattr(self, "agent", None) is None:
            raise SpecConflict(
                {"task.agent_paths": list(self.agent_paths)},
                "no program is named that would find them",
                allowed="paths together with task.agent",
                next_step="set task.agent, or remove them",
            )
        return self


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
