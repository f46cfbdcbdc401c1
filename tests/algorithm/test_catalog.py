"""The algorithms as data: what each entry is made of, and what a run file can change."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import Tensor

from strop.algorithm import ALGORITHMS, Aggregation, build_algorithm
from strop.algorithm.advantages import center, leave_one_out, standardize
from strop.algorithm.catalog import DAPO
from strop.algorithm.corrections import CORRECTIONS, NO_CORRECTION
from strop.algorithm.losses import CISPO, CLIPPED, DPPO, IPO_MASK
from strop.policy.objective import ScoredTokens
from strop.spec.algorithm import AlgorithmSpec
from strop.spec.reference import ReferenceSpec

LOGP_N = torch.tensor([-0.8, -2.5, -0.9], dtype=torch.float64)
PROXIMAL_N = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64)
ADVANTAGE_N = torch.tensor([1.0, 1.0, -1.0], dtype=torch.float64)


def test_every_entry_is_what_its_name_promises() -> None:
    table = {
        name: (a.advantage, a.loss, a.aggregation, a.clip_low, a.clip_high) for name, a in ALGORITHMS.items()
    }
    assert table == {
        "grpo": (standardize, CLIPPED, Aggregation.SEQ_MEAN, 0.2, 0.2),
        "dr_grpo": (center, CLIPPED, Aggregation.CONST, 0.2, 0.2),
        "dapo": (standardize, CLIPPED, Aggregation.TOKEN_MEAN, 0.2, 0.28),
        "rloo": (leave_one_out, CLIPPED, Aggregation.TOKEN_MEAN, 0.2, 0.2),
        "gspo": (standardize, CLIPPED, Aggregation.SEQ_MEAN, 3e-4, 4e-4),
        "cispo": (standardize, CISPO, Aggregation.TOKEN_MEAN, 1.0, 4.0),
        "dppo": (center, DPPO, Aggregation.TOKEN_MEAN, 0.2, 0.2),
        "ipo_mask": (center, IPO_MASK, Aggregation.TOKEN_MEAN, 0.1, 0.1),
    }
    assert [name for name, a in ALGORITHMS.items() if a.has_sequence_ratio] == ["gspo"]
    assert (DAPO.zero_variance, DAPO.filter_on, DAPO.overlong) == ("resample", "task", "shape")


def test_the_spec_admits_the_names_of_the_catalog() -> None:
    names, _own = get_args(AlgorithmSpec.model_fields["name"].annotation)
    assert set(get_args(names)) == set(ALGORITHMS)
    assert set(get_args(AlgorithmSpec.model_fields["correction"].annotation)) == set(CORRECTIONS)


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_an_unchanged_spec_builds_the_entry_with_its_correction(name: str) -> None:
    built = build_algorithm(AlgorithmSpec.model_validate({"name": name}))
    entry = ALGORITHMS[name]
    assert (built.name, built.clip_low, built.clip_high) == (name, entry.clip_low, entry.clip_high)
    assert (built.zero_variance, built.overlong) == (entry.zero_variance, entry.overlong)
    assert built.correction is (NO_CORRECTION if entry.mode == "bypass" else CORRECTIONS["tis_token"])


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
    assert built.correction is NO_CORRECTION
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
    assert terms.correction_N is not None
    assert terms.correction_N.tolist() == pytest.approx([2, 0.4, 1])
    assert terms.grad_N.tolist() == pytest.approx([-2, -0.4, 1])
    assert not terms.grad_N.requires_grad
    assert not terms.loss_N.requires_grad


@pytest.mark.parametrize(
    ("clip_low", "clip_high", "total"),
    [
        # Ratios of the sequences: exp((0.2 - 0.5) / 2) = 0.860708 and 0.670320. Outside the lower bound
        # with A = -1 the second is stopped at 0.8: (-0.860708 + 0.8) / 2.
        (0.2, 0.28, -0.030354),
        # The published range: stopped at 0.9997. (-0.860708 + 0.9997) / 2
        (3e-4, 4e-4, 0.069496),
    ],
)
def test_gspo_by_hand(clip_low: float, clip_high: float, total: float) -> None:
    gspo = replace(ALGORITHMS["gspo"], clip_low=clip_low, clip_high=clip_high)
    sequence_N, weight_N = torch.tensor([0, 0, 1]), torch.tensor([1 / 4, 1 / 4, 1 / 2]).double()
    terms = gspo.token_terms(LOGP_N, LOGP_N, ADVANTAGE_N, PROXIMAL_N, sequence_N=sequence_N)
    assert float((weight_N * terms.loss_N).sum()) == pytest.approx(total, abs=1e-6)
    # 0.860708 / 2 / 2 for both tokens of the first sequence
    assert (weight_N * terms.grad_N).tolist() == pytest.approx([-0.215177, -0.215177, 0.0], abs=1e-6)
    # The derivative by autograd of the loss as it is written for sequences.
    leaf_N = LOGP_N.clone().requires_grad_()
    ratios_S = torch.stack([(leaf_N - PROXIMAL_N)[:2].mean(), (leaf_N - PROXIMAL_N)[2:].mean()]).exp()
    advantage_S = torch.tensor([1.0, -1.0])
    bounded_S = ratios_S.clamp(1 - clip_low, 1 + clip_high)
    loss = -(ratios_S * advantage_S).minimum(bounded_S * advantage_S).mean()
    (gradient_N,) = torch.autograd.grad(loss, leaf_N)
    torch.testing.assert_close(weight_N * terms.grad_N, gradient_N)
    assert float(loss.detach()) == pytest.approx(total, abs=1e-6)


def known_tokens(**given: Tensor) -> ScoredTokens:
    """Make three tokens of two replies, of which nobody gave more than what is named."""
    unknown_N = torch.full((3,), torch.nan, dtype=torch.float64)
    names = ("engine", "proximal", "reference", "teacher")
    streams = {f"{name}_logprob_M": given.get(name, unknown_N) for name in names}
    index_M = torch.tensor([0, 0, 1])
    return ScoredTokens(
        logprob_M=LOGP_N, advantage_M=ADVANTAGE_N, reply_M=index_M, group_M=index_M * 0, **streams
    )


def test_the_mode_says_where_a_ratio_starts() -> None:
    engine_N, plain = PROXIMAL_N - 0.1, build_algorithm(AlgorithmSpec(name="dapo", correction="none"))
    tokens = known_tokens(engine=engine_N, proximal=PROXIMAL_N)
    single = plain(tokens)
    assert single.grad_N.tolist() == (-ADVANTAGE_N).tolist()
    # L2: [-1.221403, -0.606531, 0] times 3 tokens' weight of 1/3
    decoupled = replace(plain, mode="decoupled")(tokens)
    assert decoupled.grad_N.tolist() == pytest.approx([-1.221403, -0.606531, 0.0], abs=1e-6)
    # exp(0.2 + 0.1) = 1.349859 has left the range, exp(-0.5 + 0.1) = 0.670320, exp(-0.4 + 0.1) = 0.740818
    bypass = build_algorithm(AlgorithmSpec(name="dapo", mode="bypass"))(tokens)
    assert bypass.grad_N.tolist() == pytest.approx([0.0, -0.670320, 0.0], abs=1e-6)
    assert bypass.correction_N is not None
    assert bypass.correction_N.tolist() == [1, 1, 1]
    missing = replace(plain, mode="decoupled")(known_tokens(engine=engine_N))
    assert bool(missing.loss_N.isnan().all())


def test_a_penalty_is_added_and_not_corrected_away() -> None:
    """N5: a token without advantage, logp = -1, reference -1.5, beta 0.04."""
    spec = ReferenceSpec(kl_beta=0.04, kl_estimator="k3")
    algorithm = build_algorithm(AlgorithmSpec(), spec)
    assert algorithm.zero_variance == "keep"
    tokens = replace(
        known_tokens(engine=LOGP_N + 30.0, reference=torch.full((3,), -1.5, dtype=torch.float64)),
        logprob_M=torch.full((3,), -1.0, dtype=torch.float64),
        advantage_M=torch.zeros(3, dtype=torch.float64),
    )
    # 0.04 x 0.106531 and 0.04 x 0.393469, although the correction is nearly 0.
    terms = algorithm(tokens)
    assert terms.loss_N.tolist() == pytest.approx([0.004261] * 3, abs=1e-6)
    assert terms.grad_N.tolist() == pytest.approx([0.015739] * 3, abs=1e-6)
    assert build_algorithm(AlgorithmSpec(), ReferenceSpec()).kl is None


def test_rollouts_that_may_be_older_have_a_corrected_penalty() -> None:
    spec = ReferenceSpec(kl_beta=1.0)
    built = [
        build_algorithm(AlgorithmSpec(), spec),
        build_algorithm(AlgorithmSpec(), spec, is_off_policy=True),
        build_algorithm(AlgorithmSpec(mode="decoupled"), spec),
        build_algorithm(AlgorithmSpec(), spec.model_copy(update={"is_corrected": True})),
    ]
    assert [one.kl is not None and one.kl.is_corrected for one in built] == [False, True, True, True]


def test_a_teacher_is_part_of_the_advantage() -> None:
    # A + 0.5 (teacher - logp): 1 + 0.5 x 0.4, 1 - 0.5 x 0.2, -1 + 0
    gap_N = torch.tensor([0.4, -0.2, 0.0], dtype=torch.float64)
    algorithm = replace(DAPO, teacher_weight=0.5)
    terms = algorithm(known_tokens(engine=LOGP_N, teacher=LOGP_N + gap_N))
    assert terms.grad_N.tolist() == pytest.approx([-1.2, -0.9, 1.0])
    assert algorithm.acts_on_all_tokens


def test_without_correction_the_engine_does_not_matter() -> None:
    terms = DAPO.token_terms(LOGP_N, PROXIMAL_N, ADVANTAGE_N)
    assert terms.grad_N.tolist() == (-ADVANTAGE_N).tolist()


def test_importing_the_room_loads_no_torch() -> None:
    program = "import sys, strop.algorithm; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
