"""The packed learner's gradients are those of the naive padded computation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from strop.algorithm import ALGORITHMS, Algorithm
from strop.algorithm.corrections import CORRECTIONS
from strop.algorithm.losses import CLIPPED
from strop.errors import UnfitRecord
from strop.policy.packing import split_by_budget
from strop.rollout import Group
from strop.train.batch import build_batch
from strop.train.step import rl_term
from tests.policy.naive import naive_entropy_gradients, naive_gradients
from tests.policy.worlds import (
    REPLY_LIMIT,
    Gradients,
    World,
    build_learner,
    make_model,
    plain,
    ragged_groups,
    reinforce,
    relative_error,
)

TOLERANCE = 1e-5
"""Relative, per parameter tensor, in float32."""

MODELS: dict[str, dict[str, Any]] = {
    "llama, one query head per key head": {"num_key_value_heads": 4},
    "llama, two, untied head": {"num_key_value_heads": 2, "tie_word_embeddings": False},
    "llama, all on one key head": {"num_key_value_heads": 1},
    "qwen2, with biases": {"family": "qwen2"},
    "qwen3, with norms on heads": {"family": "qwen3"},
    "qwen3, untied, heads wider than the model": {
        "family": "qwen3",
        "tie_word_embeddings": False,
        "head_dim": 16,
    },
    "mistral": {"family": "mistral", "sliding_window": None},
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that writes each model once."""
    made: dict[str, Path] = {}

    def make(**config: Any) -> Path:
        name = repr(sorted(config.items()))
        if name not in made:
            made[name] = make_model(tmp_path_factory.mktemp("model"), **config)
        return made[name]

    return make


CLIPPING = [name for name, entry in ALGORITHMS.items() if entry.loss is CLIPPED]
"""With one step per batch, all of these are the policy gradient that is computed naively here."""


def packed_gradients(
    path: Path,
    algorithm: Algorithm,
    groups: list[Group],
    *,
    temperature: float = 1.0,
    max_positions: int | None = None,
) -> Gradients:
    learner = build_learner(path, max_positions=max_positions)
    batch = build_batch(algorithm, groups, REPLY_LIMIT)
    return learner.term_gradients(rl_term(algorithm, batch.groups, temperature))


@pytest.mark.parametrize("name", CLIPPING)
@pytest.mark.parametrize("correction", ["none", "tis_token"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_every_algorithm_has_the_naive_gradient(
    model_dir: Callable[..., Path], name: str, correction: str, temperature: float
) -> None:
    algorithm = replace(plain(name), correction=CORRECTIONS[correction], correction_cap=2.0)
    path, groups = model_dir(), ragged_groups()
    expected = naive_gradients(
        path,
        algorithm,
        groups,
        temperature=temperature,
        reply_limit=REPLY_LIMIT,
        is_corrected=correction == "tis_token",
    )
    actual = packed_gradients(path, algorithm, groups, temperature=temperature)
    assert relative_error(actual, expected.gradients) <= TOLERANCE
    batch = build_batch(algorithm, groups, REPLY_LIMIT)
    report = build_learner(path).step_terms([rl_term(algorithm, batch.groups, temperature)])
    assert report.loss == pytest.approx(expected.loss, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("config", MODELS.values(), ids=list(MODELS))
def test_every_family_has_the_naive_gradient(model_dir: Callable[..., Path], config: dict[str, Any]) -> None:
    algorithm = replace(plain("dapo"), correction=CORRECTIONS["tis_token"])
    path, groups = model_dir(**config), ragged_groups(seed=1)
    expected = naive_gradients(
        path, algorithm, groups, temperature=0.7, reply_limit=REPLY_LIMIT, is_corrected=True
    )
    actual = packed_gradients(path, algorithm, groups, temperature=0.7)
    assert ("lm_head.weight" in expected.gradients) == (config.get("tie_word_embeddings") is False)
    assert relative_error(actual, expected.gradients) <= TOLERANCE


@pytest.mark.parametrize("max_positions", [1, 9, 17, 30, 10_000])
def test_opt_2_no_budget_changes_the_gradient(model_dir: Callable[..., Path], max_positions: int) -> None:
    algorithm = ALGORITHMS["grpo"]
    whole = packed_gradients(model_dir(), algorithm, ragged_groups())
    split = packed_gradients(model_dir(), algorithm, ragged_groups(), max_positions=max_positions)
    assert relative_error(split, whole) <= TOLERANCE


def test_the_order_of_groups_and_members_changes_nothing(model_dir: Callable[..., Path]) -> None:
    groups = ragged_groups()
    shuffled = [replace(group, rollouts=group.rollouts[::-1]) for group in groups[::-1]]
    whole = packed_gradients(model_dir(), ALGORITHMS["rloo"], groups)
    assert relative_error(packed_gradients(model_dir(), ALGORITHMS["rloo"], shuffled), whole) <= TOLERANCE


@pytest.mark.parametrize("name", [*(name for name in CLIPPING if "reinforce" not in name), "cispo", "sapo"])
def test_skipping_without_advantage_is_keeping(model_dir: Callable[..., Path], name: str) -> None:
    algorithm, groups = plain(name), ragged_groups()
    keeping = replace(algorithm, zero_variance="keep")
    # Group 3 has three members without difference; the first of group 2 has the mean of its group.
    skipped, kept = (build_batch(a, groups, REPLY_LIMIT).credit for a in (algorithm, keeping))
    assert kept.num_forwarded - skipped.num_forwarded == 3 + 1
    assert kept.num_counted_tokens == skipped.num_counted_tokens
    expected = packed_gradients(model_dir(), keeping, groups)
    assert relative_error(packed_gradients(model_dir(), algorithm, groups), expected) <= TOLERANCE


@pytest.mark.parametrize("max_positions", [None, 9])
def test_an_entropy_bonus_has_the_naive_gradient(
    model_dir: Callable[..., Path], max_positions: int | None
) -> None:
    """Minus eta x weight x entropy of every scored token, those without advantage among them."""
    algorithm = replace(plain("dapo"), entropy_weight=0.2, zero_variance="keep")
    path, groups = model_dir(), ragged_groups()
    policy = naive_gradients(
        path, algorithm, groups, temperature=0.7, reply_limit=REPLY_LIMIT, is_corrected=False
    )
    bonus = naive_entropy_gradients(path, algorithm, groups, temperature=0.7, reply_limit=REPLY_LIMIT)
    expected = {name: policy.gradients[name] - 0.2 * bonus.gradients[name] for name in policy.gradients}
    batch = build_batch(algorithm, groups, REPLY_LIMIT)
    term = rl_term(algorithm, batch.groups, 0.7)
    learner = build_learner(path, max_positions=max_positions)
    assert relative_error(learner.term_gradients(term), expected) <= TOLERANCE
    report = learner.step_terms([term])
    assert report.loss == pytest.approx(policy.loss - 0.2 * bonus.loss, rel=1e-4)
    # Every token weighs the same here, so the mean entropy is the weighed sum.
    assert report.totals["policy_entropy_nats"].mean == pytest.approx(bonus.loss, rel=1e-5)
    assert report.totals["policy_entropy_nats"].count == batch.credit.num_counted_tokens


def test_advantages_of_tokens_stand_in_for_that_of_the_reply(model_dir: Callable[..., Path]) -> None:
    groups = [World(seed).packed(3, [4, 2, 1]) for seed in range(2)]
    each = [
        replace(
            group,
            replies=tuple(
                replace(reply, advantage=9.0, token_advantages=np.full(len(reply.token_ids), 1.0, np.float32))
                for reply in group.replies
            ),
        )
        for group in groups
    ]
    mixed = [replace(each[0], replies=(each[0].replies[0], *groups[0].replies[1:])), groups[1]]
    learner = build_learner(model_dir())
    expected = learner.gradients(groups, temperature=1.0, token_terms=reinforce)
    for given in (each, mixed):
        found = learner.gradients(given, temperature=1.0, token_terms=reinforce)
        assert relative_error(found, expected) == 0.0
    # In the order of the reply's tokens: the first one alone has a gradient.
    first = replace(groups[0].replies[0], token_advantages=np.array([1, 0, 0, 0], np.float32))
    only = learner.gradients([replace(groups[0], replies=(first,))], temperature=1.0, token_terms=reinforce)
    short = replace(
        groups[0].replies[0],
        token_ids=first.token_ids[:1],
        is_scored=first.is_scored[:1],
        engine_logprobs=first.engine_logprobs[:1],
    )
    alone = learner.gradients([replace(groups[0], replies=(short,))], temperature=1.0, token_terms=reinforce)
    assert relative_error(only, alone) <= TOLERANCE
    # Several replies, each token with its own: the sum of what each reply has alone.
    own = [
        replace(reply, token_advantages=np.arange(1, len(reply.token_ids) + 1, dtype=np.float32))
        for reply in groups[0].replies
    ]
    parts = [
        learner.gradients([replace(groups[0], replies=(one,))], temperature=1.0, token_terms=reinforce)
        for one in own
    ]
    together = learner.gradients(
        [replace(groups[0], replies=tuple(own))], temperature=1.0, token_terms=reinforce
    )
    summed = {name: torch.stack([part[name] for part in parts]).sum(0) for name in together}
    assert relative_error(together, summed) <= TOLERANCE
    with pytest.raises(UnfitRecord, match="4 scored tokens and 3 advantages"):
        replace(first, token_advantages=np.zeros(3, np.float32))


@pytest.mark.parametrize("max_positions", [1, 7, 12, 1000])
def test_a_budget_holds_and_loses_no_reply(max_positions: int) -> None:
    groups = [World(seed).packed(3, [1, 2, 7, 5]) for seed in range(4)]
    batches = list(split_by_budget(groups, max_positions))
    replies = [reply for batch in batches for group in batch for reply in group.replies]
    assert len(replies) == len({id(reply) for reply in replies}) == 16
    for batch in batches:
        num_positions = sum(group.num_positions for group in batch)
        is_one_reply = len(batch) == len(batch[0].replies) == 1
        assert num_positions <= max_positions or is_one_reply


def test_bf16_gradients_point_where_fp32_points(tmp_path: Path) -> None:
    path = make_model(tmp_path, dtype="bfloat16")
    batch = build_batch(plain("dapo"), ragged_groups(), REPLY_LIMIT)
    gradients = [
        build_learner(path, dtype=dtype).gradients(batch.groups, temperature=1.0, token_terms=plain("dapo"))
        for dtype in ("bfloat16", "float32")
    ]
    assert all(grad.dtype == torch.float32 for grad in gradients[0].values())
    low, full = (torch.cat([grad.flatten() for grad in g.values()]) for g in gradients)
    assert float(torch.cosine_similarity(low, full, dim=0)) >= 0.999
