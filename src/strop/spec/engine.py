"""How rollouts are generated."""

from __future__ import annotations

from pydantic import Field

from strop.spec.base import Section


class EngineSpec(Section):
    """Limits of the engine."""

    max_rows: int | None = Field(
        default=None,
        ge=1,
        le=10**6,
        description="Replies decoded at the same time; more wait until a row is free. none = derived from"
        " the memory of the machine.",
    )
