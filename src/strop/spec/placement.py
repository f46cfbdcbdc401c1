"""Where the roles of a run live."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from strop.spec.base import Section


class PlacementSpec(Section):
    """Which processes a run has."""

    kind: Literal["inline", "process"] = Field(
        default="inline",
        description="'inline' runs everything in one process, where the engine uses the policy's own"
        " weights; 'process' puts the engine in a second process that is sent weights by file.",
    )
    threads: int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description="Compute threads. Bit-equal resume needs the same count. none = physical cores.",
    )
