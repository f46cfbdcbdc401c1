"""The model that a policy is held close to, and how."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from strop.spec.base import Section


class ReferenceSpec(Section):
    """A frozen model, and the penalty on the distance from it."""

    model: str | None = Field(
        default=None,
        min_length=1,
        description="Where the reference model comes from, like model.uri. none = the weights that the run"
        " starts from. It is loaded only if something asks for it.",
    )
    kl_beta: float = Field(
        default=0.0,
        ge=0.0,
        le=1e6,
        description="Factor of the KL divergence from the reference in the loss. 0 = no penalty, and no"
        " reference model is loaded for it.",
    )
    kl_estimator: Literal["k2", "k3", "k3+"] = Field(
        default="k3+",
        description="How the divergence is estimated from sampled tokens. 'k2' and 'k3+' have the gradient"
        " of KL(policy || reference), 'k3' that of KL(reference || policy). 'k1' is not offered: as a loss"
        " its gradient is zero on average.",
    )
    is_corrected: bool | None = Field(
        default=None,
        description="Whether the penalty is weighed by the probability ratio of the policy to the engine."
        " none = where rollouts may be older than the weights that they train.",
    )
