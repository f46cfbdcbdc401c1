"""Gradients and log-probabilities of strop's paths against transformers' own padded forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from benchmarks.gpu.models import QWEN_0_5B, QWEN_1_5B, SMALL, TINY, RandomModel, save_model
from benchmarks.gpu.result import PartResult, Setting
from strop.policy.attention import PrefixSharedAttention
from strop.policy.language_model import LanguageModel
from strop.policy.learner import Learner
from strop.policy.objective import ScoredTokens, TokenTerms
from strop.policy.packing import PackedGroup, PackedReply
from strop.policy.shared_attention import compiled_kernel, find_flex_flaw
from strop.spec.train import OptimizerSpec

WANTED_COSINE = 0.999
ALLOWED_ERROR_RATIO = 1.1
"""In bf16: how much further than transformers' own bf16 a gradient may be from the one in fp32."""
Gradients = dict[str, torch.Tensor]


def run_parity(setting: Setting) -> PartResult:
    """Compare gradients in both types, with both attentions."""
    result = PartResult()
    # fp32 products in TF32 would hide differences behind their own.
    torch.backends.cuda.matmul.allow_tf32 = False
    model = SMALL if setting.is_gpu else TINY
    groups = draw_groups(model, num_groups=4 if setting.is_gpu else 2)
    for dtype in (torch.float32, torch.bfloat16):
        path = save_model(model, setting.work_dir / str(dtype).removeprefix("torch."), dtype)
        # Rounding alone moves a bf16 gradient by a fifth here, so fp32 over the same weights is the measure.
        exact = padded_gradients(path, groups, setting.device, torch.float32)
        allowed = 1e-3
        if dtype is torch.bfloat16:
            rounded = padded_gradients(path, groups, setting.device, dtype)
            allowed = ALLOWED_ERROR_RATIO * compare_gradients(rounded, exact)[1]
        _compare(result, f"{_word(dtype)}, attention of this device", path, groups, (exact, allowed), setting)
        with mock.patch("strop.policy.language_model.build_shared_attention", PrefixSharedAttention):
            _compare(result, f"{_word(dtype)}, padded attention", path, groups, (exact, allowed), setting)
    if setting.is_gpu:
        _check_flex(result, setting)
    return result


def draw_groups(model: RandomModel, num_groups: int) -> list[PackedGroup]:
    """Return ragged groups of four, a prompt of one token and a reply of one token among them."""
    random = np.random.default_rng(0)
    groups = []
    for index in range(num_groups):
        prompt_len = 1 if index == 0 else int(random.integers(5, 160 if model is SMALL else 20))
        reply_lens = [1, *(int(random.integers(2, 200 if model is SMALL else 24)) for _ in range(3))]
        replies = tuple(
            PackedReply(
                token_ids=random.integers(2, model.size.vocab_size, length).astype(np.int32),
                is_scored=np.ones(length, dtype=np.bool_),
                engine_logprobs=np.zeros(length, dtype=np.float32),
                advantage=float(random.normal()),
                weight=1.0 / (num_groups * 4 * length),
            )
            for length in reply_lens
        )
        prompt = random.integers(2, model.size.vocab_size, prompt_len).astype(np.int32)
        groups.append(PackedGroup(prompt_ids=prompt, replies=replies))
    return groups


def minus_advantage(tokens: ScoredTokens, /) -> TokenTerms:
    """Return -A logp and its derivative."""
    return TokenTerms(loss_N=-tokens.advantage_M * tokens.logprob_M, grad_N=-tokens.advantage_M)


def padded_gradients(
    path: Any, groups: Sequence[PackedGroup], device: torch.device, dtype: torch.dtype
) -> Gradients:
    """Compute the same gradients the plain way: rows in full, padded, all logits, autograd throughout."""
    module: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")
    module = module.to(device).eval()
    rows = [(group.prompt_ids, reply) for group in groups for reply in group.replies]
    width = max(len(prompt) + len(reply.token_ids) for prompt, reply in rows)
    token_ids = torch.zeros(len(rows), width, dtype=torch.int64, device=device)
    mask, scale = torch.zeros_like(token_ids), torch.zeros(len(rows), width, device=device)
    for index, (prompt, reply) in enumerate(rows):
        whole = np.concatenate([prompt, reply.token_ids]).astype(np.int64)
        token_ids[index, : len(whole)] = torch.from_numpy(whole).to(device)
        mask[index, : len(whole)] = 1
        scale[index, len(prompt) : len(whole)] = -reply.advantage * reply.weight
    logits = module(input_ids=token_ids, attention_mask=mask, use_cache=False).logits
    all_logprobs = torch.log_softmax(logits[:, :-1].float(), dim=-1)
    chosen = all_logprobs.gather(2, token_ids[:, 1:, None])[:, :, 0]
    (scale[:, 1:] * chosen).sum().backward()  # type: ignore[no-untyped-call]
    return {name: part.grad for name, part in module.named_parameters() if part.grad is not None}


def compare_gradients(ours: Gradients, expected: Gradients) -> tuple[float, float]:
    """Return the cosine of two gradients as whole vectors, and the relative length of their difference."""
    assert ours.keys() == expected.keys()
    pairs = [(ours[name].double().flatten(), expected[name].double().flatten()) for name in expected]
    product = sum(float(one @ two) for one, two in pairs)
    own, other = (sum(float(pair[side] @ pair[side]) for pair in pairs) ** 0.5 for side in (0, 1))
    gap = sum(float((one - two).square().sum()) for one, two in pairs) ** 0.5
    return product / (own * other), gap / other


def _compare(
    result: PartResult,
    name: str,
    path: Any,
    groups: Sequence[PackedGroup],
    expected: tuple[Gradients, float],
    setting: Setting,
) -> None:
    exact, allowed = expected
    dtype = torch.float32 if name.startswith("fp32") else torch.bfloat16
    model = LanguageModel.load(path, dtype=dtype, device=str(setting.device))
    learner = Learner(model, OptimizerSpec())
    ours = learner.gradients(groups, temperature=1.0, token_terms=minus_advantage)
    cosine, gap = compare_gradients(ours, exact)
    result.check(
        f"gradient, {name}",
        gap <= allowed and (dtype is torch.bfloat16 or cosine >= WANTED_COSINE),
        f"cosine {cosine:.6f}, relative difference {gap:.2g} of {allowed:.2g} allowed, "
        f"fused layers {model.fused is not None}",
    )


def _check_flex(result: PartResult, setting: Setting) -> None:
    """Prove the compiled kernel on the heads of real models."""
    for model in (QWEN_0_5B,) if setting.is_quick else (QWEN_0_5B, QWEN_1_5B):
        sizes = (model.size.num_heads, model.size.num_kv_heads, model.size.head_width)
        flaw = find_flex_flaw(compiled_kernel(), sizes, torch.bfloat16, setting.device)
        result.check(f"FlexAttention, heads of {model.name}", flaw is None, flaw or "compiled and right")


def _word(dtype: torch.dtype) -> str:
    return "fp32" if dtype is torch.float32 else "bf16"
