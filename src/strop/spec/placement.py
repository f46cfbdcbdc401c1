"""Where the roles of a run live."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from strop.spec.base import Section


class PlacementSpec(Section):
    """Which processes a run has."""

    kind: Literal["inline", "process", "ray"] = Field(
        default="inline",
        description="'inline' runs everything in one process, where the engine uses the policy's own"
        " weights; 'process' puts the engine in a second process that is sent weights by file; 'ray' makes"
        " every role an actor on Ray, on this machine or on all nodes of the job.",
    )
    learners: int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description="With 'ray': ranks that share the learner's weights. none = one for each GPU for"
        " learning, else one.",
    )
    engines: int = Field(
        default=1, ge=1, le=4096, description="With 'ray': engines, all of the same weights."
    )
    rollout_workers: int = Field(
        default=0,
        ge=0,
        le=4096,
        description="With 'ray': processes that attempt and judge examples. 0 = the run's own process does.",
    )
    threads: int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description="Compute threads. Bit-equal resume needs the same count. none = physical cores.",
    )
