"""Evidence that an engine samples from another distribution: strong where it does, rare where it does not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from strop.engine.sampler import truncate
from strop.policy.head import TOP_RANKS
from strop.rollout import FloatArray, Sampling
from strop.train.gate_parity import MAX_EVIDENCE, SamplingFinding, weigh_evidence

NUM_TOKENS, VOCAB = 1000, 200


def make_distributions(random: np.random.Generator, sharpness: float) -> FloatArray:
    """Draw ragged distributions, some nearly certain. Shapes: (M, V)."""
    logits = random.normal(0.0, sharpness * random.uniform(0.3, 2.0, (NUM_TOKENS, 1)), (NUM_TOKENS, VOCAB))
    probs = np.exp(logits - logits.max(axis=1, keepdims=True))
    made: FloatArray = (probs / probs.sum(axis=1, keepdims=True)).astype(np.float32)
    return made


def sample(random: np.random.Generator, probs_M_V: FloatArray) -> NDArray[np.int64]:
    cumulated = probs_M_V.astype(np.float64).cumsum(axis=1)
    drawn = (cumulated < random.random((NUM_TOKENS, 1)) * cumulated[:, -1:]).sum(axis=1)
    chosen: NDArray[np.int64] = drawn
    return chosen


def weigh(random: np.random.Generator, reported_M_V: FloatArray, used_M_V: FloatArray) -> SamplingFinding:
    """Draw from one set of distributions and compare with another."""
    own_M_1 = reported_M_V[np.arange(NUM_TOKENS), sample(random, used_M_V)][:, None]
    columns = [
        np.where(reported_M_V > own_M_1, reported_M_V, 0.0).sum(axis=1),
        np.where(reported_M_V == own_M_1, reported_M_V, 0.0).sum(axis=1),
    ]
    for rank in TOP_RANKS:
        least_M_1 = np.sort(reported_M_V, axis=1)[:, -rank, None]
        beyond = np.where(reported_M_V < least_M_1, reported_M_V, 0.0).sum(axis=1)
        columns += [beyond, (own_M_1 < least_M_1)[:, 0]]
    return weigh_evidence(np.stack(columns, axis=1))


@pytest.mark.parametrize("sharpness", [0.5, 2.0, 6.0])
def test_an_honest_engine_gathers_no_evidence(sharpness: float) -> None:
    random = np.random.default_rng(7)
    found = []
    for _ in range(100):
        probs = make_distributions(random, sharpness)
        found.append(weigh(random, probs, probs).evidence)
    assert max(found) < 1e3 < MAX_EVIDENCE
    # The mean over all engines is 1 at most; that of some hundred lies around it, mostly below.
    assert np.mean(found) < 3.0


def test_rounding_is_no_evidence() -> None:
    """Engine and trainer in bfloat16 are some hundredths of a nat apart at every token."""
    random = np.random.default_rng(8)
    for _ in range(50):
        probs = make_distributions(random, 2.0)
        noisy = probs * np.exp(random.normal(0.0, 0.1, probs.shape))
        noisy = (noisy / noisy.sum(axis=1, keepdims=True)).astype(np.float32)
        assert weigh(random, probs, noisy).evidence < 1e3


@pytest.mark.parametrize("sampling", [Sampling(top_p=0.9), Sampling(top_p=0.95), Sampling(top_k=20)])
def test_a_cut_gathers_more_than_enough(sampling: Sampling) -> None:
    random = np.random.default_rng(9)
    for _ in range(10):
        probs = make_distributions(random, 2.0)
        cut = np.stack([truncate(torch.from_numpy(row), sampling).numpy() for row in probs])
        found = weigh(random, probs, cut)
        assert not found.is_sound
        assert found.num_seen < found.num_expected


def test_nothing_sampled_is_no_evidence() -> None:
    finding = weigh_evidence(np.zeros((0, 2 + 2 * len(TOP_RANKS)), np.float32))
    assert (finding.evidence, finding.is_sound) == (1.0, True)


def test_a_finding_names_what_is_missing() -> None:
    # 1000 tokens, evenly spread over the likelier nine tenths of their distributions.
    stands = np.linspace(0.0, 0.9, 1000, endpoint=False)
    nothing = np.zeros((1000, 1 + 2 * len(TOP_RANKS)))
    finding = weigh_evidence(np.concatenate([stands[:, None], nothing], axis=1).astype(np.float32))
    assert not finding.is_sound
    assert finding.describe() == "0 of 1000 tokens among the least likely 10.0%, expected 100.0"
