"""One block-sparse kernel over the whole row equals the padded path of CPUs, gradients included.

FlexAttention's own backward refuses CPUs, so gradients run through its mathematical definition, which
is given the very mask that the compiled kernel gets.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch._higher_order_ops.flex_attention import math_attention
from torch.nn.attention.flex_attention import BlockMask

from strop.policy import shared_attention
from strop.policy.attention import AttentionContext, PrefixSharedAttention, ScoreRule
from strop.policy.packing import PackedLayout
from strop.policy.shared_attention import (
    BLOCK,
    FlexSharedAttention,
    build_shared_attention,
    find_blocks,
    find_flex_flaw,
    label_positions,
    padded_length,
    run_flex,
)

CPU = torch.device("cpu")
LAYOUTS = {
    "short": PackedLayout(
        prompt_lens_P=(1, 4, 2, 3), reply_lens_S=(3, 0, 1, 6, 0, 0, 2), group_of_S=(0, 1, 1, 1, 2, 2, 3)
    ),
    "blocks wide": PackedLayout(
        prompt_lens_P=(200, 1, 130), reply_lens_S=(300, 5, 140, 128), group_of_S=(0, 0, 1, 2)
    ),
    "whole blocks": PackedLayout(
        prompt_lens_P=(128, 256), reply_lens_S=(128, 256, 128), group_of_S=(0, 0, 1)
    ),
    "prompts alone": PackedLayout.of_prompts([2, 3]),
}


def reference_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: BlockMask, scale: float
) -> torch.Tensor:
    """Compute what FlexAttention promises, in plain operators."""

    def keep(score: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return score

    output: torch.Tensor = math_attention(query, key, value, keep, mask.as_tuple(), scale, {})[0]
    return output


def outputs_and_gradients(
    attention: AttentionContext, layout: PackedLayout, num_kv_heads: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    query, key, value, upstream = (
        torch.randn(heads, layout.num_positions, 8, dtype=torch.float64, generator=random).to(dtype)
        for heads in (4, num_kv_heads, num_kv_heads, 4)
    )
    inputs = [part.requires_grad_() for part in (query, key, value)]
    output = attention.attend(0, query, key, value, 0.3)
    return [output.detach(), *torch.autograd.grad(output, inputs, upstream.transpose(0, 1))]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_flex_equals_the_padded_path(name: str, num_kv_heads: int, dtype: torch.dtype, limit: float) -> None:
    layout = LAYOUTS[name]
    flex = FlexSharedAttention(layout, CPU, reference_kernel)
    padded = PrefixSharedAttention(layout, CPU)
    ours = outputs_and_gradients(flex, layout, num_kv_heads, dtype)
    expected = outputs_and_gradients(padded, layout, num_kv_heads, dtype)
    for one, two in zip(ours, expected, strict=True):
        assert float((one - two).norm() / two.norm()) <= limit


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_flex_attention_itself_reads_the_mask_alike() -> None:
    layout = LAYOUTS["blocks wide"]
    random = torch.Generator().manual_seed(0)
    query, key = (torch.randn(heads, layout.num_positions, 8, generator=random) for heads in (4, 2))
    ours = FlexSharedAttention(layout, CPU, run_flex).attend(0, query, key, key, 0.3)
    expected = PrefixSharedAttention(layout, CPU).attend(0, query, key, key, 0.3)
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("name", LAYOUTS)
def test_blocks_are_those_of_the_visible_pairs(name: str) -> None:
    """A forgotten block would hide keys from the compiled kernel, and a wrongly full one show too many."""
    layout = LAYOUTS[name]
    width = padded_length(layout.num_positions)
    groups, replies = label_positions(layout, width)
    visible = (groups[:, None] == groups) & ((replies < 0) | (replies[:, None] == replies))
    visible &= np.tri(width, dtype=np.bool_)
    blocks = visible.reshape(width // BLOCK, BLOCK, width // BLOCK, BLOCK)
    touched, full = find_blocks(layout, width)
    is_row_real = np.arange(0, width, BLOCK) < layout.num_positions
    assert (touched >= blocks.any(axis=(1, 3)))[is_row_real].all()
    assert (full <= blocks.all(axis=(1, 3))).all()
    assert not (full & ~touched).any()


def test_lengths_are_few() -> None:
    # 128 and 129 to 128 and 256; above 1024 in steps of 1024.
    assert [padded_length(count) for count in (1, 128, 129, 1024, 1025, 16_000)] == [
        *(128, 128, 256, 1024),
        *(2048, 16_384),
    ]


def test_processors_and_prompts_alone_take_the_padded_path() -> None:
    assert isinstance(build_shared_attention(LAYOUTS["short"], CPU), PrefixSharedAttention)


def test_a_right_kernel_is_proven_and_a_wrong_one_is_named() -> None:
    assert find_flex_flaw(reference_kernel, (4, 2, 8), torch.float32, CPU) is None

    def forgets_scale(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: BlockMask, scale: float
    ) -> torch.Tensor:
        return reference_kernel(query, key, value, mask, 1.0)

    flaw = find_flex_flaw(forgets_scale, (4, 2, 8), torch.float32, CPU)
    assert flaw is not None
    assert flaw.startswith("its output and gradients differ by ")


def test_a_kernel_that_cannot_be_compiled_is_replaced_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> torch.Tensor:
        raise RuntimeError("no compiler here\nand more")

    monkeypatch.setattr(shared_attention, "compiled_kernel", lambda: fails)
    shared_attention._compiled_flaw.cache_clear()
    layout = LAYOUTS["short"]
    attention = shared_attention._ProvenAttention(layout, CPU)
    with pytest.warns(RuntimeWarning, match=r"not used for 4 query and 2 .* no compiler here\); padded"):
        ours = outputs_and_gradients(attention, layout, 2, torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outputs_and_gradients(attention, layout, 2, torch.float32)
    expected = outputs_and_gradients(PrefixSharedAttention(layout, CPU), layout, 2, torch.float32)
    assert torch.equal(ours[0], expected[0])
    shared_attention._compiled_flaw.cache_clear()


def test_layers_that_the_kernel_does_not_compute_take_the_padded_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In one model, as Gemma 3's windows beside its full layers."""
    asked: list[int] = []

    def counts(*inputs: Any) -> torch.Tensor:
        asked.append(1)
        return reference_kernel(*inputs)

    monkeypatch.setattr(shared_attention, "compiled_kernel", lambda: counts)
    monkeypatch.setattr(shared_attention, "_compiled_flaw", lambda *_: None)
    layout = LAYOUTS["short"]
    attention = shared_attention._ProvenAttention(layout, CPU)
    random = torch.Generator().manual_seed(0)
    query, key = (torch.randn(heads, layout.num_positions, 8, generator=random) for heads in (4, 2))
    sinks = torch.tensor([0.5, -1.0, 0.0, 2.0])
    rules = (ScoreRule(window=3), ScoreRule(cap=0.5), ScoreRule(sinks=sinks))
    for rule, value in [*((rule, key) for rule in rules), (ScoreRule(), key[:, :, :5])]:
        ours = attention.attend(0, query, key, value, 0.3, rule)
        expected = PrefixSharedAttention(layout, CPU).attend(0, query, key, value, 0.3, rule)
        torch.testing.assert_close(ours, expected)
    assert asked == []
    attention.attend(0, query, key, key, 0.3)
    assert asked == [1]
