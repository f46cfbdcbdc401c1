"""Corrections against cases by hand: ratios 3, 0.4 and 7."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from strop.algorithm.corrections import CORRECTION_SQUARE, CORRECTIONS, mask_outside, measure_correction


def ratios() -> Tensor:
    return torch.tensor([3.0, 0.4, 7.0], dtype=torch.float64).log()


def weigh(name: str, log_ratio_N: Tensor) -> Tensor:
    """Weigh tokens of one sequence whose advantage is negative."""
    advantage_N = torch.full((len(log_ratio_N),), -1.0)
    sequence_N = torch.zeros(len(log_ratio_N), dtype=torch.int64)
    return CORRECTIONS[name](log_ratio_N, advantage_N, 2.0, sequence_N)


@pytest.mark.parametrize(
    ("name", "cap", "expected_N"),
    [
        ("none", 2.0, [1, 1, 1]),
        ("tis_token", 2.0, [2, 0.4, 2]),
        ("tis_token", 5.0, [3, 0.4, 5]),
        ("mis_token", 2.0, [0, 0.4, 0]),
        ("mis_token", 5.0, [3, 0.4, 0]),
        # 0.4 lies below the floor of 0.5
        ("icepop", 5.0, [3, 0, 0]),
    ],
)
def test_corrections_by_hand(name: str, cap: float, expected_N: list[float]) -> None:
    assert CORRECTIONS[name].weigh(ratios(), torch.ones(3), cap).tolist() == pytest.approx(expected_N)


@pytest.mark.parametrize(("name", "expected"), [("tis_seq", 3.0), ("mis_seq", 0.0)])
def test_corrections_of_sequences_by_hand(name: str, expected: float) -> None:
    # 3 x 0.4 x 7 = 8.4 is above the cap of 3; the second sequence has the ratio 1.5.
    log_ratio_N = torch.cat([ratios(), torch.tensor([1.5], dtype=torch.float64).log()])
    sequence_N = torch.tensor([1, 1, 1, 0])
    weight_N = CORRECTIONS[name](log_ratio_N, torch.ones(4), CORRECTIONS[name].cap, sequence_N)
    assert weight_N.tolist() == pytest.approx([expected, expected, expected, 1.5])


@pytest.mark.parametrize(("advantage", "cap", "expected"), [(-1.0, 0.1, 0), (1.0, 0.1, 1), (-1.0, 0.7, 1)])
def test_what_the_policy_left_is_masked_where_it_was_worse(
    advantage: float, cap: float, expected: int
) -> None:
    # log q = [-1, -2], log p = [-1.5, -2.7]: the engine found them likelier by 0.5 and 0.7, mean 0.6.
    log_ratio_N = torch.tensor([-0.5, -0.7], dtype=torch.float64)
    advantage_N, sequence_N = torch.full((2,), advantage), torch.zeros(2, dtype=torch.int64)
    assert CORRECTIONS["opsm"].cap == 0.1
    weight_N = CORRECTIONS["opsm"](log_ratio_N, advantage_N, cap, sequence_N)
    assert weight_N.tolist() == [expected, expected]


def test_the_floor_can_be_moved() -> None:
    assert mask_outside(ratios(), torch.ones(3), 5.0, floor=0.3).tolist() == pytest.approx([3, 0.4, 0])


@pytest.mark.parametrize("name", CORRECTIONS)
def test_no_correction_is_differentiated_or_changes_equal_log_probabilities(name: str) -> None:
    assert not weigh(name, ratios().requires_grad_()).requires_grad
    assert weigh(name, torch.zeros(3)).tolist() == [1, 1, 1]


@pytest.mark.parametrize("name", CORRECTIONS)
@pytest.mark.parametrize("log_ratio", [-1e4, 1e4])
def test_log_6_no_correction_overflows(name: str, log_ratio: float) -> None:
    assert bool(torch.isfinite(weigh(name, torch.full((1,), log_ratio))).all())


def test_what_corrections_do_by_hand() -> None:
    # Truncated at 2: [2, 0.4, 2], two of three. Mean 4.4 / 3, mean square 8.16 / 3.
    truncated = measure_correction(ratios(), torch.tensor([2.0, 0.4, 2.0]).double())
    assert {name: float(values.mean()) for name, values in truncated.items()} == pytest.approx(
        {
            "correction_mean": 4.4 / 3,
            CORRECTION_SQUARE: 8.16 / 3,
            "correction_truncated_frac": 2 / 3,
            "correction_masked_frac": 0.0,
        }
    )
    # Masked above 2: one token carries all.
    masked = measure_correction(ratios(), torch.tensor([0.0, 0.4, 0.0]).double())
    assert masked["correction_masked_frac"].tolist() == [1, 0, 1]
    assert masked["correction_truncated_frac"].tolist() == [0, 0, 0]
