"""Attention with shared prompts equals attention over each whole sequence, in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from strop.errors import DataError
from strop.policy.attention import ATTENTION_NAME, PLAIN, PrefixSharedAttention, ScoreRule
from strop.policy.packing import PackedGroup, PackedLayout
from tests.policy.worlds import World, load_model, make_model

PROMPT_LENS = (1, 4, 2, 3)
# Fed lengths: a reply of one token feeds nothing; group 2 has only such replies; group 0 has one.
REPLY_LENS = (3, 0, 1, 6, 0, 0, 2)
GROUP_OF_S = (0, 1, 1, 1, 2, 2, 3)
HEAD_WIDTH = 5


def naive_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: PackedLayout,
    scaling: float,
    rule: ScoreRule = PLAIN,
) -> torch.Tensor:
    """Attend position by position, each over its own list of earlier positions."""
    ratio = query.shape[0] // key.shape[0]
    outputs = []
    sees: list[list[int]] = []
    for start, length in zip(layout.prompt_starts_P.tolist(), layout.prompt_lens_P, strict=True):
        sees += [list(range(start, start + index + 1)) for index in range(length)]
    for row, (start, length) in enumerate(
        zip(layout.reply_starts_S.tolist(), layout.reply_lens_S, strict=True)
    ):
        group = layout.group_of_S[row]
        first = int(layout.prompt_starts_P[group])
        prompt = list(range(first, first + layout.prompt_lens_P[group]))
        sees += [prompt + list(range(start, start + index + 1)) for index in range(length)]
    for position, before in enumerate(sees):
        visible = before if rule.window is None else before[-rule.window :]
        heads = []
        for head in range(query.shape[0]):
            scores = key[head // ratio, visible] @ query[head, position] * scaling
            if rule.cap is not None:
                scores = rule.cap * torch.tanh(scores / rule.cap)
            if rule.sinks is not None:
                scores = torch.cat([scores, rule.sinks[head : head + 1]])
            heads.append(scores.softmax(dim=0)[: len(visible)] @ value[head // ratio, visible])
        outputs.append(torch.stack(heads))
    return torch.stack(outputs)


# Scores of a row above which the fused kernel is called, and scores that short attention takes at once:
# never fused; fused always; short in blocks of few rows.
PATHS = {"short": (2**22, 2**20), "fused": (0, 2**20), "short in blocks": (2**22, 40)}


@pytest.fixture(params=PATHS.values(), ids=list(PATHS))
def _path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    max_row_scores, block_scores = request.param
    monkeypatch.setattr("strop.policy.attention.MAX_ROW_SCORES", max_row_scores)
    monkeypatch.setattr("strop.policy.attention._BLOCK_SCORES", block_scores)


RULES = {
    "plain": {},
    "a window": {"window": 3},
    "a window of two": {"window": 2},
    "a window as long as the context": {"window": 9},
    "a cap": {"cap": 0.7},
    "sinks": {"has_sinks": True},
    "all at once": {"window": 4, "cap": 0.7, "has_sinks": True},
}


@pytest.mark.usefixtures("_path")
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("value_width", [HEAD_WIDTH, 3])
@pytest.mark.parametrize("settings", RULES.values(), ids=list(RULES))
def test_shared_prompts_change_neither_outputs_nor_gradients(
    settings: dict[str, Any], value_width: int, num_kv_heads: int
) -> None:
    layout = PackedLayout(prompt_lens_P=PROMPT_LENS, reply_lens_S=REPLY_LENS, group_of_S=GROUP_OF_S)
    random = torch.Generator().manual_seed(0)
    sizes = [(4, HEAD_WIDTH), (num_kv_heads, HEAD_WIDTH), (num_kv_heads, value_width), (4, value_width)]
    query, key, value, upstream = (
        torch.randn(heads, layout.num_positions, width, dtype=torch.float64, generator=random)
        for heads, width in sizes
    )
    rest = dict(settings)
    has_sinks = rest.pop("has_sinks", False)
    results = []
    for is_naive in (True, False):
        inputs = [x.clone().requires_grad_() for x in (query, key, value)]
        sinks = torch.tensor([0.5, -1.0, 0.0, 2.0], dtype=torch.float64, requires_grad=True)
        rule = ScoreRule(sinks=sinks if has_sinks else None, **rest)
        if is_naive:
            output = naive_attention(inputs[0], inputs[1], inputs[2], layout, 0.3, rule)
        else:
            attention = PrefixSharedAttention(layout, torch.device("cpu"))
            output = attention.attend(0, inputs[0], inputs[1], inputs[2], 0.3, rule)
        asked = [*inputs, sinks] if has_sinks else inputs
        gradients = torch.autograd.grad(output, asked, upstream.transpose(0, 1))
        results.append([output.detach(), *gradients])
    for actual, expected in zip(results[1], results[0], strict=True):
        assert float((actual - expected).norm() / expected.norm()) <= 1e-10


def test_prompts_alone_are_a_layout_too() -> None:
    layout = PackedLayout.of_prompts([2, 3])
    attention = PrefixSharedAttention(layout, torch.device("cpu"))
    query = torch.randn(2, 5, HEAD_WIDTH, dtype=torch.float64)
    output = attention.attend(0, query, query, query, 1.0)
    torch.testing.assert_close(output, naive_attention(query, query, query, layout, 1.0))


def test_an_empty_prompt_is_refused() -> None:
    group = World().packed(1, [2])
    with pytest.raises(DataError, match=r"empty prompt\. Allowed: at least one prompt token\. Next: "):
        PackedLayout.of_groups([PackedGroup(prompt_ids=group.prompt_ids[:0], replies=group.replies)])


def test_a_call_without_context_is_an_error(tmp_path: Path) -> None:
    model = load_model(make_model(tmp_path))
    assert model.module.config._attn_implementation == ATTENTION_NAME
    with pytest.raises(RuntimeError, match="without an attention context"):
        model.module(input_ids=torch.tensor([[1, 2]]), use_cache=False)


def test_strop_attention_does_not_leak_into_other_models(tmp_path: Path) -> None:
    path = make_model(tmp_path)
    load_model(path)
    plain = AutoModelForCausalLM.from_pretrained(path)
    assert plain.config._attn_implementation != ATTENTION_NAME
    assert plain(input_ids=torch.tensor([[1, 2]])).logits.shape == (1, 2, 262)
