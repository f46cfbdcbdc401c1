"""How often and how closely a run looks at its held-out examples."""

from __future__ import annotations

from pydantic import Field

from strop.spec.base import Section


class EvalSpec(Section):
    """Evaluation on the held-out split, before the first step and after the last."""

    every: int | None = Field(
        default=None,
        ge=1,
        le=10**7,
        description="Steps between evaluations during training. none = only before and after.",
    )
    num_examples: int | None = Field(
        default=None, ge=1, le=10**7, description="Held-out examples used, from the first. none = all."
    )
    num_samples: int | None = Field(
        default=4,
        ge=1,
        le=10**5,
        description="Sampled rollouts per example, beside the greedy one. none = greedy only.",
    )
