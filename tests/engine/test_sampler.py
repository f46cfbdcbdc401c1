"""Drawing by hand: temperature, truncation, ties, and the inverse CDF at its edges."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.engine.decoding import draw, draw_plain, inverse_cdf, truncate, uniform_stream
from strop.errors import EngineError
from strop.rollout import Sampling

LOGITS = [2.0, 1.0, 0.0, -1.0]


def logprob_of(token_id: int, sampling: Sampling, logits: list[float] = LOGITS) -> float:
    """Return the reported log-probability of a token, drawn by the uniform that leads to it."""
    for uniform in np.linspace(0, 1, 400, endpoint=False):
        drawn = draw(torch.tensor([logits]), [sampling], np.array([uniform]))
        if drawn.token_ids[0] == token_id:
            return float(drawn.logprobs[0])
    raise AssertionError(f"token {token_id} has no support")


@pytest.mark.parametrize(
    ("temperature", "token_id", "expected_nats"),
    [
        # log(e^2 + e + 1 + e^-1) = 2.440190, so token 0 has 2 - 2.440190, and each next one 1 less.
        (1.0, 0, -0.440190),
        (1.0, 1, -1.440190),
        (1.0, 2, -2.440190),
        (1.0, 3, -3.440190),
        # Logits 4, 2, 0, -2: log sum 4.145078.
        (0.5, 0, -0.145078),
        # Logits 1, 0.5, 0, -0.5: log sum 1.787339.
        (2.0, 0, -0.787339),
    ],
)
def test_p1_log_probabilities_at_temperature(temperature: float, token_id: int, expected_nats: float) -> None:
    assert logprob_of(token_id, Sampling(temperature=temperature)) == pytest.approx(expected_nats, abs=1e-6)


def test_p2_top_k_is_renormalised_over_its_support() -> None:
    # Support {0, 1}: -log(1 + e^-1) = -0.313262. The full softmax gives -0.440190; the difference
    # is the log-mass -0.126928, and exp of it the ratio 0.880797 that a trainer would see.
    logq = logprob_of(0, Sampling(top_k=2))
    assert logq == pytest.approx(-0.313262, abs=1e-6)
    assert math.exp(-0.440190 - logq) == pytest.approx(0.880797, abs=1e-5)


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    probs = torch.tensor([0.1, 0.4, 0.3, 0.2])
    # In order 0.4, 0.3, 0.2, 0.1: mass before each is 0, 0.4, 0.7, 0.9.
    for top_p, kept in ((0.39, [1]), (0.41, [1, 2]), (0.71, [1, 2, 3]), (0.95, [0, 1, 2, 3])):
        truncated = truncate(probs, Sampling(top_p=top_p))
        assert truncated.nonzero()[:, 0].tolist() == kept
        assert float(truncated.sum()) == pytest.approx(1.0)
    # 0.4 and 0.3 renormalised over 0.7.
    assert truncate(probs, Sampling(top_p=0.5)).tolist() == pytest.approx([0, 4 / 7, 3 / 7, 0])


def test_top_p_acts_on_what_top_k_left() -> None:
    probs = torch.tensor([0.4, 0.3, 0.2, 0.1])
    # Top 2 renormalised: 4/7, 3/7. 4/7 = 0.571 reaches 0.55 alone, but not 0.58.
    assert truncate(probs, Sampling(top_k=2, top_p=0.55)).nonzero()[:, 0].tolist() == [0]
    assert truncate(probs, Sampling(top_k=2, top_p=0.58)).nonzero()[:, 0].tolist() == [0, 1]


def test_ties_are_broken_by_token_id() -> None:
    probs = torch.tensor([0.1, 0.3, 0.3, 0.3])
    assert truncate(probs, Sampling(top_k=2)).nonzero()[:, 0].tolist() == [1, 2]
    assert truncate(probs, Sampling(top_p=0.31)).nonzero()[:, 0].tolist() == [1, 2]


def test_the_most_probable_token_always_stays() -> None:
    assert truncate(torch.tensor([0.5, 0.5]), Sampling(top_p=1e-9)).tolist() == [1.0, 0.0]
    assert truncate(torch.tensor([0.2, 0.8]), Sampling(top_k=1)).tolist() == [0.0, 1.0]
    assert truncate(torch.tensor([0.2, 0.8]), Sampling(top_k=99)).tolist() == pytest.approx([0.2, 0.8])


@pytest.mark.parametrize(
    ("uniform", "token_id"), [(0.0, 1), (0.25, 1), (0.4999, 1), (0.5, 3), (0.75, 3), (0.999999, 3)]
)
def test_p4_inverse_cdf_by_hand(uniform: float, token_id: int) -> None:
    # p = 0, 1/2, 0, 1/2. Tokens 0 and 2 can never be drawn, not even at the ends.
    probs = torch.tensor([[0.0, 0.5, 0.0, 0.5]])
    assert inverse_cdf(probs, torch.tensor([uniform], dtype=torch.float64)).item() == token_id


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), vocab=st.integers(1, 1100), uniform=st.floats(0, 1, exclude_max=True))
def test_inverse_cdf_equals_the_plain_one_and_never_leaves_the_support(
    seed: int, vocab: int, uniform: float
) -> None:
    """Also over the edges of its blocks of 256 tokens, and with long stretches of zeros."""
    generator = np.random.default_rng(seed)
    weights = generator.random(vocab) * (generator.random(vocab) < generator.random())
    weights[generator.integers(vocab)] += 0.5
    probs = torch.tensor(weights / weights.sum(), dtype=torch.float32)
    chosen = int(inverse_cdf(probs[None], torch.tensor([uniform], dtype=torch.float64)))
    assert probs[chosen] > 0
    cumulated = probs.double().cumsum(0)
    target = uniform * float(cumulated[-1])
    # The blocks' sums round differently, so the plain CDF may disagree by that much and no more.
    assert float(cumulated[chosen]) >= target - 1e-6
    assert chosen == 0 or float(cumulated[chosen - 1]) <= target + 1e-6


def test_greedy_rows_take_the_maximum_and_report_temperature_one() -> None:
    logits = torch.tensor([LOGITS, LOGITS[::-1], [1.0, 1.0, 0.0, 0.0]])
    drawn = draw(logits, [Sampling(temperature=0.0)] * 3, np.array([0.99, 0.99, 0.99]))
    # Of equals the first.
    assert drawn.token_ids.tolist() == [0, 3, 0]
    assert drawn.logprobs[:2].tolist() == pytest.approx([-0.440190, -0.440190], abs=1e-6)


def test_draws_are_distributed_as_reported() -> None:
    # 20,000 draws: a share has a standard deviation of at most sqrt(0.25 / 20000) = 0.0035.
    uniforms = uniform_stream(7, 20_000)
    drawn = draw(torch.tensor([LOGITS]).expand(20_000, 4), [Sampling()] * 20_000, uniforms)
    shares = np.bincount(drawn.token_ids, minlength=4) / 20_000
    assert shares == pytest.approx(np.exp([-0.440190, -1.440190, -2.440190, -3.440190]), abs=0.015)


def test_streams_depend_on_the_seed_and_nothing_else() -> None:
    assert uniform_stream(1, 5).tolist() == uniform_stream(1, 9)[:5].tolist()
    assert uniform_stream(1, 5).tolist() != uniform_stream(2, 5).tolist()
    assert uniform_stream(2**64 - 1, 3).shape == (3,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [7, 256, 1003])
def test_drawing_with_and_without_kernels_is_the_same(dtype: torch.dtype, vocab: int) -> None:
    """Tokens may differ only where the uniform falls on the border of two of them."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(400, vocab, generator=generator) * 4).to(dtype)
    logits[:, 1::3] = float("-inf")  # Long stretches that cannot be drawn.
    samplings = [Sampling(temperature=(1.0, 0.5, 0.0, 2.0)[row % 4]) for row in range(400)]
    uniforms = uniform_stream(3, 400)
    uniforms[:8] = [0.0, 0.0, 0.0, 0.0, *[1 - 2**-53] * 4]
    fast, plain = draw(logits, samplings, uniforms), draw_plain(logits, samplings, uniforms)
    is_same = fast.token_ids == plain.token_ids
    assert is_same.mean() >= 0.99
    np.testing.assert_allclose(fast.logprobs[is_same], plain.logprobs[is_same], rtol=1e-4, atol=1e-5)
    assert np.isfinite(logits.float().numpy()[np.arange(400), fast.token_ids]).all()


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.0), Sampling(top_k=2)])
@pytest.mark.parametrize("logits", [[0.0, math.nan, 1.0], [math.nan] * 3, [math.inf, 0.0, 0.0]])
def test_logits_that_are_no_distribution_are_refused(logits: list[float], sampling: Sampling) -> None:
    with pytest.raises(EngineError, match="not finite"):
        draw(torch.tensor([logits]), [sampling], np.array([0.5]))
