"""Token losses against cases by hand, and their gradients.

Two rollouts: one of two tokens with A = +1, one of one token with A = -1.
exp(-0.8 + 1) = 1.221403, exp(-2.5 + 2) = 0.606531, exp(-0.9 + 0.5) = 0.670320.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from strop.algorithm.losses import (
    CISPO,
    CLIPPED,
    DPPO,
    ESTIMATORS,
    IPO_MASK,
    IS_PG,
    SAPO,
    KlPenalty,
    PenaltyFn,
    TokenLoss,
    clipped_sides,
    dual_clipped,
    penalize_k3,
    penalize_k3_plus,
)
from tests.fixtures.losses import LOSSES

# Shapes: N = 3 tokens.
LOGP_N = torch.tensor([-0.8, -2.5, -0.9], dtype=torch.float64)
OLD_LOGP_N = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64)
ADVANTAGE_N = torch.tensor([1.0, 1.0, -1.0], dtype=torch.float64)
TOKEN_MEAN_N = [1 / 3, 1 / 3, 1 / 3]
SEQ_MEAN_N = [1 / 4, 1 / 4, 1 / 2]
CONST_N = [1 / 8, 1 / 8, 1 / 8]  # two rollouts, reply limit 4


@pytest.mark.parametrize(
    ("loss", "clip_low", "clip_high", "weight_N", "total", "gradient_N"),
    [
        # 1.2 and 0.606531 with weight 1/4 each, 0.8 with weight 1/2
        (CLIPPED, 0.2, 0.2, SEQ_MEAN_N, -0.051633, [0, -0.151633, 0]),
        # the wider upper bound keeps the first token: (-1.221403 - 0.606531 + 0.8) / 3
        (CLIPPED, 0.2, 0.28, TOKEN_MEAN_N, -0.342644, [-0.407134, -0.202177, 0]),
        (CLIPPED, 0.2, 0.2, CONST_N, -0.125816, [0, -0.075816, 0]),
        # cap 1.2, no floor: 1.2 x 0.8, 0.606531 x 2.5 and -0.670320 x 0.9, over 3
        (CISPO, 1.0, 0.2, TOKEN_MEAN_N, 0.624346, [-0.4, -0.202177, 0.223440]),
        (IS_PG, 0.2, 0.2, TOKEN_MEAN_N, -0.385871, [-0.407134, -0.202177, 0.223440]),
        # 4 sigmoid(0.221403) = 2.220503, 4 sigmoid(-0.393469) = 1.611530 and, colder by a twentieth,
        # 4 / 1.05 sigmoid(1.05 x -0.329680) = 1.578335: (-2.220503 - 1.611530 + 1.578335) / 3. Their slopes
        # 4 s (1 - s) rho: 1.206556, 0.583648 and 0.650633.
        (SAPO, 1.0, 1.0, TOKEN_MEAN_N, -0.751232, [-0.402185, -0.194549, 0.216878]),
    ],
    ids=["grpo", "dapo", "dr_grpo", "cispo", "is_pg", "sapo"],
)
def test_batch_loss_by_hand(
    loss: TokenLoss,
    clip_low: float,
    clip_high: float,
    weight_N: list[float],
    total: float,
    gradient_N: list[float],
) -> None:
    weights_N = torch.tensor(weight_N, dtype=torch.float64)
    arguments = (LOGP_N, OLD_LOGP_N, ADVANTAGE_N, clip_low, clip_high)
    assert float((weights_N * loss.value(*arguments)).sum()) == pytest.approx(total, abs=1e-6)
    assert (weights_N * loss.differentiate(*arguments)[1]).tolist() == pytest.approx(gradient_N, abs=1e-6)


@pytest.mark.parametrize(
    ("pi", "mu", "advantage", "dppo", "ipo_mask"),
    [
        # log(0.5 / 0.35) = 0.356675, its square 0.127217; the gain of 0.15 leaves the narrow range only.
        (0.50, 0.35, 1, (-1.428444, -1.427858), (0.000127, 0.000713)),
        # A rare token that doubles stays in both: the gain is 0.01.
        (0.02, 0.01, 1, (-1.999520, -1.998614), (-1.999520, -1.998614)),
        (0.10, 0.35, -1, (0.001569, -0.002506), (0.001569, -0.002506)),
        # A loss of 0.25 with A > 0 is the worse side: only the two-sided mask stops it.
        (0.10, 0.35, 1, (-0.284145, -0.288220), (0.001569, -0.002506)),
    ],
)
def test_probability_masks_by_hand(
    pi: float, mu: float, advantage: int, dppo: tuple[float, float], ipo_mask: tuple[float, float]
) -> None:
    logp_N, old_N = (torch.tensor([value], dtype=torch.float64).log() for value in (pi, mu))
    arguments = (logp_N, old_N, torch.tensor([float(advantage)], dtype=torch.float64))
    for loss, bound, expected in ((DPPO, 0.2, dppo), (IPO_MASK, 0.1, ipo_mask)):
        found = loss.differentiate(*arguments, bound, bound)
        assert [one.item() for one in found] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("ratio", "advantage", "is_open"),
    [(1.3, 1, False), (1.1, 1, True), (0.5, 1, True), (1.3, -1, True), (0.9, -1, True), (0.7, -1, False)],
)
def test_clipping_stops_a_token_only_on_its_better_side(ratio: float, advantage: int, is_open: bool) -> None:
    arguments = (torch.tensor([math.log(ratio)]), torch.zeros(1), torch.tensor([float(advantage)]), 0.2, 0.2)
    expected = -ratio * advantage if is_open else 0.0
    assert CLIPPED.differentiate(*arguments)[1].item() == pytest.approx(expected, abs=1e-6)


def test_tokens_beyond_either_bound_are_counted_by_that_bound() -> None:
    ratio_N, advantage_N = torch.tensor([1.25, 1.3, 0.85, 0.75]), torch.tensor([1.0, 1.0, -1.0, -1.0])
    low_N, high_N = clipped_sides(ratio_N.log(), torch.zeros(4), advantage_N, 0.2, 0.28)
    assert (low_N.tolist(), high_N.tolist()) == ([False, False, False, True], [False, True, False, False])


def test_dual_clip_by_hand() -> None:
    """L9: a ratio of exp(2) = 7.389056 with A = -1 stops at 3, and without the bound it does not."""
    far = (torch.tensor([2.0]).double(), torch.zeros(1).double(), torch.tensor([-1.0]).double(), 0.2, 0.2)
    found = [tuple(one.item() for one in loss.differentiate(*far)) for loss in (dual_clipped(3.0), CLIPPED)]
    assert found[0] == pytest.approx((3.0, 0.0))
    assert found[1] == pytest.approx((7.389056, 7.389056))
    # On the better side, and below the bound, the two are the same.
    for ratio, advantage in ((4.0, 1.0), (2.9, -1.0), (0.5, -1.0)):
        near = (torch.tensor([math.log(ratio)]), torch.zeros(1), torch.tensor([advantage]), 0.2, 0.2)
        pairs = zip(dual_clipped(3.0).differentiate(*near), CLIPPED.differentiate(*near), strict=True)
        assert all(torch.equal(bounded, free) for bounded, free in pairs)


def test_the_gate_of_sapo_closes_softly_and_faster_for_worse_rollouts() -> None:
    ratios_N = torch.tensor([1.0, 1.5, 3.0, 6.0], dtype=torch.float64)
    ones_N = torch.ones(4, dtype=torch.float64)
    up_N, down_N = (
        SAPO.differentiate(ratios_N.log(), torch.zeros(4), sign * ones_N, 0.2, 0.2)[1] / ratios_N
        for sign in (-1.0, 1.0)
    )
    # -A at a ratio of 1; beyond it less and less of what the ratio alone would give.
    assert (up_N[0].item(), down_N[0].item()) == (1.0, -1.0)
    assert bool((up_N[1:] < up_N[:-1]).all() and (down_N[1:] > down_N[:-1]).all())
    assert bool((up_N[1:] < -down_N[1:]).all())
    # 4 s (1 - s) with s = sigmoid(1.05 x 0.5) = 0.628316, and with sigmoid(0.5) = 0.622459
    assert (up_N[1].item(), down_N[1].item()) == pytest.approx((0.934140, -0.940015), abs=1e-6)


@pytest.mark.parametrize(
    ("loss", "low", "high"),
    [
        # Ratios 1.221403 (A > 0), 0.606531 (A > 0), 0.670320 (A < 0), range 0.8 to 1.2.
        (CLIPPED, [False, False, True], [True, False, False]),
        (dual_clipped(3.0), [False, False, True], [True, False, False]),
        # Weights are bounded whatever the sign.
        (CISPO, [False, True, True], [True, False, False]),
        # Differences of probabilities: 0.449329 - 0.367879, 0.082085 - 0.135335, 0.406570 - 0.606531
        (DPPO, [False, False, False], [False, False, False]),
        (IPO_MASK, [False, False, False], [False, False, False]),
    ],
    ids=["clipped", "dual_clipped", "cispo", "dppo", "ipo_mask"],
)
def test_who_is_held_up_at_which_end(loss: TokenLoss, low: list[bool], high: list[bool]) -> None:
    assert loss.bounded is not None
    found = loss.bounded(LOGP_N, OLD_LOGP_N, ADVANTAGE_N, 0.2, 0.2)
    assert [side_N.tolist() for side_N in found] == [low, high]
    narrow = loss.bounded(LOGP_N, OLD_LOGP_N, ADVANTAGE_N, 0.05, 0.05)
    if loss in (DPPO, IPO_MASK):
        assert narrow[1].tolist() == [True, False, False]
        assert narrow[0].tolist() == [False, loss is IPO_MASK, True]
    # Far off with A < 0: stopped by the second bound alone.
    far = (torch.tensor([2.0]), torch.zeros(1), torch.tensor([-1.0]), 0.2, 0.2)
    assert loss.bounded(*far)[1].tolist() == [loss.name in ("dual_clipped", "cispo", "ipo_mask")]


@pytest.mark.parametrize("loss", LOSSES.values(), ids=list(LOSSES))
def test_opt_1_equal_log_probabilities_give_the_plain_policy_gradient(loss: TokenLoss) -> None:
    arguments = (LOGP_N, LOGP_N, ADVANTAGE_N, 0.2, 0.2)
    assert loss.differentiate(*arguments)[1].tolist() == (-ADVANTAGE_N).tolist()


@pytest.mark.parametrize("loss", LOSSES.values(), ids=list(LOSSES))
@pytest.mark.parametrize("log_ratio", [-1e4, -89.0, 0.0, 89.0, 1e4])
def test_log_6_no_log_ratio_overflows_in_float32(loss: TokenLoss, log_ratio: float) -> None:
    for advantage in (-1.0, 0.0, 1.0):
        arguments = (torch.full((1,), log_ratio), torch.zeros(1), torch.full((1,), advantage), 0.2, 0.2)
        for result in loss.differentiate(*arguments):
            assert bool(torch.isfinite(result).all())


@pytest.mark.parametrize("loss", LOSSES.values(), ids=list(LOSSES))
def test_no_tokens_give_no_losses(loss: TokenLoss) -> None:
    nothing = torch.zeros(0)
    assert [one.shape for one in loss.differentiate(nothing, nothing, nothing, 0.2, 0.2)] == [(0,), (0,)]


# Estimators of the KL divergence against closed forms: values, signs, and what their gradients descend.

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
