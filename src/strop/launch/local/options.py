"""The options of this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from strop.launch.options import KIND_HELP, SiteOptions

if TYPE_CHECKING:
    from strop.launch.contract import Backend


class LocalSite(SiteOptions):
    """This machine: the job goes on when the terminal closes."""

    is_here: ClassVar[bool] = True

    backend: Literal["local"] = Field(default="local", description=KIND_HELP)

    def open(self, site: str) -> Backend:
        """Return the backend."""
        from strop.launch.local.backend import LocalBackend

        return LocalBackend()
