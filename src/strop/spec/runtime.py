"""Who serves sandboxes to a run: nobody, a service that is there already, or one that comes with the run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from strop.spec.base import Section, SpecConflict, expert


class RuntimeSpec(Section):
    """The sandbox service that the run's workers are handed."""

    serve: Literal["none", "here", "cpu-nodes"] = Field(
        default="none",
        description="Whether a sandbox service comes with the run, and where it has its sandboxes. 'here':"
        " beside the run, on its first node; 'cpu-nodes': on the job's cpu_nodes. Every worker of the run is"
        " handed its address and key.",
        json_schema_extra=expert("agents need sandboxes, and most clusters give no container service"),
    )
    url: str | None = Field(
        default=None,
        pattern=r"^https?://[^/\s]+$",
        description="Address of a sandbox service that is there already, http://HOST:PORT. none = none.",
        json_schema_extra=expert("one service may outlive runs, and serve several"),
    )
    key_file: str | None = Field(
        default=None,
        min_length=1,
        description="File that holds the key of runtime.url, readable by this user alone. none = none.",
        json_schema_extra=expert("one service may outlive runs, and serve several"),
    )
    backend: Literal["auto", "podman", "docker", "bubblewrap", "process"] = Field(
        default="auto",
        description="What a service that comes with the run makes sandboxes with. 'auto': podman, or docker,"
        " for images where one is, else bubblewrap.",
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
