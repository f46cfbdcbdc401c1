"""Losses on pairs by hand: two replies of two tokens, h = (-10 + 11) - (-12 + 11.5) = 1.5."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from strop.algorithm.offline import Preference
from strop.policy.objective import ScoredTokens

CASES = [
    # -log sigmoid(0.15) and -0.1 x sigmoid(-0.15)
    (Preference(name="dpo", beta=0.1), 0.620957, -0.046257),
    # Means: h = (1 + 0) / 2 - (0.5 - 1) / 2 = 0.75. (0.75 - 5)^2, and 2 x -4.25 for each half
    (Preference(name="pref_ipo", beta=0.1), 18.0625, -4.25),
]
IDS = [case[0].name for case in CASES]


def pair_tokens() -> ScoredTokens:
    """Two pairs: the one by hand, and one whose policy is its reference."""
    logprob_M = torch.tensor([-4.0, -6.0, -5.0, -7.0, -1.0, -2.0], dtype=torch.float64)
    reference_M = torch.tensor([-5.0, -6.0, -5.5, -6.0, -1.0, -2.0], dtype=torch.float64)
    return ScoredTokens(
        logprob_M=logprob_M,
        engine_logprob_M=torch.full_like(logprob_M, torch.nan),
        old_logprob_M=torch.full_like(logprob_M, torch.nan),
        reference_logprob_M=reference_M,
        teacher_logprob_M=torch.full_like(logprob_M, torch.nan),
        advantage_M=torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0, -1.0], dtype=torch.float64),
        reply_M=torch.tensor([0, 0, 1, 1, 2, 3]),
        group_M=torch.tensor([0, 0, 0, 0, 1, 1]),
    )


@pytest.mark.parametrize(("preference", "loss", "grad"), CASES, ids=IDS)
def test_pairs_by_hand(preference: Preference, loss: float, grad: float) -> None:
    terms = preference(pair_tokens())
    assert float(terms.loss_N[:4].sum()) == pytest.approx(loss, abs=1e-6)
    assert terms.grad_N[:4].tolist() == pytest.approx([grad, grad, -grad, -grad], abs=1e-6)


def test_a_policy_that_is_its_reference_starts_at_ln_2() -> None:
    terms = Preference(name="dpo", beta=0.1)(pair_tokens())
    assert float(terms.loss_N[4:].sum()) == pytest.approx(math.log(2), abs=1e-9)
    assert terms.grad_N[4:].tolist() == [-0.05, 0.05]


@pytest.mark.parametrize(("name", "scale"), [("dpo", 1.0), ("pref_ipo", 0.5)])
def test_what_is_reported_of_pairs_by_hand(name: Literal["dpo", "pref_ipo"], scale: float) -> None:
    terms = Preference(name=name, beta=0.1)(pair_tokens())
    # Two pairs of equal weight. The better reply gained 1 - 0, the worse one 0.5 - 1; the others nothing.
    # Per token that is half of it, for replies of two tokens.
    found = {name: float(share_M.sum()) / 2 for name, share_M in terms.shares.items()}
    assert found == pytest.approx(
        {
            "pair_accuracy": 0.5,
            "pair_margin_nats": scale * 0.75,
            "pair_better_gain_nats": scale * 0.5,
            "pair_worse_gain_nats": scale * -0.25,
        }
    )


@pytest.mark.parametrize("preference", [case[0] for case in CASES], ids=IDS)
@given(margin=st.floats(-300, 300))
def test_the_gradient_is_that_of_autograd(preference: Preference, margin: float) -> None:
    leaf = torch.tensor([margin], dtype=torch.float64, requires_grad=True)
    loss, grad = preference.judge(leaf)
    (expected,) = torch.autograd.grad(loss.sum(), leaf)
    torch.testing.assert_close(grad.detach(), expected)


@pytest.mark.parametrize("margin", [-1e4, 1e4])
def test_no_margin_overflows(margin: float) -> None:
    for preference, _, _ in CASES:
        assert all(math.isfinite(found.item()) for found in preference.judge(torch.tensor([margin])))


def test_no_tokens_have_no_loss() -> None:
    tokens = pair_tokens().part(slice(0, 0))
    assert Preference(name="dpo", beta=0.1)(tokens).loss_N.shape == (0,)


@pytest.mark.parametrize("preference", [case[0] for case in CASES], ids=IDS)
def test_the_gradient_of_every_token_is_that_of_autograd(preference: Preference) -> None:
    tokens = pair_tokens()
    leaf_M = tokens.logprob_M.clone().requires_grad_()
    gains = torch.split(leaf_M - tokens.reference_logprob_M, [2, 2, 1, 1])
    of_replies = [gain.mean() if preference.is_per_token else gain.sum() for gain in gains]
    margins = torch.stack([of_replies[0] - of_replies[1], of_replies[2] - of_replies[3]])
    (expected_M,) = torch.autograd.grad(preference.judge(margins)[0].sum(), leaf_M)
    torch.testing.assert_close(preference(tokens).grad_N, expected_M)
