"""The term of demonstrations: its gradient against the padded way, its weights by hand, and its norms."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from strop.algorithm import ALGORITHMS
from strop.algorithm.offline import weigh_demonstrations
from strop.errors import LearnerError
from strop.policy.learner import LossTerm
from strop.policy.objective import ScoredTokens, TokenTerms, TokenTermsFn
from strop.policy.packing import PackedBatch
from strop.train.batch import build_batch
from strop.train.data.offline import Demonstration
from strop.train.step import pack_demonstrations, rl_term, sft_term
from tests.fixtures.tiny_model import VOCAB_SIZE
from tests.policy.worlds import (
    REPLY_LIMIT,
    Gradients,
    World,
    build_learner,
    make_model,
    ragged_groups,
    relative_error,
)


def member(world: World, num_prompt: int, marks: str, weight: float = 1.0) -> Demonstration:
    """Make a demonstration whose reply has a token for each mark; '1' is trained."""
    prompt_ids = world.ids(num_prompt)
    return Demonstration(
        prompt_ids=prompt_ids,
        num_asked=num_prompt,
        reply_ids=world.ids(len(marks)),
        is_trained=np.array([mark == "1" for mark in marks]),
        weight=weight,
        prompt_id="p",
    )


def ragged_members() -> list[Demonstration]:
    world = World(3)
    members = [
        member(world, 5, "1111"),
        member(world, 1, "1", 2.5),
        member(world, 7, "0110011", 0.5),
        member(world, 1, "11111111"),
    ]
    # Two replies to one prompt, which the batch holds once.
    shared = member(world, 5, "111", 3.0)
    return [*members, replace(shared, prompt_ids=members[0].prompt_ids)]


def naive(path: Path, members: list[Demonstration]) -> tuple[float, Gradients]:
    """Padded rows, all logits, autograd: sum of a x -logp over the sum of a, over all trained tokens."""
    module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    module.eval()  # type: ignore[no-untyped-call]
    width = max(one.num_tokens for one in members)
    token_ids = torch.randint(
        0, VOCAB_SIZE, (len(members), width), generator=torch.Generator().manual_seed(5)
    )
    mask, weights = torch.zeros(len(members), width), torch.zeros(len(members), width)
    for row, one in enumerate(members):
        ids = np.concatenate([one.prompt_ids, one.reply_ids])
        token_ids[row, : len(ids)] = torch.from_numpy(ids.astype(np.int64))
        mask[row, : len(ids)] = 1.0
        start = len(one.prompt_ids)
        weights[row, start : len(ids)] = torch.from_numpy(one.is_trained * one.weight).float()
    logits = module(input_ids=token_ids, attention_mask=mask, use_cache=False).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), token_ids[:, 1:].reshape(-1), reduction="none"
    )
    total = (loss * weights[:, 1:].reshape(-1)).sum() / weights.sum()
    total.backward()  # type: ignore[no-untyped-call]
    return float(total.detach()), {
        name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None
    }


def gradients_of(path: Path, term: LossTerm, max_positions: int | None = None) -> Gradients:
    return build_learner(path, max_positions=max_positions).gradients(
        term.groups, temperature=term.temperature, token_terms=term.token_terms
    )


@pytest.mark.parametrize("max_positions", [None, 12])
def test_the_packed_gradient_is_the_padded_one(tmp_path: Path, max_positions: int | None) -> None:
    path, members = make_model(tmp_path), ragged_members()
    loss, expected = naive(path, members)
    term = sft_term(members, 1.0)
    assert relative_error(gradients_of(path, term, max_positions), expected) < 1e-5
    report = build_learner(path, max_positions=max_positions).step_terms([term])
    assert report.loss == pytest.approx(loss, rel=1e-5)
    assert report.num_micro_batches == 1 if max_positions is None else report.num_micro_batches > 2
    # Nobody sampled these tokens, so nothing can drift.
    assert report.drift.num_values == 0


def test_a_shared_prompt_is_held_once() -> None:
    groups = pack_demonstrations(ragged_members())
    assert [len(group.replies) for group in groups] == [2, 1, 1, 1]
    batch = PackedBatch.of_groups(groups, torch.device("cpu"))
    # 4 + 3, 1, 4 of 7, and 8 trained tokens; of none is there a behaviour log-probability.
    assert len(batch.target_M) == 20
    assert bool(batch.engine_logprob_M.isnan().all())
    assert float((batch.weight_M).sum()) != 0.0


def test_a_policy_loss_on_what_nobody_sampled_is_refused(tmp_path: Path) -> None:
    """LOG-4: a missing log-probability has no filler; a loss that wants one does not pass as a number."""
    groups = pack_demonstrations(ragged_members())
    learner = build_learner(make_model(tmp_path))

    def ratio(tokens: ScoredTokens, /) -> TokenTerms:
        ratio_M = (tokens.logprob_M - tokens.engine_logprob_M).exp()
        return TokenTerms(loss_N=ratio_M, grad_N=ratio_M)

    with pytest.raises(LearnerError, match="loss nan"):
        learner.step(groups, temperature=1.0, token_terms=ratio)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
# A power of two: bf16 backward passes round alike at any such scale.
@pytest.mark.parametrize("weight", [1.0, 2.0**-7])
def test_norms_and_cosine_of_two_terms_are_those_of_each_alone(
    tmp_path: Path, weight: float, dtype: str
) -> None:
    path, algorithm = make_model(tmp_path), ALGORITHMS["grpo"]
    rl = rl_term(algorithm, build_batch(algorithm, ragged_groups(), REPLY_LIMIT).groups, 0.7)
    sft = sft_term(ragged_members(), weight)
    alone = []
    for term in (rl, sft):
        grads = build_learner(path, dtype=dtype).gradients(
            term.groups, temperature=term.temperature, token_terms=term.token_terms
        )
        flat = torch.cat([grad.double().reshape(-1) for grad in grads.values()])
        alone.append(flat * term.weight)
    learner = build_learner(path, dtype=dtype, max_grad_norm=1e9)
    report = learner.step_terms([rl, sft])
    first, second = report.terms
    assert (first.name, second.name) == ("rl", "sft")
    assert first.grad_norm == pytest.approx(float(alone[0].norm()), rel=1e-5)
    assert second.grad_norm == pytest.approx(float(alone[1].norm()), rel=1e-5)
    cosine = float(alone[0] @ alone[1] / (alone[0].norm() * alone[1].norm()))
    assert first.cosine is None
    assert second.cosine == pytest.approx(cosine, abs=1e-6)
    assert report.grad_norm == pytest.approx(float((alone[0] + alone[1]).norm()), rel=1e-5)
    assert report.loss == pytest.approx(first.loss + second.loss)


def test_the_order_of_terms_does_not_matter_and_a_term_agrees_with_itself(tmp_path: Path) -> None:
    path = make_model(tmp_path)
    halves = [sft_term(part, 0.5) for part in (ragged_members()[:2], ragged_members()[2:])]
    apart, swapped = (build_learner(path, max_grad_norm=1e9) for _ in range(2))
    apart.step_terms(halves)
    swapped.step_terms(halves[::-1])
    named = [dict(learner.model.named_parameters()) for learner in (apart, swapped)]
    # a + b and b + a are the same number.
    assert all(torch.equal(named[0][name], named[1][name]) for name in named[0])
    single = sft_term(ragged_members(), 1.0)
    report = build_learner(path, max_grad_norm=1e9).step_terms([single, single])
    assert report.terms[1].cosine == pytest.approx(1.0, abs=1e-6)
    assert report.grad_norm == pytest.approx(2 * report.terms[0].grad_norm, rel=1e-6)


def test_a_term_without_gradient_has_norm_0_and_no_cosine(tmp_path: Path) -> None:
    empty = LossTerm(
        name="rl", groups=[], temperature=1.0, token_terms=sft_term(ragged_members(), 1.0).token_terms
    )
    report = build_learner(make_model(tmp_path)).step_terms([empty, sft_term(ragged_members(), 1.0)])
    assert [(term.grad_norm == 0.0, term.cosine) for term in report.terms] == [(True, None), (False, None)]
    assert report.grad_norm == pytest.approx(report.terms[1].grad_norm)


def test_terms_are_weighed_after_each_was_normalised(tmp_path: Path) -> None:
    """N3, N4: nats [1, 2, 3] and [4] are 2.5 on average, and 0.001 of it beside rewards is little."""
    share = weigh_demonstrations([1.0, 1.0], [3, 1])
    assert share[0] * (1 + 2 + 3) + share[1] * 4 == 2.5
    groups = [World(1).packed(3, [4], weight=0.25)]

    def constant(value: float) -> TokenTermsFn:
        def terms(tokens: ScoredTokens, /) -> TokenTerms:
            whole_M = torch.full_like(tokens.logprob_M, value)
            return TokenTerms(loss_N=whole_M, grad_N=whole_M)

        return terms

    rl = LossTerm(name="rl", groups=groups, temperature=1.0, token_terms=constant(-0.251633))
    sft = LossTerm(name="sft", groups=groups, temperature=1.0, token_terms=constant(2.5), weight=0.001)
    report = build_learner(make_model(tmp_path)).step_terms([rl, sft])
    assert report.loss == pytest.approx(-0.249133, abs=1e-6)
    assert [term.loss for term in report.terms] == pytest.approx([-0.251633, 0.0025], abs=1e-6)
