"""The options of a container on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from strop.launch.options import (
    DEVICES_HELP,
    IMAGE_FLAGS,
    KIND_HELP,
    CliFlag,
    SiteOptions,
    imply_gpus,
    split_at_commas,
)
from strop.spec.job import JobSpec
from strop.spec.reader import Flag

if TYPE_CHECKING:
    from strop.launch.contract import Backend


class ContainerSite(SiteOptions):
    """A container on this machine, by podman or docker."""

    is_here: ClassVar[bool] = True

    backend: Literal["container"] = Field(default="container", description=KIND_HELP)
    image: Annotated[str | None, CliFlag(IMAGE_FLAGS)] = Field(
        default=None,
        min_length=1,
        description="Image, by name or digest. none = the project's own, made from the environment that"
        " submits; its tag is a hash of what is in it.",
    )
    base_image: str | None = Field(
        default=None,
        min_length=1,
        description="What our own image is built from, for example 'python:3.11-slim'. none = a Debian"
        " base made on the spot, with this machine's interpreter and packages: no registry is needed.",
    )
    environment: Literal["image", "mounted"] = Field(
        default="image",
        description="Where Python and its packages come from: 'image', or 'mounted': those of this machine,"
        " shown read-only in an image that has libraries alone.",
    )
    engine: Literal["auto", "podman", "docker"] = Field(default="auto", description="Which program runs it.")
    mounts: tuple[str, ...] = Field(
        default=(), strict=False, description="Folders to show inside as they are: SOURCE:TARGET[:ro]."
    )
    network: bool = Field(
        default=False, description="Whether the job may use the network; then it is this machine's own."
    )
    sandboxes: bool = Field(
        default=False,
        description="Whether the job may make sandboxes inside, for model-written code: then all of /proc is"
        " shown to it. Without this such a run is refused there.",
    )
    shm: str = Field(
        default="8G",
        pattern=r"^\d+[KMGT]?$",
        description="Shared memory at most, which loaders of data and collectives use.",
    )
    devices: Annotated[tuple[str, ...], BeforeValidator(split_at_commas), CliFlag(metavar="0,1")] = Field(
        default=(),
        strict=False,
        exclude=True,
        description=DEVICES_HELP,
    )

    @property
    def has_network(self) -> bool:
        """Whether the profile allows it."""
        return self.network

    def implied_settings(self, job: JobSpec, options: Mapping[str, Any]) -> tuple[Flag, ...]:
        """Return `job.gpus` as the number of chosen GPUs."""
        return imply_gpus(job, len(self.devices), "--devices") if self.devices else ()

    def open(self, site: str) -> Backend:
        """Return the backend."""
        from strop.launch.container.backend import ContainerBackend

        return ContainerBackend(self)
