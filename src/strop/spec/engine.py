"""How rollouts are generated: the engine, sampling, and the processes that the roles run in."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from strop.spec.base import Section, SpecConflict, expert

_OF_VLLM = (
    *("python", "is_eager", "gpu_memory_frac", "max_model_tokens"),
    "tensor_parallel",
)


class EngineSpec(Section):
    """Which engine generates, and its limits."""

    kind: Literal["native", "vllm"] = Field(
        default="native",
        description="'native' generates with the policy's own code; 'vllm' with vLLM, in a separate process"
        " and Python environment.",
    )
    max_num_seqs: int | None = Field(
        default=None,
        ge=1,
        le=10**6,
        description="Replies decoded at the same time; others wait for a free row. none = 64 on a CPU, 512 on"
        " a GPU.",
        json_schema_extra=expert(
            "an estimate of memory can be wrong, and few rows are quicker for each reply"
        ),
    )
    python: str | None = Field(
        default=None,
        min_length=1,
        description="Interpreter with vLLM. none = this one if it has vLLM, else that of `make vllm-deps`.",
        json_schema_extra=expert("vLLM may be installed in another environment"),
    )
    is_eager: bool | None = Field(
        default=None,
        description="Whether vLLM runs the model eagerly, which starts sooner, or compiles it first, which is"
        " faster afterwards. none = eager on a CPU, compiled on a GPU.",
        json_schema_extra=expert("compiling pays in long runs and costs minutes in short ones"),
    )
    gpu_memory_frac: float | None = Field(
        default=None,
        gt=0.0,
        le=1.0,
        description="Share of a GPU's memory that vLLM uses in total. none = vLLM's own default.",
        json_schema_extra=expert("a shared GPU must leave memory to others"),
    )
    max_model_tokens: int | None = Field(
        default=None,
        ge=2,
        description="Most tokens of a prompt and its reply together, for vLLM. none = the model's context.",
        json_schema_extra=expert("the cache of a model with very many positions does not fit"),
    )
    tensor_parallel: int | None = Field(
        default=None,
        ge=1,
        le=64,
        description="GPUs that share one copy of the model in vLLM. none = 1, or, if placement.engines is"
        " set, the GPUs for generation divided among the engines.",
        json_schema_extra=expert("a model may not fit on one GPU"),
    )
    update_mode: Literal["drain", "restart", "continue"] = Field(
        default="drain",
        description="Replies in flight when new weights arrive: 'drain' lets them finish, 'restart' samples"
        " them again from their start, 'continue' goes on with the new weights.",
        json_schema_extra=expert(
            "long replies make a drain slow, and going on under new weights is a choice of method"
        ),
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


class SamplingSpec(Section):
    """How tokens are drawn. A run that trains takes the whole vocabulary at a temperature above 0."""

    temperature: float = Field(
        default=1.0,
        ge=0.0,
        le=100.0,
        description="Divisor of the logits; the trainer uses the same. 0 = greedy, for evaluation only.",
    )
    top_p: float = Field(
        default=1.0,
        gt=0.0,
        le=1.0,
        description="Keep the most probable tokens up to this probability mass, in (0, 1]. 1 = all. Less"
        " than 1 is for evaluation and sampling only.",
        json_schema_extra=expert("evaluations of published models cut the distribution; training refuses it"),
    )
    top_k: int | None = Field(
        default=None,
        ge=1,
        description="Keep this many most probable tokens. none = all. A number is for evaluation and"
        " sampling only.",
        json_schema_extra=expert("evaluations of published models cut the distribution; training refuses it"),
    )


class PlacementSpec(Section):
    """The processes of a run."""

    kind: Literal["inline", "ray"] | None = Field(
        default=None,
        description="'inline' runs everything in one process, where the engine uses the policy's own weights;"
        " 'ray' makes every role an actor on Ray, on this machine or on all nodes of the job. none = inline"
        " where that supports the requested nodes, GPUs, judges, engine.kind and train.max_staleness.",
    )
    learners: int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description="Ranks that share the learner's weights. none = one for each GPU for learning, else one.",
        json_schema_extra=expert("ranks without GPUs are for trying a layout on CPUs"),
    )
    engines: int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description="Engines, all with the same weights. none = as many as the GPUs for generation allow with"
        " engine.tensor_parallel; without GPUs one on each node that generates.",
        json_schema_extra=expert("how many engines feed a learner depends on the length of replies"),
    )
    rollout_workers: int | None = Field(
        default=None,
        ge=0,
        le=4096,
        description="Processes that attempt and judge examples. 0 = the run's own process does. none = 0, or"
        " with job.env_gpus the fewest that use all of them.",
        json_schema_extra=expert("slow judges and environments need processes of their own"),
    )
    threads: int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description="Compute threads. Bit-equal resume needs the same number. none = the physical cores.",
        json_schema_extra=expert(
            "a shared machine must leave cores to others, and bit-equal resume needs the same number"
        ),
    )


class RaySpec(Section):
    """Settings of Ray's own processes; read only with placement.kind = "ray"."""

    address: str | None = Field(
        default=None,
        min_length=1,
        max_length=300,
        description="Address of a running Ray cluster, in Ray's form, or 'auto' on one of its nodes. The run"
        " asks Ray for its GPUs, and leaves the cluster unchanged. none = the run starts its own cluster,"
        " which ends with it.",
        json_schema_extra=expert("groups keep one Ray cluster running for all of their work"),
    )
    temp_dir: str | None = Field(
        default=None,
        min_length=1,
        description="Folder on each node for Ray's sockets and logs, at most 30 bytes long; the run removes"
        " what it makes there. none = /tmp.",
        json_schema_extra=expert("temporary folders are small on some clusters, and paths of sockets short"),
    )

    @model_validator(mode="after")
    def _check_address(self) -> RaySpec:
        if self.address is not None and self.temp_dir is not None:
            raise SpecConflict(
                {"ray.address": self.address, "ray.temp_dir": self.temp_dir},
                "the cluster that is running has settings of its own",
                allowed="ray.address alone",
                next_step="remove ray.temp_dir, or ray.address",
            )
        return self
