"""Where model-written code runs: the sandboxes of tasks and environments, and the run's sandbox service."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from strop.spec.base import Section, SpecConflict, Unhashed, expert


class SandboxSettings(Section):
    """The sandboxes of a task."""

    min_isolation: Literal["none", "rlimit", "namespace", "container", "vm"] = Field(
        default="namespace",
        description="Least isolation of the sandbox for model-written code; a host without such a sandbox is"
        " refused. 'rlimit' and 'none' allow that code to access this machine's files and network.",
        json_schema_extra=expert("a machine without namespaces can still judge code that its user trusts"),
    )
    sandbox: Literal["auto", "bubblewrap", "podman", "docker", "process", "ray"] = Field(
        default="auto",
        description="Backend of the sandboxes for model-written code. 'auto': the first local one with enough"
        " isolation. 'ray': any node of the run's Ray with room, by a backend of that node; there programs"
        " have the standard library only.",
        json_schema_extra=expert(
            "a machine with accelerators may have few processors, or allow no sandboxes"
        ),
    )
    agent_paths: Unhashed[tuple[str, ...]] = Field(
        default=(),
        strict=False,
        description="Files and directories of this machine that task.agent needs in an attempt's sandbox,"
        " such as its Python environment and its script: mounted there at the same paths, read-only.",
        json_schema_extra=expert("a sandbox sees nothing of this machine but /usr"),
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
    """Also the resources of an environment's sandboxes, where an example does not set them."""

    memory_gib: float = Field(
        default=4.0,
        gt=0.0,
        le=4096.0,
        description="Memory of a sandbox, unless the example sets it.",
        json_schema_extra=expert("builds, tests and training need more than editing"),
    )
    disk_gib: float = Field(
        default=4.0,
        gt=0.0,
        le=4096.0,
        description="Disk space of a sandbox, unless the example sets it.",
        json_schema_extra=expert("data sets, checkpoints and builds differ in size"),
    )


class RuntimeSpec(Section):
    """The sandbox service of a run's workers."""

    serve: Literal["none", "here", "cpu-nodes"] = Field(
        default="none",
        description="Whether the run starts a sandbox service for agents, and where. 'here': on its first"
        " node; 'cpu-nodes': on the job's cpu_nodes. Every worker of the run gets its address and key.",
        json_schema_extra=expert("agents need sandboxes, and most clusters offer no container service"),
    )
    url: str | None = Field(
        default=None,
        pattern=r"^https?://[^/\s]+$",
        description="Address of an existing sandbox service, http://HOST:PORT. none = no such service.",
        json_schema_extra=expert("one service may outlive runs, and serve several of them"),
    )
    key_file: str | None = Field(
        default=None,
        min_length=1,
        description="File with the key of runtime.url, readable by this user only. none = no key.",
        json_schema_extra=expert("one service may outlive runs, and serve several of them"),
    )
    backend: Literal["auto", "podman", "docker", "bubblewrap", "process"] = Field(
        default="auto",
        description="Sandbox backend of a service that the run starts. 'auto': podman or docker, whichever is"
        " installed, for images; else bubblewrap.",
        json_schema_extra=expert("a host may allow less than it has installed"),
    )

    @model_validator(mode="after")
    def _check_source(self) -> RuntimeSpec:
        if self.url is not None and self.serve != "none":
            raise SpecConflict(
                {"runtime.url": self.url, "runtime.serve": self.serve},
                "two services are named",
                allowed="one that is there already, or one that comes with the run",
                next_step="remove one of them",
            )
        if (self.url is None) != (self.key_file is None):
            raise SpecConflict(
                {"runtime.url": self.url, "runtime.key_file": self.key_file},
                "an address and the file of its key belong together",
                allowed="both or neither",
                next_step="set the other one too",
            )
        if self.backend != "auto" and self.serve == "none":
            raise SpecConflict(
                {"runtime.backend": self.backend, "runtime.serve": self.serve},
                "no service comes with the run",
                allowed="a backend where runtime.serve is 'here' or 'cpu-nodes'",
                next_step="set runtime.serve, or remove runtime.backend",
            )
        return self
