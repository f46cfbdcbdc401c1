"""How rollouts are generated."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from strop.spec.base import Section, SpecConflict

_OF_VLLM = (
    *("python", "is_eager", "kv_cache_bytes", "gpu_memory_frac", "max_model_tokens"),
    "tensor_parallel",
)


class EngineSpec(Section):
    """Which engine generates, and its limits."""

    kind: Literal["native", "vllm"] = Field(
        default="native",
        description="'native' generates with the policy's own code; 'vllm' with vLLM, which runs in a process"
        " and a Python environment of its own.",
    )
    max_rows: int | None = Field(
        default=None,
        ge=1,
        le=10**6,
        description="Replies decoded at the same time; more wait until a row is free. none = 64 on"
        " a CPU, 512 on a GPU.",
    )
    python: str | None = Field(
        default=None,
        min_length=1,
        description="Interpreter that has vLLM. none = this one if it has vLLM, else the one of"
        " `make vllm-deps`.",
    )
    is_eager: bool | None = Field(
        default=None,
        description="Whether vLLM runs the model as it is, which starts sooner, or compiles it first, which"
        " is faster afterwards. none = as it is on a CPU, compiled on a GPU.",
    )
    kv_cache_bytes: int | None = Field(
        default=None,
        ge=2**20,
        description="Memory for vLLM's keys and values, on each device. none = 1 GiB on a CPU, what"
        " engine.gpu_memory_frac leaves on a GPU.",
    )
    gpu_memory_frac: float | None = Field(
        default=None,
        gt=0.0,
        le=1.0,
        description="Share of a GPU's memory that vLLM takes for everything. none = vLLM's own default.",
    )
    max_model_tokens: int | None = Field(
        default=None,
        ge=2,
        description="Tokens of a prompt and its reply together, for vLLM. none = as many as the model has"
        " positions.",
    )
    tensor_parallel: int = Field(
        default=1, ge=1, le=64, description="GPUs that share one copy of the model in vLLM."
    )
    update_mode: Literal["drain", "restart", "continue"] = Field(
        default="drain",
        description="What becomes of replies under way when new weights come: 'drain' lets them end,"
        " 'restart' samples them again from their start, 'continue' goes on with the new weights.",
    )
    transport: Literal["auto", "file", "broadcast", "store"] = Field(
        default="auto",
        description="How weights reach an engine in another process. 'file' writes a file below the run's"
        " directory, 'broadcast' sends the tensors through process groups (gloo), 'store' goes through"
        " the store (store.uri). 'auto' is a file in shared memory on one machine, else a broadcast.",
    )

    @model_validator(mode="after")
    def _check_kind(self) -> EngineSpec:
        defaults = type(self).model_fields
        given = {
            f"engine.{name}": getattr(self, name)
            for name in _OF_VLLM
            if getattr(self, name) != defaults[name].default
        }
        if self.kind == "native" and given:
            raise SpecConflict(
                {"engine.kind": self.kind, **given},
                "only vLLM reads the setting",
                allowed=f"{', '.join(given)} with engine.kind = 'vllm'",
                next_step="set engine.kind to 'vllm', or remove the setting",
            )
        return self
