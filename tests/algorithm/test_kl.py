"""Estimators of the KL divergence against closed forms: values, signs, and what their gradients descend."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from strop.algorithm.losses import ESTIMATORS, KlPenalty, PenaltyFn, penalize_k3, penalize_k3_plus

POLICY_V = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
REFERENCE_V = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
TO_REFERENCE = [-0.114895, -0.014241, 0.129136]
"""Gradient of KL(policy || reference) on the logits of the policy."""
FROM_REFERENCE = [-0.1, 0.0, 0.1]


def expected_gradient(
    penalty: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], drawn_from_V: Tensor = POLICY_V
) -> list[float]:
    """Average grad x d logp / d logits over all tokens. d logp_v / d logits = onehot(v) - policy."""
    _, grad_V = penalty(POLICY_V.log(), REFERENCE_V.log())
    jacobian_V_V = torch.eye(3, dtype=torch.float64) - POLICY_V
    found: list[float] = ((drawn_from_V * grad_V)[:, None] * jacobian_V_V).sum(dim=0).tolist()
    return found


@pytest.mark.parametrize(
    ("reference", "values", "gradients"),
    [
        # u = 0.5: 0.5^2 / 2, e^-0.5 - 1 + 0.5 = 0.106531, 1 - e^-0.5 = 0.393469
        (-1.5, (0.5, 0.125, 0.106531, 0.106531), (1, 0.5, 0.393469, 0.5)),
        # u = -0.5: the same square, e^0.5 - 1 - 0.5 = 0.148721, and the sign of the gradients turns
        (-0.5, (-0.5, 0.125, 0.148721, 0.148721), (1, -0.5, -0.648721, -0.5)),
    ],
)
def test_values_and_gradients_by_hand(
    reference: float, values: tuple[float, ...], gradients: tuple[float, ...]
) -> None:
    logp_N, reference_N = (torch.tensor([x], dtype=torch.float64) for x in (-1.0, reference))
    for name, value, gradient in zip(("k1", "k2", "k3", "k3+"), values, gradients, strict=True):
        found = [one.item() for one in ESTIMATORS[name](logp_N, reference_N)]
        assert found == pytest.approx([value, gradient], abs=1e-6)


def test_expected_values_by_hand() -> None:
    # 0.5 ln(5/6) + 0.2 ln 2 = 0.047469
    means = {
        name: float((POLICY_V * penalty(POLICY_V.log(), REFERENCE_V.log())[0]).sum())
        for name, penalty in ESTIMATORS.items()
    }
    assert means == pytest.approx({"k1": 0.047469, "k2": 0.056356, "k3": 0.047469, "k3+": 0.047469}, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("k1", [0.0, 0.0, 0.0]), ("k2", TO_REFERENCE), ("k3", FROM_REFERENCE), ("k3+", TO_REFERENCE)],
)
def test_expected_gradients_are_those_of_the_divergence_they_name(name: str, expected: list[float]) -> None:
    assert expected_gradient(ESTIMATORS[name]) == pytest.approx(expected, abs=1e-6)


def test_the_two_closed_gradients_are_those_of_autograd() -> None:
    for expected, is_forward in ((TO_REFERENCE, False), (FROM_REFERENCE, True)):
        logits_V = POLICY_V.log().requires_grad_()
        logp_V, ref_V = torch.log_softmax(logits_V, 0), REFERENCE_V.log()
        both = (REFERENCE_V * (ref_V - logp_V), logp_V.exp() * (logp_V - ref_V))
        (gradient_V,) = torch.autograd.grad(both[0 if is_forward else 1].sum(), logits_V)
        assert gradient_V.tolist() == pytest.approx(expected, abs=1e-6)


def test_drawn_from_another_distribution_only_the_ratio_makes_it_right() -> None:
    engine_V = torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64)

    def penalize(
        is_corrected: bool, estimate: PenaltyFn
    ) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
        penalty = KlPenalty(beta=1.0, estimate=estimate, is_corrected=is_corrected)
        return lambda logp, reference: penalty(logp, reference, engine_V.log())

    corrected = expected_gradient(penalize(True, penalize_k3_plus), engine_V)
    assert corrected == pytest.approx(TO_REFERENCE, abs=1e-6)
    plain = expected_gradient(penalize(False, penalize_k3), engine_V)
    assert plain == pytest.approx([-0.13, -0.042, 0.172], abs=1e-6)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_nothing_is_asked_of_a_policy_that_is_the_reference(name: str) -> None:
    value_N, grad_N = ESTIMATORS[name](POLICY_V.log(), POLICY_V.log())
    assert value_N.tolist() == [0, 0, 0]
    assert grad_N.tolist() == ([1, 1, 1] if name == "k1" else [0, 0, 0])


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("gap", [-1e4, -89.0, 89.0, 1e4])
def test_no_gap_overflows_in_float32(name: str, gap: float) -> None:
    penalty = KlPenalty(beta=1.0, estimate=ESTIMATORS[name], is_corrected=True)
    for found in penalty(torch.tensor([gap]), torch.zeros(1), torch.zeros(1)):
        assert math.isfinite(found.item())


def test_small_gaps_are_not_drowned_in_rounding() -> None:
    # u = 1e-4 in float32: k3 = u^2 / 2 = 5e-9, of which exp(-u) - 1 + u leaves nothing.
    value_N, grad_N = penalize_k3(torch.tensor([1e-4]), torch.zeros(1))
    assert value_N.item() == pytest.approx(5e-9, rel=0.1)
    assert grad_N.item() == pytest.approx(1e-4, rel=1e-3)


@pytest.mark.parametrize("name", ["k2", "k3", "k3+"])
def test_opt_1_a_step_down_any_offered_estimator_comes_closer(name: str) -> None:
    moved_V = POLICY_V.log() - 0.5 * torch.tensor(expected_gradient(ESTIMATORS[name]), dtype=torch.float64)
    after_V = torch.softmax(moved_V, 0)
    assert float((after_V * (after_V / REFERENCE_V).log()).sum()) < 0.047
