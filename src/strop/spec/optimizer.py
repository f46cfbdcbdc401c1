"""How gradients move the weights: AdamW on float32 master weights."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from strop.spec.base import Section, SpecConflict


class OptimizerSpec(Section):
    """AdamW and its schedule."""

    lr: float = Field(
        default=1e-5, gt=0.0, le=1.0, description="Learning rate after warm-up, from which it decays."
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
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant",
        description="How the learning rate goes on after warm-up: it stays, or falls along a line or half a"
        " cosine over all optimizer steps of the run.",
    )
    final_frac: float = Field(
        default=0.0,
        ge=0.0,
        lt=1.0,
        description="Share of the learning rate to which 'linear' and 'cosine' have brought it when the run"
        " ends.",
    )

    @model_validator(mode="after")
    def _check_decay(self) -> OptimizerSpec:
        if self.schedule == "constant" and self.final_frac != 0.0:
            raise SpecConflict(
                {"optimizer.schedule": self.schedule, "optimizer.final_frac": self.final_frac},
                "a learning rate that stays never gets there",
                allowed="optimizer.final_frac beside 'linear' or 'cosine'",
                next_step="set optimizer.schedule, or remove optimizer.final_frac",
            )
        return self
