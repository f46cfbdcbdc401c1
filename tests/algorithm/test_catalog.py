"""The algorithms as data: what each entry is made of, and what a run file can change."""

from __future__ import annotations

import subprocess
import sys
from typing import get_args

import pytest
import torch

from strop.algorithm import ALGORITHMS, Aggregation, build_algorithm
from strop.algorithm.advantages import center, leave_one_out, standardize
from strop.algorithm.catalog import DAPO
from strop.algorithm.corrections import CORRECTIONS, correct_nothing, truncate_tokens
from strop.algorithm.losses import CLIPPED
from strop.spec.algorithm import AlgorithmSpec

LOGP_N = torch.tensor([-0.8, -2.5, -0.9], dtype=torch.float64)
PROXIMAL_N = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64)
ADVANTAGE_N = torch.tensor([1.0, 1.0, -1.0], dtype=torch.float64)


def test_every_entry_is_what_its_name_promises() -> None:
    table = {name: (a.advantage, a.aggregation, a.clip_low, a.clip_high) for name, a in ALGORITHMS.items()}
    assert table == {
        "grpo": (standardize, Aggregation.SEQ_MEAN, 0.2, 0.2),
        "dr_grpo": (center, Aggregation.CONST, 0.2, 0.2),
        "dapo": (standardize, Aggregation.TOKEN_MEAN, 0.2, 0.28),
        "rloo": (leave_one_out, Aggregation.TOKEN_MEAN, 0.2, 0.2),
    }
    assert {entry.loss.name for entry in ALGORITHMS.values()} == {CLIPPED.name}


def test_the_spec_admits_the_names_of_the_catalog() -> None:
    assert set(get_args(AlgorithmSpec.model_fields["name"].annotation)) == set(ALGORITHMS)
    assert set(get_args(AlgorithmSpec.model_fields["correction"].annotation)) <= set(CORRECTIONS)


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_an_unchanged_spec_builds_the_entry_with_its_correction(name: str) -> None:
    built = build_algorithm(AlgorithmSpec.model_validate({"name": name}))
    entry = ALGORITHMS[name]
    assert (built.name, built.clip_low, built.clip_high) == (name, entry.clip_low, entry.clip_high)
    assert (built.zero_variance, built.overlong) == ("skip", "keep")
    assert built.correction is truncate_tokens


def test_a_spec_replaces_what_it_names() -> None:
    spec = AlgorithmSpec(
        name="dapo",
        clip_low=0.1,
        clip_high=0.3,
        zero_variance="drop",
        overlong="mask",
        correction="none",
        correction_cap=7.0,
    )
    built = build_algorithm(spec)
    assert (built.clip_low, built.clip_high, built.zero_variance, built.overlong) == (
        0.1,
        0.3,
        "drop",
        "mask",
    )
    assert built.correction is correct_nothing
    assert built.correction_cap == 7.0


def test_decoupled_terms_by_hand() -> None:
    """Two policies apart: the ratio to the proximal one is clipped, the one to the engine capped."""
    # Ratios proximal / behavior 3, 0.4, 7, capped at 2: [2, 0.4, 2].
    # Token losses [-1.221403, -0.606531, 0.8] times these; their mean is -0.361806.
    behavior_N = PROXIMAL_N - torch.tensor([3.0, 0.4, 7.0], dtype=torch.float64).log()
    algorithm = build_algorithm(AlgorithmSpec(name="dapo"))
    terms = algorithm.token_terms(LOGP_N, behavior_N, ADVANTAGE_N, PROXIMAL_N)
    assert terms.loss_N.tolist() == pytest.approx([-2.442806, -0.242612, 1.6], abs=1e-6)
    assert float(terms.loss_N.mean()) == pytest.approx(-0.361806, abs=1e-6)
    # 2 x -1.221403, 0.4 x -0.606531, and a token whose ratio left the range
    assert terms.grad_N.tolist() == pytest.approx([-2.442806, -0.242612, 0.0], abs=1e-6)


def test_single_terms_are_the_corrected_policy_gradient() -> None:
    behavior_N = LOGP_N - torch.tensor([3.0, 0.4, 1.0], dtype=torch.float64).log()
    algorithm = build_algorithm(AlgorithmSpec(name="grpo"))
    terms = algorithm.token_terms(LOGP_N.clone().requires_grad_(), behavior_N, ADVANTAGE_N)
    assert terms.correction_N.tolist() == pytest.approx([2, 0.4, 1])
    assert terms.grad_N.tolist() == pytest.approx([-2, -0.4, 1])
    assert not terms.grad_N.requires_grad
    assert not terms.loss_N.requires_grad


def test_without_correction_the_engine_does_not_matter() -> None:
    terms = DAPO.token_terms(LOGP_N, PROXIMAL_N, ADVANTAGE_N)
    assert terms.grad_N.tolist() == (-ADVANTAGE_N).tolist()


def test_importing_the_room_loads_no_torch() -> None:
    program = "import sys, strop.algorithm; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
