"""Losses that need whole replies: one more pass of the head, and no micro-batch changes them."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from strop.algorithm import ALGORITHMS, Algorithm
from strop.algorithm.corrections import CORRECTION_SQUARE, CORRECTIONS
from strop.algorithm.losses import KlPenalty
from strop.errors import UnfitRecord
from strop.policy.learner import LossTerm
from strop.policy.objective import Scope, ScoredTokens, TokenTerms
from strop.policy.packing import PackedGroup, with_logprobs
from strop.train.batch import build_batch
from strop.train.step import rl_term
from tests.policy.worlds import (
    REPLY_LIMIT,
    World,
    build_learner,
    make_model,
    plain,
    ragged_groups,
    relative_error,
)

WHOLE = {
    "gspo": replace(plain("gspo"), mode="decoupled", clip_low=0.2, clip_high=0.2),
    "tis_seq": replace(plain("grpo"), correction=CORRECTIONS["tis_seq"], correction_cap=3.0),
    "mis_seq": replace(plain("grpo"), correction=CORRECTIONS["mis_seq"], correction_cap=1e6),
    "opsm": replace(plain("grpo"), correction=CORRECTIONS["opsm"], correction_cap=0.1),
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def scored_sides(groups: tuple[PackedGroup, ...], seed: int = 3) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [
        random.uniform(-7, -1, int(reply.is_scored.sum())).astype(np.float32)
        for group in groups
        for reply in group.replies
    ]


def term_of(algorithm: Algorithm) -> LossTerm:
    term = rl_term(algorithm, build_batch(algorithm, ragged_groups(), REPLY_LIMIT).groups, 1.0)
    groups = with_logprobs(tuple(term.groups), "old", scored_sides(tuple(term.groups)))
    return replace(term, groups=with_logprobs(groups, "reference", scored_sides(groups, 4)))


@pytest.mark.parametrize("name", WHOLE)
def test_no_budget_changes_a_loss_of_whole_replies(model_dir: Path, name: str) -> None:
    term = term_of(WHOLE[name])
    assert term.scope is Scope.REPLY
    whole = build_learner(model_dir).term_gradients(term)
    for max_positions in (1, 9, 17):
        split = build_learner(model_dir, max_positions=max_positions).term_gradients(term)
        assert relative_error(split, whole) <= 1e-5


def test_a_head_in_many_chunks_sees_whole_replies(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunk by chunk, a reply's mean would be that of the chunk."""
    term = term_of(WHOLE["gspo"])
    expected = build_learner(model_dir).term_gradients(term)
    monkeypatch.setattr("strop.policy.head.HEAD_CHUNK_ROWS", 1)
    assert relative_error(build_learner(model_dir).term_gradients(term), expected) <= 1e-5
    chunked = build_learner(model_dir).term_gradients(replace(term, scope=Scope.TOKEN))
    assert relative_error(chunked, expected) > 1e-2


def test_a_penalty_has_the_gradient_of_its_tokens(model_dir: Path) -> None:
    """The packed gradient is the sum over tokens of weight x (policy + beta x u) x grad logp."""
    algorithm = replace(plain("dapo"), kl=KlPenalty(beta=0.5))
    term = term_of(algorithm)
    both = build_learner(model_dir).term_gradients(term)
    policy = build_learner(model_dir).term_gradients(replace(term, token_terms=plain("dapo")))
    penalty = build_learner(model_dir).term_gradients(replace(term, token_terms=only_penalty))
    summed = {name: policy[name] + 0.5 * penalty[name] for name in both}
    assert relative_error(both, summed) <= 1e-5


def only_penalty(tokens: ScoredTokens, /) -> TokenTerms:
    gap_M = tokens.logprob_M - tokens.reference_logprob_M
    return TokenTerms(loss_N=gap_M, grad_N=gap_M)


def test_the_corrections_of_a_step_are_reported(model_dir: Path) -> None:
    algorithm = replace(plain("grpo"), correction=CORRECTIONS["tis_token"], correction_cap=2.0)
    term = term_of(algorithm)
    for max_positions in (None, 9):
        report = build_learner(model_dir, max_positions=max_positions).step_terms([term])
        learner = build_learner(model_dir)
        gaps = [
            found - reply.engine_logprobs
            for found, reply in zip(
                learner.score(term.groups, 1.0), (r for g in term.groups for r in g.replies), strict=True
            )
        ]
        correction_M = np.minimum(np.exp(np.concatenate(gaps)), 2.0)
        assert report.totals["correction_mean"].count == report.drift.num_values == len(correction_M)
        assert report.totals["correction_mean"].mean == pytest.approx(correction_M.mean(), rel=1e-4)
        square = report.totals[CORRECTION_SQUARE].mean
        assert square == pytest.approx(np.square(correction_M).mean(), rel=1e-4)
        assert report.drift.max == pytest.approx(np.abs(np.concatenate(gaps)).max(), rel=1e-4)


def test_tok_2_a_side_stream_keeps_its_length_whatever_its_tokens_are() -> None:
    """Incident: reference log-probabilities were cut at the first token id 0, taken for padding."""
    group = World().packed(3, [4])
    reply = replace(group.replies[0], token_ids=np.array([5, 0, 0, 7], dtype=np.int32))
    full = replace(reply, reference_logprobs=np.full(4, -1.0, dtype=np.float32))
    assert full.reference_logprobs is not None
    assert len(full.reference_logprobs) == 4
    with pytest.raises(UnfitRecord, match=r"4 scored tokens and 3 reference log-probabilities"):
        replace(reply, reference_logprobs=np.full(3, -1.0, dtype=np.float32))
    with pytest.raises(UnfitRecord, match="teacher"):
        with_logprobs([replace(group, replies=(reply,))], "teacher", [np.zeros(5, dtype=np.float32)])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_term_of_any_algorithm_goes_to_another_process(model_dir: Path, name: str) -> None:
    algorithm = replace(ALGORITHMS[name], correction=CORRECTIONS["tis_token"], kl=KlPenalty(beta=0.1))
    term = term_of(algorithm)
    arrived: LossTerm = pickle.loads(pickle.dumps(term))
    assert arrived.token_terms == algorithm
    learners = [build_learner(model_dir) for _ in range(2)]
    sent, got = (learner.term_gradients(one) for learner, one in zip(learners, (term, arrived), strict=True))
    assert all(torch.equal(sent[key], got[key]) for key in sent)
