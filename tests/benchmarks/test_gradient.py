"""Gradients of one batch: the comparison by hand, and strop's arm against plain transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from benchmarks.arms import strop_gradient
from benchmarks.arms.gradient_order import GradientGroup, count_tokens, read_groups, write_groups
from benchmarks.arms.trl_gradient import build_micro_batches
from benchmarks.arms.worker import generation_record
from benchmarks.cases import Case
from benchmarks.gradient_cosine import match_gradients
from benchmarks.harness import ArmFailed

CASE = Case(name="tiny", kind="grpo", num_prompts=2, group_size=2, max_new_tokens=6, rewards="forced")
GROUPS = [
    GradientGroup(prompt_ids=[5, 6, 7], replies=[[8, 9], [10]], advantages=[1.0, -1.0]),
    GradientGroup(prompt_ids=[11], replies=[[12, 13, 14], [15, 16]], advantages=[-0.5, 0.5]),
]


def gradient(**values: list[float]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(numbers) for name, numbers in values.items()}


def test_two_gradients_are_compared_as_one_vector_and_by_parameter() -> None:
    gradients = {"ours": gradient(a=[3.0, 0.0], b=[0.0, 4.0]), "rival": gradient(a=[3.0, 0.0], b=[3.0, 4.0])}
    match = match_gradients(gradients, "ours", "rival")
    # <ours, rival> = 9 + 16 = 25; lengths 5 and sqrt(34): cosine 5 / sqrt(34).
    assert match.cosine == pytest.approx(5 / 34**0.5)
    assert match.norm_ratio == pytest.approx(5 / 34**0.5)
    # a is the same in both; for b it is 16 / (4 * 5).
    assert match.lowest_name == "b"
    assert match.lowest_cosine == pytest.approx(0.8)
    assert match_gradients(gradients, "ours", "ours").cosine == pytest.approx(1.0)


def test_gradients_of_different_parameters_are_refused() -> None:
    gradients = {"ours": gradient(a=[1.0]), "rival": gradient(b=[1.0])}
    with pytest.raises(ArmFailed, match=r"different parameters: \['a', 'b'\]"):
        match_gradients(gradients, "ours", "rival")


def test_trl_gets_prompts_padded_on_the_left_and_replies_on_the_right() -> None:
    first, second = build_micro_batches(GROUPS, num_rows=3, pad_id=0)
    assert first["prompt_ids"].tolist() == [[5, 6, 7], [5, 6, 7], [0, 0, 11]]
    assert first["prompt_mask"].tolist() == [[1, 1, 1], [1, 1, 1], [0, 0, 1]]
    assert first["completion_ids"].tolist() == [[8, 9, 0], [10, 0, 0], [12, 13, 14]]
    assert first["completion_mask"].tolist() == [[1, 1, 0], [1, 0, 0], [1, 1, 1]]
    assert first["advantages"].tolist() == [1.0, -1.0, -0.5]
    assert second["prompt_ids"].tolist() == [[11]]
    # The mean is over all tokens of the step, not of the micro-batch.
    assert int(first["num_items_in_batch"]) == int(second["num_items_in_batch"]) == count_tokens(GROUPS) == 8


def reference(model_dir: Path) -> dict[str, torch.Tensor]:
    """Differentiate minus the token mean of advantage times log-probability, row by row, unpadded."""
    module: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    for group in GROUPS:
        for reply, advantage in zip(group.replies, group.advantages, strict=True):
            token_ids = torch.tensor([group.prompt_ids + reply])
            logits = module(token_ids).logits[0, len(group.prompt_ids) - 1 : -1]
            logprobs = torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(reply)[:, None])
            loss: Any = -advantage * logprobs.sum() / count_tokens(GROUPS)
            loss.backward()
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def test_strops_gradient_is_that_of_the_loss_as_written(tiny_model_dir: Path) -> None:
    ours = strop_gradient.compute_gradient(CASE, tiny_model_dir, GROUPS, "float32")
    match = match_gradients({"ours": ours, "rival": reference(tiny_model_dir)}, "ours", "rival")
    assert match.lowest_cosine > 1 - 1e-6
    assert match.norm_ratio == pytest.approx(1.0, abs=1e-5)


def test_the_batch_is_a_step_of_the_case(tiny_model_dir: Path, tmp_path: Path) -> None:
    groups = strop_gradient.sample_groups(CASE, tiny_model_dir, "bfloat16")
    write_groups(tmp_path / "rollouts.json", groups)
    assert read_groups(tmp_path / "rollouts.json") == groups
    assert [len(group.replies) for group in groups] == [2, 2]
    assert all(1 <= len(reply) <= 6 for group in groups for reply in group.replies)
    # One reply of each pair has reward 1, the other 0: 0.5 from the mean, spread sqrt(0.5).
    for group in groups:
        assert sorted(group.advantages) == pytest.approx([-(0.5**0.5), 0.5**0.5], rel=1e-3)


def test_a_batch_of_generation_is_reported_by_hand() -> None:
    record = generation_record(2.0, [3, 5], [10, 30], 7)
    assert record["tok_per_s"] == 20.0  # 40 tokens in 2 s
    assert (record["Lp_mean"], record["Lp_max"], record["Lc_mean"], record["Lc_max"]) == (4.0, 5, 20.0, 30)
    assert (record["scored_tok"], record["step_s"], record["t_gen"], record["peak_bytes"]) == (
        40,
        2.0,
        2.0,
        7,
    )
