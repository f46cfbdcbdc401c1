"""Losses on pairs by hand: two replies of two tokens, h = (-10 + 11) - (-12 + 11.5) = 1.5."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from strop.algorithm.losses import IS_PG
from strop.algorithm.offline import Divergence, Preference
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


# Divergences by hand: t = (0.7, 0.2, 0.1), p = (0.3, 0.5, 0.2); their gradients against autograd.

TEACHER_V = torch.tensor([[0.7, 0.2, 0.1]], dtype=torch.float64).log()
STUDENT_V = torch.tensor([[0.3, 0.5, 0.2]], dtype=torch.float64).log()
REVERSE = [-0.356965, 0.286853, 0.070112]
ALL = [Divergence(name="forward_kl"), Divergence(name="reverse_kl"), Divergence(name="jsd")]


@pytest.mark.parametrize(
    ("divergence", "value", "gradient"),
    [
        # 0.7 ln(7/3) + 0.2 ln 0.4 + 0.1 ln 0.5, and p - t
        (Divergence(name="forward_kl"), 0.340536, [-0.4, 0.3, 0.1]),
        (Divergence(name="reverse_kl"), 0.342585, REVERSE),
        (Divergence(name="jsd"), 0.082844, [-0.089018, 0.068512, 0.020506]),
    ],
)
def test_divergences_by_hand(divergence: Divergence, value: float, gradient: list[float]) -> None:
    value_U, grad_U_V = divergence(STUDENT_V, TEACHER_V)
    assert value_U.item() == pytest.approx(value, abs=1e-6)
    assert grad_U_V[0].tolist() == pytest.approx(gradient, abs=1e-6)


def softmaxed(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits, dim=-1)


def by_autograd(divergence: Divergence, logits: Tensor, teacher: Tensor) -> Tensor:
    leaf = logits.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(divergence(softmaxed(leaf), teacher)[0].sum(), leaf)
    return gradient


rows = st.lists(st.lists(st.floats(-8, 8), min_size=5, max_size=5), min_size=1, max_size=4)


@pytest.mark.parametrize("divergence", ALL, ids=lambda one: one.name)
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_gradients_are_those_of_autograd(divergence: Divergence, data: st.DataObject) -> None:
    logits = torch.tensor(data.draw(rows), dtype=torch.float64)
    teacher = softmaxed(torch.tensor(data.draw(rows), dtype=torch.float64)[:1]).expand_as(logits)
    torch.testing.assert_close(
        divergence(softmaxed(logits), teacher)[1],
        by_autograd(divergence, logits, teacher),
        atol=1e-9,
        rtol=1e-6,
    )


@pytest.mark.parametrize("divergence", ALL, ids=lambda one: one.name)
def test_nothing_overflows_in_float32(divergence: Divergence) -> None:
    # A token that one side rules out: its log-probability is minus infinity.
    student = torch.tensor([[0.0, -math.inf, -200.0]]).log_softmax(-1)
    teacher = torch.tensor([[-math.inf, 0.0, -300.0]]).log_softmax(-1)
    for found in divergence(student, teacher):
        assert bool(torch.isfinite(found).all())


def test_sampled_tokens_give_the_reverse_kl_on_average() -> None:
    advantage_V = (TEACHER_V - STUDENT_V)[0]
    assert advantage_V.tolist() == pytest.approx([0.847298, -0.916291, -0.693147], abs=1e-6)
    logp_V = STUDENT_V[0]
    grad_V = IS_PG.differentiate(logp_V, logp_V, advantage_V, 0.2, 0.2)[1]
    jacobian = torch.eye(3, dtype=torch.float64) - logp_V.exp()
    expected = ((logp_V.exp() * grad_V)[:, None] * jacobian).sum(dim=0)
    assert expected.tolist() == pytest.approx(REVERSE, abs=1e-6)
