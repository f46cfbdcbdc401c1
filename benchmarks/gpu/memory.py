"""Memory of the LM head, and of supervised training, as the number of tokens grows.

Full logits would take vocabulary x tokens x 6 bytes and more. What is claimed is that memory beyond the
hidden states themselves, and their gradient, does not grow with either.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch

from benchmarks.gpu.device import MemoryMeter, synchronize
from benchmarks.gpu.models import QWEN_0_5B, TINY, build_model
from benchmarks.gpu.parity import minus_advantage
from benchmarks.gpu.result import PartResult, Setting
from strop.policy.footprint import GPU_HEAD_BYTES
from strop.policy.head import Head, HeadGradients, TokenGradient, choose_chunk_rows, loss_and_gradients
from strop.policy.learner import Learner
from strop.policy.packing import PackedBatch, PackedGroup, PackedReply
from strop.spec.train import OptimizerSpec

_GPU_COUNTS = (8_192, 16_384, 32_768, 65_536)
_CPU_COUNTS = (256, 512)
_REPLY_TOKENS = 1024
_MICRO_BATCH = 8_192


def run_head_memory(setting: Setting) -> PartResult:
    """Measure the head alone at V = 151,936, then supervised steps of a whole model."""
    result = PartResult()
    counts: Sequence[int] = _GPU_COUNTS if setting.is_gpu else _CPU_COUNTS
    if setting.is_quick:
        counts = (counts[0], counts[-1])
    points = [_measure_head(count, setting) for count in counts]
    result.details["head"] = points
    largest = points[-1]
    result.measure(f"head at {largest['num_scored']} tokens", largest["seconds"], "s")
    if setting.is_gpu:
        worst = max(point["workspace_bytes"] for point in points)
        limit = 1.25 * GPU_HEAD_BYTES
        result.check(
            "workspace of the head",
            worst <= limit,
            f"{worst / 2**30:.2f} GiB at most, {limit / 2**30} allowed",
        )
        growth = largest["workspace_bytes"] - points[0]["workspace_bytes"]
        per_token = growth / (largest["num_scored"] - points[0]["num_scored"])
        result.check(
            "workspace does not grow with tokens", per_token <= 64.0, f"{per_token:.1f} bytes a token"
        )
    _measure_supervised(result, setting)
    return result


def _measure_head(num_scored: int, setting: Setting) -> dict[str, float]:
    """Return the peak, and what of it is neither a gradient nor an answer per token."""
    size = (QWEN_0_5B if setting.is_gpu else TINY).size
    device, dtype = setting.device, torch.bfloat16
    torch.manual_seed(0)
    weight = torch.randn(size.vocab_size, size.hidden_width, device=device, dtype=dtype) * 0.02
    hidden = torch.randn(num_scored, size.hidden_width, device=device, dtype=dtype)
    into = HeadGradients(torch.zeros(weight.shape, device=device))
    batch = PackedBatch.of_groups([_supervised_group(num_scored, size.vocab_size)], device)

    def rule(logprob: torch.Tensor, tokens: slice) -> TokenGradient:
        return TokenGradient(loss_M=-logprob / num_scored, grad_M=torch.full_like(logprob, -1 / num_scored))

    def run() -> None:
        loss_and_gradients(hidden, Head(weight), batch, temperature=1.0, rule=rule, into=into)

    run()  # Compiles.
    meter = MemoryMeter(device)
    synchronize(device)
    begun_at = time.perf_counter()
    run()
    synchronize(device)
    seconds = time.perf_counter() - begun_at
    peak = meter.peak_bytes() - meter.base_bytes
    # The gradient of the hidden states; a log-probability per token; the head's own gradient, once.
    rows = choose_chunk_rows(device, dtype, size.vocab_size)
    known = hidden.numel() * 2 + 4 * num_scored + 2 * weight.numel() + 2 * rows * size.hidden_width
    return {
        "num_scored": num_scored,
        "peak_bytes": peak,
        "workspace_bytes": peak - known,
        # Of all logits in bf16 and fp32.
        "full_logits_bytes": 6 * num_scored * size.vocab_size,
        "seconds": seconds,
    }


def _measure_supervised(result: PartResult, setting: Setting) -> None:
    """Take one supervised step over more and more tokens, in micro-batches of a fixed size."""
    random = QWEN_0_5B if setting.is_gpu else TINY
    counts = (_GPU_COUNTS[:2] if setting.is_quick else _GPU_COUNTS) if setting.is_gpu else _CPU_COUNTS
    model = build_model(random, setting.device, torch.bfloat16)
    micro_batch = _MICRO_BATCH if setting.is_gpu else 128
    reply = _REPLY_TOKENS if setting.is_gpu else 32
    learner = Learner(model, OptimizerSpec(lr=1e-6), micro_batch_positions=micro_batch)
    peaks = []
    for index, count in enumerate((counts[0], *counts)):
        groups = [_supervised_group(reply, random.size.vocab_size) for _ in range(count // reply)]
        meter = MemoryMeter(setting.device)
        begun_at = time.perf_counter()
        learner.step(groups, temperature=1.0, token_terms=minus_advantage)
        synchronize(setting.device)
        if index > 0:  # The first one warms up.
            seconds = time.perf_counter() - begun_at
            peaks.append({"tokens": count, "peak_bytes": meter.peak_bytes(), "seconds": seconds})
    result.details["supervised"] = peaks
    last = peaks[-1]
    result.measure(f"supervised step, {last['tokens']} tokens, peak", last["peak_bytes"] / 2**30, "GiB")
    result.measure("supervised tokens", last["tokens"] / last["seconds"], "tokens/s")
    if setting.is_gpu:
        growth = (last["peak_bytes"] - peaks[0]["peak_bytes"]) / peaks[0]["peak_bytes"]
        result.check("supervised memory does not grow with tokens", growth <= 0.05, f"{growth:+.1%}")


def _supervised_group(num_tokens: int, vocab_size: int) -> PackedGroup:
    """Return a prompt of one token and a demonstration."""
    random = np.random.default_rng(num_tokens)
    reply = PackedReply(
        token_ids=random.integers(2, vocab_size, num_tokens).astype(np.int32),
        is_scored=np.ones(num_tokens, dtype=np.bool_),
        engine_logprobs=np.full(num_tokens, np.nan, dtype=np.float32),
        advantage=1.0,
        weight=1.0 / num_tokens,
    )
    return PackedGroup(prompt_ids=np.array([2], dtype=np.int32), replies=(reply,))
