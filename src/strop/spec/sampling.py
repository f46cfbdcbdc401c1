"""The distribution that rollouts are drawn from."""

from __future__ import annotations

from pydantic import Field

from strop.spec.base import Section


class SamplingSpec(Section):
    """How tokens are drawn. A run that trains takes the whole vocabulary at a temperature above 0."""

    temperature: float = Field(
        default=1.0,
        ge=0.0,
        le=100.0,
        description="Logits are divided by it; the trainer divides by the same. 0 = greedy, for evaluation"
        " only.",
    )
    top_p: float = Field(
        default=1.0,
        gt=0.0,
        le=1.0,
        description="Keep the most probable tokens up to this probability mass, in (0, 1]. 1 = all. Less"
        " than 1 is for evaluation and sampling only.",
    )
    top_k: int | None = Field(
        default=None,
        ge=1,
        description="Keep this many most probable tokens. none = all. A number is for evaluation and"
        " sampling only.",
    )
