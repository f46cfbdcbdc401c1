"""Token losses against cases by hand, and their closed-form gradients against autograd.

Two rollouts: one of two tokens with A = +1, one of one token with A = -1.
exp(-0.8 + 1) = 1.221403, exp(-2.5 + 2) = 0.606531, exp(-0.9 + 0.5) = 0.670320.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from strop.algorithm.losses import (
    CISPO,
    CLIPPED,
    DPPO,
    IPO_MASK,
    IS_PG,
    SAPO,
    TokenLoss,
    dual_clipped,
)
from tests.fixtures.losses import LOSSES

# Shapes: N = 3 tokens.
LOGP_N = torch.tensor([-0.8, -2.5, -0.9], dtype=torch.float64)
OLD_LOGP_N = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64)
ADVANTAGE_N = torch.tensor([1.0, 1.0, -1.0], dtype=torch.float64)
TOKEN_MEAN_N = [1 / 3, 1 / 3, 1 / 3]
SEQ_MEAN_N = [1 / 4, 1 / 4, 1 / 2]
CONST_N = [1 / 8, 1 / 8, 1 / 8]  # two rollouts, reply limit 4


def differentiate(loss: TokenLoss, logp_N: Tensor, old_N: Tensor, adv_N: Tensor, *clip: float) -> Tensor:
    """Return the derivative of the summed loss by autograd."""
    leaf_N = logp_N.clone().requires_grad_()
    (gradient_N,) = torch.autograd.grad(loss.value(leaf_N, old_N, adv_N, *clip).sum(), leaf_N)
    return gradient_N


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
    assert (weights_N * loss.grad(*arguments)).tolist() == pytest.approx(gradient_N, abs=1e-6)
    assert (weights_N * differentiate(loss, *arguments)).tolist() == pytest.approx(gradient_N, abs=1e-6)


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
        found = [loss.value(*arguments, bound, bound), loss.grad(*arguments, bound, bound)]
        assert [one.item() for one in found] == pytest.approx(expected, abs=1e-6)


def test_probability_masks_over_four_tokens_by_hand() -> None:
    # (-1.428444 - 1.999520 + 0.001569 - 0.284145) / 4 and (0.000127 - 1.999520 + 2 x 0.001569) / 4
    logp_N, old_N = (
        torch.tensor(row, dtype=torch.float64).log()
        for row in ([0.5, 0.02, 0.1, 0.1], [0.35, 0.01, 0.35, 0.35])
    )
    advantage_N = torch.tensor([1.0, 1.0, -1.0, 1.0], dtype=torch.float64)
    for loss, bound, mean in ((DPPO, 0.2, -0.927635), (IPO_MASK, 0.1, -0.499063)):
        assert float(loss.value(logp_N, old_N, advantage_N, bound, bound).mean()) == pytest.approx(
            mean, abs=1e-6
        )


def test_clipped_token_losses_by_hand() -> None:
    narrow_N = CLIPPED.value(LOGP_N, OLD_LOGP_N, ADVANTAGE_N, 0.2, 0.2)
    wide_N = CLIPPED.value(LOGP_N, OLD_LOGP_N, ADVANTAGE_N, 0.2, 0.28)
    assert narrow_N.tolist() == pytest.approx([-1.2, -0.606531, 0.8], abs=1e-6)
    assert wide_N.tolist() == pytest.approx([-1.221403, -0.606531, 0.8], abs=1e-6)


@pytest.mark.parametrize(
    ("ratio", "advantage", "is_open"),
    [(1.3, 1, False), (1.1, 1, True), (0.5, 1, True), (1.3, -1, True), (0.9, -1, True), (0.7, -1, False)],
)
def test_clipping_stops_a_token_only_on_its_better_side(ratio: float, advantage: int, is_open: bool) -> None:
    arguments = (torch.tensor([math.log(ratio)]), torch.zeros(1), torch.tensor([float(advantage)]), 0.2, 0.2)
    expected = -ratio * advantage if is_open else 0.0
    assert CLIPPED.grad(*arguments).item() == pytest.approx(expected, abs=1e-6)


def test_dual_clip_by_hand() -> None:
    """L9: a ratio of exp(2) = 7.389056 with A = -1 stops at 3, and without the bound it does not."""
    far = (torch.tensor([2.0]).double(), torch.zeros(1).double(), torch.tensor([-1.0]).double(), 0.2, 0.2)
    found = [(loss.value(*far).item(), loss.grad(*far).item()) for loss in (dual_clipped(3.0), CLIPPED)]
    assert found[0] == pytest.approx((3.0, 0.0))
    assert found[1] == pytest.approx((7.389056, 7.389056))
    # On the better side, and below the bound, the two are the same.
    for ratio, advantage in ((4.0, 1.0), (2.9, -1.0), (0.5, -1.0)):
        near = (torch.tensor([math.log(ratio)]), torch.zeros(1), torch.tensor([advantage]), 0.2, 0.2)
        assert torch.equal(dual_clipped(3.0).value(*near), CLIPPED.value(*near))
        assert torch.equal(dual_clipped(3.0).grad(*near), CLIPPED.grad(*near))


def test_the_gate_of_sapo_closes_softly_and_faster_for_worse_rollouts() -> None:
    ratios_N = torch.tensor([1.0, 1.5, 3.0, 6.0], dtype=torch.float64)
    ones_N = torch.ones(4, dtype=torch.float64)
    up_N, down_N = (
        SAPO.grad(ratios_N.log(), torch.zeros(4), sign * ones_N, 0.2, 0.2) / ratios_N for sign in (-1.0, 1.0)
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
@settings(deadline=None)
@given(
    rows=st.lists(st.tuples(st.floats(-30, 0), st.floats(-30, 0), st.floats(-3, 3)), min_size=1),
    clip_low=st.floats(0.01, 1.0),
    clip_high=st.floats(0.01, 5.0),
)
def test_closed_form_gradient_equals_autograd(
    loss: TokenLoss, rows: list[tuple[float, float, float]], clip_low: float, clip_high: float
) -> None:
    logp_N, old_N, adv_N = torch.tensor(rows, dtype=torch.float64).unbind(dim=1)
    expected_N = differentiate(loss, logp_N, old_N, adv_N, clip_low, clip_high)
    torch.testing.assert_close(loss.grad(logp_N, old_N, adv_N, clip_low, clip_high), expected_N)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=list(LOSSES))
def test_opt_1_equal_log_probabilities_give_the_plain_policy_gradient(loss: TokenLoss) -> None:
    arguments = (LOGP_N, LOGP_N, ADVANTAGE_N, 0.2, 0.2)
    assert loss.grad(*arguments).tolist() == (-ADVANTAGE_N).tolist()
    assert differentiate(loss, *arguments).tolist() == (-ADVANTAGE_N).tolist()


@pytest.mark.parametrize("loss", [IS_PG, CISPO], ids=["is_pg", "cispo"])
def test_the_opposite_advantage_gives_the_opposite_gradient(loss: TokenLoss) -> None:
    up_N = loss.grad(LOGP_N, OLD_LOGP_N, ADVANTAGE_N, 0.2, 0.2)
    down_N = loss.grad(LOGP_N, OLD_LOGP_N, -ADVANTAGE_N, 0.2, 0.2)
    assert torch.equal(up_N, -down_N)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=list(LOSSES))
@pytest.mark.parametrize("log_ratio", [-1e4, -89.0, 0.0, 89.0, 1e4])
def test_log_6_no_log_ratio_overflows_in_float32(loss: TokenLoss, log_ratio: float) -> None:
    for advantage in (-1.0, 0.0, 1.0):
        arguments = (torch.full((1,), log_ratio), torch.zeros(1), torch.full((1,), advantage), 0.2, 0.2)
        for result in (loss.value(*arguments), loss.grad(*arguments), differentiate(loss, *arguments)):
            assert bool(torch.isfinite(result).all())


@pytest.mark.parametrize("loss", LOSSES.values(), ids=list(LOSSES))
def test_no_tokens_give_no_losses(loss: TokenLoss) -> None:
    nothing = torch.zeros(0)
    assert loss.value(nothing, nothing, nothing, 0.2, 0.2).shape == (0,)
    assert loss.grad(nothing, nothing, nothing, 0.2, 0.2).shape == (0,)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=list(LOSSES))
def test_one_step_improves_a_bandit_with_three_arms(loss: TokenLoss) -> None:
    # Every arm is drawn equally often; the reward of arm 2 is 1, the others 0, the mean is 1/3.
    rewards_V = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    logits_V = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    logp_V = torch.log_softmax(logits_V, dim=0)
    total = loss.value(logp_V, logp_V.detach(), rewards_V - rewards_V.mean(), 0.2, 0.2).sum()
    (gradient_V,) = torch.autograd.grad(total, logits_V)
    after_V = torch.softmax(logits_V.detach() - 0.1 * gradient_V, dim=0)
    assert float((after_V * rewards_V).sum()) > 1 / 3
