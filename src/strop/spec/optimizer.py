"""How gradients move the weights: AdamW on float32 master weights."""

from __future__ import annotations

from pydantic import Field

from strop.spec.base import Section


class OptimizerSpec(Section):
    """AdamW and its schedule."""

    lr: float = Field(
        default=1e-5, gt=0.0, le=1.0, description="Learning rate after warm-up, constant from then on."
    )
    weight_decay: float = Field(
        default=0.0,
        ge=0.0,
        le=1.0,
        description="Decoupled weight decay per step, multiplied by the learning rate. 0 = no decay.",
    )
    beta1: float = Field(default=0.9, ge=0.0, lt=1.0, description="Decay of the first moment per step.")
    beta2: float = Field(default=0.999, ge=0.0, lt=1.0, description="Decay of the second moment per step.")
    eps: float = Field(
        default=1e-8, gt=0.0, le=1.0, description="Added to the root of the second moment, against 0."
    )
    max_grad_norm: float = Field(
        default=1.0,
        gt=0.0,
        description="Gradients with a larger L2 norm over all weights are scaled down to it.",
    )
    warmup_steps: int = Field(
        default=0,
        ge=0,
        le=10**7,
        description="Optimizer steps over which the learning rate rises linearly from 0.",
    )
