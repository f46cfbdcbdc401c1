"""Where the roles of a run live."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from strop.spec.base import Section, SpecConflict


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

    @model_validator(mode="after")
    def _check_counts(self) -> PlacementSpec:
        counts = {"learners": self.learners or 1, "engines": self.engines}
        several = {name: count for name, count in counts.items() if count > 1}
        if self.rollout_workers:
            several["rollout_workers"] = self.rollout_workers
        if self.kind != "ray" and several:
            raise SpecConflict(
                {"placement.kind": self.kind, **{f"placement.{name}": n for name, n in several.items()}},
                "only Ray starts several processes of a role, or processes for rollouts",
                allowed="placement.kind = 'ray', or one learner, one engine and no rollout workers",
                next_step="set placement.kind to 'ray', or leave the counts out",
            )
        if self.rollout_workers % self.engines:
            raise SpecConflict(
                {"placement.rollout_workers": self.rollout_workers, "placement.engines": self.engines},
                "some engines would have fewer workers than others",
                allowed="a multiple of placement.engines, or 0",
                next_step="change one of the two",
            )
        return self
