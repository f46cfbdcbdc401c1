"""GRPO steps at real sizes: tokens a second, memory, and the share of what the device allows."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence

import torch

from benchmarks.gpu.device import MemoryMeter
from benchmarks.gpu.models import QWEN_0_5B, QWEN_1_5B, TINY, RandomModel, build_model, make_tokenizer
from benchmarks.gpu.result import PartResult, Setting
from benchmarks.gpu.work import GrpoStep, StepTimes, Workload
from strop.engine.native import NativeEngine
from strop.policy.footprint import ModelSize, read_model_size, state_bytes
from strop.policy.language_model import LanguageModel
from strop.policy.learner import Learner
from strop.spec.train import OptimizerSpec
from strop.tokenizer import Tokenizer

# Lengths like those of GSM8K, of which the reference's rooflines are made as well.
GSM8K_LIKE = Workload(num_prompts=64, group_size=8, prompt_tokens=150, reply_tokens=300)
SHORT = Workload(num_prompts=64, group_size=8, prompt_tokens=45, reply_tokens=64)
MINIATURE = Workload(num_prompts=2, group_size=4, prompt_tokens=9, reply_tokens=12)
_NUM_STEPS = 4
_LARGEST_DRIFT_NATS = 0.06


def run_grpo_0_5b(setting: Setting) -> PartResult:
    """Train a random model of 0.5B's sizes."""
    return _run_random(QWEN_0_5B if setting.is_gpu else TINY, setting)


def run_grpo_1_5b(setting: Setting) -> PartResult:
    """Train a random model of 1.5B's sizes."""
    return _run_random(QWEN_1_5B if setting.is_gpu else TINY, setting)


def run_grpo_real(setting: Setting) -> PartResult:
    """Train the model whose directory was given."""
    assert setting.model_dir is not None
    model = LanguageModel.load(setting.model_dir, dtype=torch.bfloat16, device=str(setting.device))
    tokenizer = Tokenizer.load(setting.model_dir)
    work = SHORT if setting.is_gpu else MINIATURE
    return _measure(model, tokenizer, read_model_size(setting.model_dir), work, setting)


def _run_random(random: RandomModel, setting: Setting) -> PartResult:
    # Weights, their gradients and moments; as much again at most for activations, cache and head.
    needed = 1.5 * state_bytes(random.size, "bfloat16") + 4 * 2**30
    if setting.is_gpu and setting.peaks is not None and setting.peaks.memory_bytes < needed:
        result = PartResult()
        result.details["left_out"] = f"needs {needed / 2**30:.0f} GiB of GPU memory"
        return result
    model = build_model(random, setting.device, torch.bfloat16)
    tokenizer = make_tokenizer(random.size.vocab_size, setting.work_dir / "tokenizer")
    return _measure(model, tokenizer, random.size, GSM8K_LIKE if setting.is_gpu else MINIATURE, setting)


def _measure(
    model: LanguageModel, tokenizer: Tokenizer, size: ModelSize, work: Workload, setting: Setting
) -> PartResult:
    """Take steps for as long as the part may last, the first of which only warms up."""
    result = PartResult()
    begun_at = time.monotonic()
    meter = MemoryMeter(setting.device)
    engine = NativeEngine(model, tokenizer, max_num_seqs=work.num_rows, is_static=True)
    step = GrpoStep(engine, Learner(model, OptimizerSpec(lr=1e-6)), work)
    warm_up = step.take()
    measured: list[StepTimes] = []
    wanted = 1 if setting.is_quick else _NUM_STEPS
    while len(measured) < wanted:
        lasts = (measured or [warm_up])[-1].step_s
        if measured and time.monotonic() - begun_at + lasts > 0.8 * setting.limit_s:
            break
        measured.append(step.take())
    _report(result, measured, work)
    result.measure("peak memory", meter.peak_bytes() / 2**30, "GiB")
    if setting.peaks is not None:
        # Products alone: 2 FLOP per parameter forward, 4 backward; the head sees scored tokens only.
        least_s = [
            6.0
            * (size.body_params * one.num_positions + size.head_params * one.num_tokens)
            / setting.peaks.flop_per_s
            for one in measured
        ]
        shares = [100.0 * least / one.learn_s for least, one in zip(least_s, measured, strict=True)]
        result.measure("share of the peak's products, learning", statistics.median(shares), "%")
    result.details |= {
        "workload": dataclasses.asdict(work),
        "is_fused": model.fused is not None,
        "warm_up": dataclasses.asdict(warm_up),
        "steps": [dataclasses.asdict(one) for one in measured],
    }
    return result


def _report(result: PartResult, steps: Sequence[StepTimes], work: Workload) -> None:
    def median(values: Sequence[float]) -> float:
        return statistics.median(values)

    drift = max(one.drift_mean_nats for one in steps)
    result.check(
        "engine and learner agree while training",
        drift <= _LARGEST_DRIFT_NATS,
        f"{drift:.2g} nats in the mean",
    )
    is_moving = all(one.num_tokens >= work.num_rows and one.grad_norm > 0.0 for one in steps)
    result.check("every reply is trained on", is_moving, f"{len(steps)} steps")
    result.measure("step", median([one.step_s for one in steps]), "s")
    result.measure("generating", median([one.generate_s for one in steps]), "s")
    result.measure("learning", median([one.learn_s for one in steps]), "s")
    result.measure("scored tokens", median([one.num_tokens / one.step_s for one in steps]), "tokens/s")
    result.measure("generated tokens", median([one.num_tokens / one.generate_s for one in steps]), "tokens/s")
    result.measure("trained positions", median([one.num_positions / one.learn_s for one in steps]), "/s")
