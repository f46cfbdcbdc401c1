"""What a run will cost, from sizes and measured speeds: memory, disk, time. Imports no torch.

An estimate multiplies what is known (FLOP, bytes) by what is measured (`strop doctor`) and by a few
shares that nobody knows before the run. Those are assumptions; each is listed with its value.
"""

from __future__ import annotations

from dataclasses import dataclass

from strop.engine import DEFAULT_MAX_ROWS
from strop.hardware import Calibration, Machine
from strop.policy.footprint import (
    COPY_BYTES,
    DEFAULT_MICRO_BATCH_POSITIONS,
    ModelSize,
    activation_bytes,
    cache_bytes,
    checkpoint_bytes,
    decode_flop,
    learn_flop,
    micro_batch_positions,
    prefill_flop,
    state_bytes,
    terms_bytes,
)
from strop.spec import RunSpec

REPLY_LIMIT_FRAC = 0.75
SIGNAL_FRAC = 0.5
EFFICIENCY_FRAC = 0.5
# Where nothing is measured: what a server core of 2023 reaches at least, with and without bf16 products.
FAST_GFLOPS_PER_CORE = 60.0
PLAIN_GFLOPS_PER_CORE = 25.0
COPY_GB_PER_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One part of a sum."""

    name: str
    amount: float
    """In the unit of the sum: bytes or seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Assumption:
    """A number that nobody has measured."""

    name: str
    value: float
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Speeds:
    """How fast the machine is taken to be."""

    gflops: float
    """Billions of operations per second of a large product in the run's number format."""
    copy_gb_per_s: float
    source: str
    """Where the numbers are from: a measurement and its circumstances, or 'assumed'."""
    is_measured: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeEstimate:
    """How long a run takes, and what takes longest."""

    step_parts: tuple[Part, ...]
    """Seconds of one step by stage."""
    step_s: float
    eval_s: float
    """Seconds of one evaluation."""
    total_s: float
    bottleneck: str
    speeds: Speeds


def split_memory(
    spec: RunSpec,
    size: ModelSize,
    max_reply_tokens: int,
    max_prompt_tokens: int | None = None,
    *,
    imitated_positions: int = 0,
) -> tuple[Part, ...]:
    """Return what a run keeps in memory at its peak, in bytes, program and libraries left out.

    `max_prompt_tokens` None: unknown; a micro-batch is then taken to be full. `imitated_positions` are
    those of the largest micro-batch of demonstrations.
    """
    dtype = spec.model.dtype
    # In float32 the masters themselves are computed with.
    copies = 0 if dtype == "float32" else size.num_params * COPY_BYTES[dtype]
    positions = spec.train.micro_batch_tokens or DEFAULT_MICRO_BATCH_POSITIONS
    if max_prompt_tokens is not None:
        positions = micro_batch_positions(
            budget=positions,
            num_prompts=spec.train.prompts_per_step,
            num_rollouts=spec.train.rollouts_per_prompt,
            prompt_tokens=max_prompt_tokens,
            reply_tokens=max_reply_tokens,
        )
    rows = count_rows(spec)
    num_slots = max_reply_tokens + positions // rows
    positions = max(positions if spec.train.has_rl else 0, imitated_positions)
    num_terms = spec.train.has_rl + spec.train.has_sft
    parts = [
        ("weights (fp32 masters)", size.num_params * 4),
        ("compute copies", copies),
        ("gradients (fp32)", size.num_params * 4),
        ("sum of the terms' gradients (fp32)", terms_bytes(size, num_terms)),
        ("moments (fp32)", size.num_params * 8),
        (f"activations ({positions} positions)", activation_bytes(size, dtype, positions)),
        (f"key-value cache ({rows} rows)", cache_bytes(size, dtype, rows, num_slots)),
    ]
    if spec.placement.kind == "process":
        parts.append(("weights of the engine's process", size.num_params * COPY_BYTES[dtype]))
    return tuple(Part(name=name, amount=float(num_bytes)) for name, num_bytes in parts if num_bytes)


def count_rows(spec: RunSpec) -> int:
    """Return how many replies are decoded at once."""
    wanted = spec.train.prompts_per_step * spec.train.rollouts_per_prompt
    return min(wanted, spec.engine.max_rows or DEFAULT_MAX_ROWS)


def list_disk_parts(spec: RunSpec, size: ModelSize, *, is_mirrored: bool) -> tuple[Part, ...]:
    """Return what checkpoints take: those that are kept, the one being written, the one being sent.

    The mirror holds a checkpoint by hard links while it is sent, so that one that is pruned meanwhile stays.
    """
    one = float(checkpoint_bytes(size, spec.model.dtype))
    num_kept = spec.train.keep_checkpoints
    kept = Part(name=f"{num_kept} checkpoints and one being written", amount=(num_kept + 1) * one)
    return (kept, Part(name="one held while it is mirrored", amount=one)) if is_mirrored else (kept,)


def choose_speeds(spec: RunSpec, machine: Machine, calibration: Calibration | None) -> Speeds:
    """Return measured speeds, or assumed ones where nothing was measured."""
    is_bf16 = spec.model.dtype == "bfloat16"
    if calibration is None:
        cores = spec.placement.threads or machine.num_physical_cores
        is_fast = is_bf16 and machine.has_fast_bf16
        gflops = FAST_GFLOPS_PER_CORE if is_fast else PLAIN_GFLOPS_PER_CORE
        return Speeds(
            gflops=gflops * cores,
            copy_gb_per_s=COPY_GB_PER_S,
            source=f"assumed: {gflops:g} GFLOP/s for each of {cores} cores; `strop doctor` measures",
            is_measured=False,
        )
    return Speeds(
        gflops=calibration.gemm_bf16_gflops if is_bf16 else calibration.gemm_fp32_gflops,
        copy_gb_per_s=calibration.copy_gb_per_s,
        source=f"measured by `strop doctor` with {calibration.num_threads} threads",
        is_measured=True,
    )


def list_assumptions(max_reply_tokens: int) -> tuple[Assumption, ...]:
    """Return the shares that the time estimate rests on."""
    return (
        Assumption(
            name="reply_tokens_mean",
            value=REPLY_LIMIT_FRAC * max_reply_tokens,
            why=f"three quarters of the limit of {max_reply_tokens}; replies change while a model learns",
        ),
        Assumption(
            name="signal_frac",
            value=SIGNAL_FRAC,
            why="share of groups whose rewards differ; the others are not forwarded",
        ),
        Assumption(
            name="efficiency_frac",
            value=EFFICIENCY_FRAC,
            why="share of the speed of one large product that real steps reach",
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What the time of a run depends on."""

    spec: RunSpec
    size: ModelSize
    prompt_tokens_mean: float
    max_reply_tokens: int
    num_eval_examples: int
    num_evals: int
    imitated_tokens: float = 0.0
    """Tokens of the demonstrations of one step, prompts included."""


def estimate_time(work: Work, speeds: Speeds) -> TimeEstimate:
    """Estimate one step and the whole run, loading and checkpoints left out."""
    train = work.spec.train
    num_prompts = train.prompts_per_step if train.has_rl else 0
    num_rollouts = num_prompts * train.rollouts_per_prompt
    reply_tokens = num_rollouts * work.max_reply_tokens * REPLY_LIMIT_FRAC
    prompt_tokens = num_prompts * work.prompt_tokens_mean
    generate_s, limit = _generate_s(work, speeds, num_rollouts, prompt_tokens)
    positions = SIGNAL_FRAC * (prompt_tokens + reply_tokens) + work.imitated_tokens
    scored = SIGNAL_FRAC * reply_tokens + work.imitated_tokens
    learn_s = _compute_s(learn_flop(work.size, positions, scored), speeds)
    # The optimizer reads and writes masters, moments, gradients and copies once.
    update_s = state_bytes(work.size, work.spec.model.dtype) / speeds.copy_gb_per_s / 1e9
    parts = {"generate": generate_s, "learn": learn_s, "update weights": update_s}
    per_example = 1 + (work.spec.eval.num_samples or 0)
    eval_s, _ = _generate_s(
        work, speeds, work.num_eval_examples * per_example, work.num_eval_examples * work.prompt_tokens_mean
    )
    step_s = sum(parts.values())
    shares = {f"{name} (every step)": seconds * train.steps for name, seconds in parts.items()}
    shares["evaluate"] = eval_s * work.num_evals
    slowest = max(shares, key=lambda name: shares[name])
    cause = limit if slowest.startswith("generate") or slowest == "evaluate" else "arithmetic"
    if slowest.startswith("update"):
        cause = "memory bandwidth"
    return TimeEstimate(
        step_parts=tuple(Part(name=name, amount=seconds) for name, seconds in parts.items()),
        step_s=step_s,
        eval_s=eval_s,
        total_s=sum(shares.values()),
        bottleneck=f"{slowest}, bound by {cause}",
        speeds=speeds,
    )


def _generate_s(work: Work, speeds: Speeds, num_rollouts: int, prompt_tokens: float) -> tuple[float, str]:
    """Return seconds to generate replies, and whether arithmetic or memory sets them."""
    size, dtype = work.size, work.spec.model.dtype
    rows = min(num_rollouts, work.spec.engine.max_rows or DEFAULT_MAX_ROWS) or 1
    reply_tokens = num_rollouts * work.max_reply_tokens * REPLY_LIMIT_FRAC
    prefill_s = _compute_s(prefill_flop(size, prompt_tokens), speeds)
    compute_s = _compute_s(decode_flop(size, reply_tokens), speeds)
    # Every token of all rows at once reads all weights once.
    read_s = reply_tokens / rows * size.num_params * COPY_BYTES[dtype] / speeds.copy_gb_per_s / 1e9
    limit = "arithmetic" if compute_s >= read_s else "memory bandwidth"
    return prefill_s + max(compute_s, read_s), limit


def _compute_s(flop: float, speeds: Speeds) -> float:
    return flop / (speeds.gflops * 1e9 * EFFICIENCY_FRAC)
