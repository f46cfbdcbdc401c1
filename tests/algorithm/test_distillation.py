"""Divergences by hand: t = (0.7, 0.2, 0.1), p = (0.3, 0.5, 0.2); their gradients against autograd."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from strop.algorithm.losses import IS_PG
from strop.algorithm.offline import Divergence

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
    grad_V = IS_PG.grad(logp_V, logp_V, advantage_V, 0.2, 0.2)
    jacobian = torch.eye(3, dtype=torch.float64) - logp_V.exp()
    expected = ((logp_V.exp() * grad_V)[:, None] * jacobian).sum(dim=0)
    assert expected.tolist() == pytest.approx(REVERSE, abs=1e-6)
