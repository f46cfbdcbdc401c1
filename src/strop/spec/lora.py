"""Training small adapters beside frozen weights, instead of the weights."""

from __future__ import annotations

from pydantic import Field

from strop.spec.base import Section

DEFAULT_TARGETS = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"


class LoraSpec(Section):
    """Low-rank adapters (LoRA), in the form that peft and vLLM load. They have no dropout."""

    rank: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="Width of the adapters; the model's own weights stay as they are. none = no adapters, all"
        " weights are trained.",
    )
    alpha: float = Field(
        default=32.0,
        gt=0.0,
        le=10**4,
        description="What the adapters say is multiplied by alpha / rank.",
    )
    targets: str = Field(
        default=DEFAULT_TARGETS,
        pattern=r"^\w+(,\w+)*$",
        description="Names of the layers that get an adapter, separated by commas.",
    )

    @property
    def scaling(self) -> float:
        """Factor of what an adapter adds. Only where there are adapters."""
        assert self.rank is not None
        return self.alpha / self.rank

    @property
    def target_names(self) -> tuple[str, ...]:
        """The targets, one by one."""
        return tuple(self.targets.split(","))
