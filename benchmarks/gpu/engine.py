"""The native engine with graphs, without them, and against the learner's own log-probabilities."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from unittest import mock

import numpy as np
import torch

from benchmarks.gpu.models import SMALL, TINY, save_model
from benchmarks.gpu.result import PartResult, Setting
from strop.engine import Completion, GenerationRequest
from strop.engine.decoding import StaticStep
from strop.engine.native import NativeEngine
from strop.policy.language_model import LanguageModel
from strop.policy.scoring import score_replies
from strop.rollout import Sampling
from strop.tokenizer import Tokenizer

_LARGEST_GAP = {torch.float32: 1e-3, torch.bfloat16: 0.06}
"""Mean difference of log-probabilities between engine and learner, nats; the gate's own limits."""


def run_engine(setting: Setting) -> PartResult:
    """Check what graphs draw, and how likely the learner finds it."""
    result = PartResult()
    torch.backends.cuda.matmul.allow_tf32 = False
    size = SMALL if setting.is_gpu else TINY
    for dtype in (torch.float32, torch.bfloat16):
        word = "fp32" if dtype is torch.float32 else "bf16"
        path = save_model(size, setting.work_dir / word, dtype)
        model = LanguageModel.load(path, dtype=dtype, device=str(setting.device))
        tokenizer = Tokenizer.load(path)
        requests = _draw_requests(model, num_groups=8 if setting.is_gpu else 3)
        engine = NativeEngine(model, tokenizer, max_num_seqs=24 if setting.is_gpu else 8, is_static=True)
        replayed = asyncio.run(_generate(engine, requests))
        num_graphs = _num_graphs(engine)
        if setting.is_gpu:
            result.check(f"graphs captured, {word}", num_graphs > 0, f"{num_graphs} forms")
        with mock.patch.object(StaticStep, "_capture", return_value=None):
            plain = NativeEngine(model, tokenizer, max_num_seqs=24 if setting.is_gpu else 8, is_static=True)
            called = asyncio.run(_generate(plain, requests))
        same = _share_equal(replayed, called)
        result.check(f"replies with and without graphs, {word}", same == 1.0, f"{same:.1%} equal")
        _check_scores(result, word, model, requests, replayed)
    return result


def _num_graphs(engine: NativeEngine) -> int:
    batch = engine._batch
    return 0 if batch is None or batch._static is None else batch._static.num_graphs


def _draw_requests(model: LanguageModel, num_groups: int) -> list[GenerationRequest]:
    """Return groups of four, greedy and sampled, of ragged lengths."""
    random = np.random.default_rng(1)
    requests: list[GenerationRequest] = []
    for _ in range(num_groups):
        prompt_ids = random.integers(2, model.shape.vocab_size, int(random.integers(1, 40))).astype(np.int32)
        requests += [
            GenerationRequest(
                prompt_ids=prompt_ids,
                seed=int(random.integers(2**63)),
                sampling=Sampling(temperature=temperature),
                max_tokens=int(random.integers(2, 60)),
                stop_token_ids=frozenset(),
            )
            for temperature in (0.0, 1.0, 1.0, 0.7)
        ]
    return requests


async def _generate(engine: NativeEngine, requests: Sequence[GenerationRequest]) -> list[Completion]:
    return list(await asyncio.gather(*(engine.generate(request) for request in requests)))


def _share_equal(left: Sequence[Completion], right: Sequence[Completion]) -> float:
    pairs = zip(left, right, strict=True)
    equal: list[bool] = [one.token_ids.tolist() == two.token_ids.tolist() for one, two in pairs]
    return sum(equal) / len(equal)


def _check_scores(
    result: PartResult,
    word: str,
    model: LanguageModel,
    requests: Sequence[GenerationRequest],
    completions: Sequence[Completion],
) -> None:
    gaps = np.concatenate(
        [
            score_replies(model, request.prompt_ids, [completion.token_ids], request.sampling.temperature)[0]
            - completion.logprobs
            for request, completion in zip(requests, completions, strict=True)
        ]
    )
    mean, limit = float(np.abs(gaps).mean()), _LARGEST_GAP[model.dtype]
    result.check(
        f"log-probabilities of engine and learner, {word}",
        mean <= limit,
        f"mean difference {mean:.2g} nats over {len(gaps)} tokens, allowed {limit:g}",
    )
