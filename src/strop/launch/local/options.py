"""The options of this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from strop.launch.options import (
    DEVICES_HELP,
    KIND_HELP,
    WRAP_HELP,
    SiteOptions,
    imply_gpus,
    split_at_commas,
)
from strop.spec.job import JobSpec

if TYPE_CHECKING:
    from strop.launch.contract import Backend


class LocalSite(SiteOptions):
    """This machine: the job goes on when the terminal closes."""

    is_here: ClassVar[bool] = True

    backend: Literal["local"] = Field(default="local", description=KIND_HELP)
    devices: Annotated[tuple[str, ...], BeforeValidator(split_at_commas)] = Field(
        default=(), strict=False, exclude=True, description=DEVICES_HELP
    )

    wrap: tuple[str, ...] = Field(default=(), strict=False, description=WRAP_HELP)

    def implied_settings(self, job: JobSpec) -> tuple[str, ...]:
        """Return `job.gpus` as the number of chosen GPUs."""
        return imply_gpus(job, len(self.devices), "site.devices") if self.devices else ()

    def open(self, site: str) -> Backend:
        """Return the backend."""
        from strop.launch.local.backend import LocalBackend

        return LocalBackend()
