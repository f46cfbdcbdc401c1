"""Check whether this machine is ready, and measure it: facts, disks, packages, GPUs and their users.

The measured speeds, of the machine and of a run's model on it, are kept in the user's cache, where `plan`
reads them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from strop.engine.contract import GenerationRequest
from strop.hardware import Calibration, Machine, calibrate_machine, describe_machine, free_disk_bytes
from strop.hardware.calibrate import Efficiency, write_efficiency
from strop.hardware.disks import Disk, describe_disk
from strop.hardware.gpus import Gpu, report_gpus
from strop.hardware.leases import find_holder
from strop.hardware.number_format import settle_format
from strop.io import user_cache_dir
from strop.kernels import kernel_status
from strop.policy.footprint import (
    DEFAULT_MICRO_BATCH_POSITIONS,
    ModelSize,
    decode_flop,
    learn_flop,
    prefill_flop,
    read_model_size,
    state_bytes,
)
from strop.rollout import Sampling
from strop.run.training import set_threads
from strop.spec import ModelSpec, RunSpec
from strop.spec.train import OptimizerSpec
from strop.store.models import find_model

if TYPE_CHECKING:
    from strop.engine.native import NativeEngine
    from strop.policy.learner import Learner
    from strop.policy.packing import PackedGroup

EXTRAS = {
    "server": ("fastapi", "uvicorn", "httpx"),
    "tasks": ("reasoning-gym", "math-verify"),
    "ifeval": ("if-verifiable",),
    "ray": ("ray",),
    "s3": ("boto3",),
}
"""Optional parts of strop and the packages that each needs."""
WANTED_DISK_BYTES = 6_000_000_000
"""The demo's run at most: three checkpoints of a 135M-parameter model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One check and its outcome."""

    name: str
    is_ok: bool
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceUse:
    """A GPU or a MIG slice, and its users."""

    device: Gpu
    holder: str | None
    """The process of a live run that has a lease on it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """The report of `strop doctor`."""

    machine: Machine
    calibration: Calibration
    checks: tuple[Check, ...]
    devices: tuple[DeviceUse, ...]
    disks: tuple[Disk, ...]


def diagnose(runs_path: Path, *, cache_dir: Path | None = None, time_limit_s: float = 0.5) -> Diagnosis:
    """Check this machine and measure it, in at most about five times `time_limit_s`.

    Raises: StoreError if the measurement cannot be written to the cache.
    """
    # As many threads as a run has: the speed depends on it.
    set_threads(None)
    calibration = calibrate_machine(cache_dir=cache_dir, time_limit_s=time_limit_s)
    uri = ModelSpec().uri
    path = find_model(uri, cache_dir)
    model_detail = str(path or f"{uri} is not on this machine; `strop model get {uri}` fetches it")
    checks = (
        Check(name="default model", is_ok=path is not None, detail=model_detail),
        Check(
            name="compiled kernels",
            is_ok=kernel_status().path is not None,
            detail=kernel_status().describe(),
        ),
        _check_disk("cache", cache_dir or user_cache_dir()),
        _check_disk("runs", runs_path),
        *(_check_extra(name) for name in EXTRAS),
    )
    return Diagnosis(
        machine=describe_machine(),
        calibration=calibration,
        checks=checks,
        devices=find_device_uses(),
        disks=tuple(describe_disk(path) for path in (cache_dir or user_cache_dir(), runs_path, Path("/tmp"))),
    )


def find_device_uses() -> tuple[DeviceUse, ...]:
    """List each GPU and slice with the processes that use it and the live run of this user that holds it."""
    devices = report_gpus().devices
    return tuple(DeviceUse(device=device, holder=find_holder(device.uuid)) for device in devices)


def _check_disk(name: str, path: Path) -> Check:
    free_bytes = free_disk_bytes(path)
    detail = f"{free_bytes / 1e9:.1f} GB free at {path}; the demo writes {WANTED_DISK_BYTES / 1e9:.1f} GB"
    return Check(name=f"disk of {name}", is_ok=free_bytes >= WANTED_DISK_BYTES, detail=detail)


def _check_extra(name: str) -> Check:
    missing = []
    for package in EXTRAS[name]:
        try:
            version(package)
        except PackageNotFoundError:
            missing.append(package)
    detail = ", ".join(EXTRAS[name])
    if missing:
        detail = f"{', '.join(missing)} missing; pip install 'strop[{name}]' adds it"
    return Check(name=f"extra {name}", is_ok=not missing, detail=detail)


# Generation and learning with a run's model, in two sizes each: the difference of the timings is the time of
# the work, the rest is overhead. It takes ten seconds on two cores with 135M parameters, and imports torch.
PROMPT_TOKENS = 16
REPLY_TOKENS = 24
FEW_ROWS, MANY_ROWS = 8, 64
NUM_TRIES = 1
"""Tries of each size after a warm-up; the shortest counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timings:
    """Seconds of generation for few and many rows, and of a small and a large learning step."""

    few_rows_s: float
    many_rows_s: float
    small_step_s: float
    large_step_s: float
    num_small: int
    """Positions of the small step; all but those of prompts are scored."""
    num_large: int


def measure_machine(
    spec: RunSpec, model_dir: Path, *, cache_dir: Path | None = None, time_limit_s: float = 0.5
) -> Efficiency:
    """Measure this machine and a model's efficiency on it, and write both to the cache.

    Raises: ConfigError if the model cannot be loaded; StoreError if the cache cannot be written.
    """
    calibration = calibrate_machine(cache_dir=cache_dir, time_limit_s=time_limit_s)
    spec, _ = settle_format(spec, describe_machine(), None)
    is_bf16 = spec.model.dtype == "bfloat16"
    size = read_model_size(model_dir)
    efficiency = derive_efficiency(
        time_work(spec, model_dir),
        size,
        dtype=spec.model.dtype,
        gflops=calibration.gemm_bf16_gflops if is_bf16 else calibration.gemm_fp32_gflops,
        copy_gb_per_s=calibration.copy_gb_per_s,
        cpu_name=calibration.cpu_name,
        source=f"measured here with {spec.model.uri} in {spec.model.dtype},"
        f" {calibration.num_threads} threads",
    )
    write_efficiency(efficiency, cache_dir)
    return efficiency


def derive_efficiency(
    timings: Timings,
    size: ModelSize,
    *,
    dtype: str,
    gflops: float,
    copy_gb_per_s: float,
    cpu_name: str | None,
    source: str,
) -> Efficiency:
    """Turn timings into shares of the machine's speed: a difference of sizes is work, the rest overhead.

    Shares are capped at 1 and overheads at 0, because timings of a busy machine may exceed these bounds.
    """
    extra_rows = MANY_ROWS - FEW_ROWS
    decode = decode_flop(size, extra_rows * REPLY_TOKENS)
    per_row_s = max((timings.many_rows_s - timings.few_rows_s) / extra_rows, 1e-9)
    prefill_s = prefill_flop(size, PROMPT_TOKENS) / (gflops * 1e9)
    decode_step_s = max(timings.few_rows_s - FEW_ROWS * per_row_s - prefill_s, 0.0) / REPLY_TOKENS
    extra = timings.num_large - timings.num_small
    learn_s = max(timings.large_step_s - timings.small_step_s, 1e-9)
    rate = learn_flop(size, extra, extra) / learn_s
    small_s = learn_flop(size, timings.num_small, timings.num_small) / rate
    update_s = max(timings.small_step_s - small_s, 1e-9)
    return Efficiency(
        learn_frac=min(rate / (gflops * 1e9), 1.0),
        decode_frac=min(decode / (per_row_s * extra_rows) / (gflops * 1e9), 1.0),
        decode_layer_s=decode_step_s / size.num_layers,
        update_frac=min(state_bytes(size, dtype) / (update_s * copy_gb_per_s * 1e9), 1.0),
        cpu_name=cpu_name,
        source=source,
        is_measured=True,
    )


def time_work(spec: RunSpec, model_dir: Path) -> Timings:
    """Time generation of few and many rows, and steps of a quarter of a micro-batch and of a full one."""
    from strop.engine.native import NativeEngine
    from strop.policy.language_model import DTYPES, LanguageModel
    from strop.policy.learner import Learner
    from strop.tokenizer import Tokenizer

    model = LanguageModel.load(model_dir, dtype=DTYPES[spec.model.dtype])
    engine = NativeEngine(model, Tokenizer.load(model_dir), max_num_seqs=MANY_ROWS)
    # A learning rate so small that no weight changes.
    learner = Learner(model, OptimizerSpec(lr=1e-12))
    full = spec.train.micro_batch_tokens or DEFAULT_MICRO_BATCH_POSITIONS
    small = make_groups(max(full // 4 // (REPLY_TOKENS * 8), 1), model.shape.vocab_size)
    large = make_groups(max(full // (REPLY_TOKENS * 8), 2), model.shape.vocab_size)
    vocab_size = model.shape.vocab_size
    timings = Timings(
        few_rows_s=shortest_s(lambda: asyncio.run(_generate(engine, FEW_ROWS, vocab_size))),
        many_rows_s=shortest_s(lambda: asyncio.run(_generate(engine, MANY_ROWS, vocab_size))),
        small_step_s=shortest_s(lambda: _learn(learner, small)),
        large_step_s=shortest_s(lambda: _learn(learner, large)),
        num_small=sum(group.num_positions for group in small),
        num_large=sum(group.num_positions for group in large),
    )
    asyncio.run(engine.close())
    return timings


def shortest_s(work: Callable[[], object], num_tries: int = NUM_TRIES) -> float:
    """Return the shortest time of several tries, after a warm-up."""
    work()
    tries = []
    for _ in range(num_tries):
        started_at = time.perf_counter()
        work()
        tries.append(time.perf_counter() - started_at)
    return min(tries)


def make_groups(num_groups: int, vocab_size: int) -> list[PackedGroup]:
    """Return groups of eight replies to a prompt of one token, so that nearly all positions are scored."""
    from strop.policy.packing import PackedGroup, PackedReply

    rng = np.random.default_rng(0)
    replies = [
        PackedReply(
            token_ids=rng.integers(0, vocab_size, REPLY_TOKENS, dtype=np.int32),
            is_scored=np.ones(REPLY_TOKENS, dtype=bool),
            engine_logprobs=np.full(REPLY_TOKENS, -1.0, dtype=np.float32),
            advantage=1.0,
            weight=1.0 / (8 * num_groups * REPLY_TOKENS),
        )
        for _ in range(8 * num_groups)
    ]
    prompt_ids = np.zeros(1, dtype=np.int32)
    return [
        PackedGroup(prompt_ids=prompt_ids, replies=tuple(replies[8 * index : 8 * index + 8]))
        for index in range(num_groups)
    ]


async def _generate(engine: NativeEngine, num_rows: int, vocab_size: int) -> None:
    prompt_ids = np.arange(1, PROMPT_TOKENS + 1, dtype=np.int32) % np.int32(vocab_size)
    await asyncio.gather(
        *(
            engine.generate(
                GenerationRequest(
                    prompt_ids=prompt_ids,
                    seed=row,
                    sampling=Sampling(),
                    max_tokens=REPLY_TOKENS,
                    # No terminator: every row decodes to its limit.
                    stop_token_ids=frozenset(),
                )
            )
            for row in range(num_rows)
        )
    )


def _learn(learner: Learner, groups: list[PackedGroup]) -> None:
    from strop.train.step import cross_entropy

    learner.step(groups, temperature=1.0, token_terms=cross_entropy)
