"""The algorithms as data: what each entry is made of, and what a run file can change."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from strop.algorithm import ALGORITHMS, Aggregation, build_algorithm
from strop.algorithm.advantages import ADVANTAGES, center, keep_reward, leave_one_out, standardize
from strop.algorithm.building import find_idle_settings
from strop.algorithm.catalog import DAPO
from strop.algorithm.corrections import CORRECTIONS, NO_CORRECTION
from strop.algorithm.losses import CISPO, CLIPPED, DPPO, IPO_MASK, SAPO
from strop.errors import ConfigError
from strop.policy.objective import APPROX_KL, ScoredTokens
from strop.spec.algorithm import ALGORITHM_NAMES, AdvantageName, AlgorithmSpec
from strop.spec.model import ReferenceSpec
from strop.spec.train import TrainSpec
from tests.fixtures.tiny_run import tiny_spec

LOGP_N = torch.tensor([-0.8, -2.5, -0.9], dtype=torch.float64)
OLD_N = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64)
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
        "sapo": (standardize, SAPO, Aggregation.SEQ_MEAN, 1.0, 1.0),
        "dppo": (center, DPPO, Aggregation.TOKEN_MEAN, 0.2, 0.2),
        "ipo_mask": (center, IPO_MASK, Aggregation.TOKEN_MEAN, 0.1, 0.1),
        "reinforce_pp": (keep_reward, CLIPPED, Aggregation.TOKEN_MEAN, 0.2, 0.2),
        "reinforce_pp_baseline": (center, CLIPPED, Aggregation.TOKEN_MEAN, 0.2, 0.2),
    }
    whitened = {name: a.is_relative for name, a in ALGORITHMS.items() if a.over_batch == "whiten"}
    assert whitened == {"reinforce_pp": False, "reinforce_pp_baseline": True}
    assert [name for name, a in ALGORITHMS.items() if a.has_sequence_ratio] == ["gspo"]
    assert (DAPO.zero_variance, DAPO.filter_on, DAPO.overlong) == ("resample", "task", "shape")


def test_the_spec_admits_the_names_of_the_catalog() -> None:
    assert sorted(ALGORITHM_NAMES) == sorted(ALGORITHMS)
    assert set(get_args(AlgorithmSpec.model_fields["correction"].annotation)) == set(CORRECTIONS)
    assert set(get_args(AdvantageName)) == set(ADVANTAGES)


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_cfg_3_an_unchanged_spec_builds_the_entry_with_its_correction(name: str) -> None:
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
    """Two policies apart: the ratio to the old one is clipped, the one to the engine capped."""
    # Ratios old / engine 3, 0.4, 7, capped at 2: [2, 0.4, 2].
    # Token losses [-1.221403, -0.606531, 0.8] times these; their mean is -0.361806.
    engine_N = OLD_N - torch.tensor([3.0, 0.4, 7.0], dtype=torch.float64).log()
    algorithm = build_algorithm(AlgorithmSpec(name="dapo"))
    terms = algorithm.token_terms(LOGP_N, engine_N, ADVANTAGE_N, OLD_N)
    assert terms.loss_N.tolist() == pytest.approx([-2.442806, -0.242612, 1.6], abs=1e-6)
    assert float(terms.loss_N.mean()) == pytest.approx(-0.361806, abs=1e-6)
    # 2 x -1.221403, 0.4 x -0.606531, and a token whose ratio left the range
    assert terms.grad_N.tolist() == pytest.approx([-2.442806, -0.242612, 0.0], abs=1e-6)


def test_single_terms_are_the_corrected_policy_gradient() -> None:
    engine_N = LOGP_N - torch.tensor([3.0, 0.4, 1.0], dtype=torch.float64).log()
    algorithm = build_algorithm(AlgorithmSpec(name="grpo"))
    terms = algorithm.token_terms(LOGP_N.clone().requires_grad_(), engine_N, ADVANTAGE_N)
    assert terms.means["correction_mean"].tolist() == pytest.approx([2, 0.4, 1])
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
    terms = gspo.token_terms(LOGP_N, LOGP_N, ADVANTAGE_N, OLD_N, sequence_N=sequence_N)
    assert float((weight_N * terms.loss_N).sum()) == pytest.approx(total, abs=1e-6)
    # 0.860708 / 2 / 2 for both tokens of the first sequence
    assert (weight_N * terms.grad_N).tolist() == pytest.approx([-0.215177, -0.215177, 0.0], abs=1e-6)
    # The derivative by autograd of the loss as it is written for sequences.
    leaf_N = LOGP_N.clone().requires_grad_()
    ratios_S = torch.stack([(leaf_N - OLD_N)[:2].mean(), (leaf_N - OLD_N)[2:].mean()]).exp()
    advantage_S = torch.tensor([1.0, -1.0])
    bounded_S = ratios_S.clamp(1 - clip_low, 1 + clip_high)
    loss = -(ratios_S * advantage_S).minimum(bounded_S * advantage_S).mean()
    (gradient_N,) = torch.autograd.grad(loss, leaf_N)
    torch.testing.assert_close(weight_N * terms.grad_N, gradient_N)
    assert float(loss.detach()) == pytest.approx(total, abs=1e-6)


def known_tokens(**given: Tensor) -> ScoredTokens:
    """Make three tokens of two replies, of which nobody gave more than what is named."""
    unknown_N = torch.full((3,), torch.nan, dtype=torch.float64)
    names = ("engine", "old", "reference", "teacher")
    streams = {f"{name}_logprob_M": given.get(name, unknown_N) for name in names}
    index_M = torch.tensor([0, 0, 1])
    return ScoredTokens(
        logprob_M=LOGP_N, advantage_M=ADVANTAGE_N, reply_M=index_M, group_M=index_M * 0, **streams
    )


def test_the_mode_says_where_a_ratio_starts() -> None:
    engine_N, plain = OLD_N - 0.1, build_algorithm(AlgorithmSpec(name="dapo", correction="none"))
    tokens = known_tokens(engine=engine_N, old=OLD_N)
    single = plain(tokens)
    assert single.grad_N.tolist() == (-ADVANTAGE_N).tolist()
    # L2: [-1.221403, -0.606531, 0] times 3 tokens' weight of 1/3
    decoupled = replace(plain, mode="decoupled")(tokens)
    assert decoupled.grad_N.tolist() == pytest.approx([-1.221403, -0.606531, 0.0], abs=1e-6)
    # exp(0.2 + 0.1) = 1.349859 has left the range, exp(-0.5 + 0.1) = 0.670320, exp(-0.4 + 0.1) = 0.740818
    bypass = build_algorithm(AlgorithmSpec(name="dapo", mode="bypass"))(tokens)
    assert bypass.grad_N.tolist() == pytest.approx([0.0, -0.670320, 0.0], abs=1e-6)
    assert bypass.means["correction_mean"].tolist() == [1, 1, 1]
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
        build_algorithm(AlgorithmSpec(), spec, train=TrainSpec(max_staleness=1)),
        build_algorithm(AlgorithmSpec(mode="decoupled"), spec),
    ]
    assert [one.kl is not None and one.kl.is_corrected for one in built] == [False, True, True]


def test_a_teacher_is_part_of_the_advantage() -> None:
    # A + 0.5 (teacher - logp): 1 + 0.5 x 0.4, 1 - 0.5 x 0.2, -1 + 0
    gap_N = torch.tensor([0.4, -0.2, 0.0], dtype=torch.float64)
    algorithm = replace(DAPO, teacher_weight=0.5)
    terms = algorithm(known_tokens(engine=LOGP_N, teacher=LOGP_N + gap_N))
    assert terms.grad_N.tolist() == pytest.approx([-1.2, -0.9, 1.0])
    assert algorithm.acts_on_all_tokens


SEVERAL = TrainSpec(mini_batches=4)


@pytest.mark.parametrize(
    ("spec", "train", "mode"),
    [
        # One optimizer step on rollouts of the newest weights: the ratio is 1, and no forward says so.
        ({}, TrainSpec(), "single"),
        ({"mode": "decoupled"}, TrainSpec(), "single"),
        ({"mode": "decoupled"}, TrainSpec(max_staleness=3), "single"),
        ({"mode": "bypass"}, TrainSpec(), "bypass"),
        # Several steps: from where the batch began.
        ({}, SEVERAL, "decoupled"),
        ({}, TrainSpec(epochs=2), "decoupled"),
        ({"name": "dppo"}, SEVERAL, "bypass"),
    ],
)
def test_ratios_start_where_they_can_differ_from_1(spec: dict[str, Any], train: TrainSpec, mode: str) -> None:
    assert build_algorithm(AlgorithmSpec.model_validate(spec), train=train).mode == mode


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo", "sapo", "reinforce_pp"])
def test_what_is_told_of_ratios_by_hand(name: str) -> None:
    algorithm = replace(build_algorithm(AlgorithmSpec.model_validate({"name": name}), train=SEVERAL))
    terms = algorithm(known_tokens(engine=OLD_N, old=OLD_N))
    # exp(x) - 1 - x of 0.2, -0.5 and -0.4
    assert terms.means["approx_kl_nats"].tolist() == pytest.approx([0.021403, 0.106531, 0.070320], abs=1e-6)
    assert terms.ratio_N is not None
    # Of gspo the mean log-ratio of a sequence: exp(-0.15) twice.
    ratios = [0.860708, 0.860708, 0.670320] if name == "gspo" else [1.221403, 0.606531, 0.670320]
    assert terms.ratio_N.tolist() == pytest.approx(ratios, abs=1e-6)
    sides = [terms.means.get(f"clip_{side}_frac") for side in ("low", "high")]
    low, high = ([] if side is None else side.tolist() for side in sides)
    expected = {
        "grpo": ([0, 0, 1], [1, 0, 0]),
        "gspo": ([0, 0, 1], [0, 0, 0]),
        "cispo": ([0, 0, 0], [0, 0, 0]),
        # A gate has no bounds that could stop anything.
        "sapo": ([], []),
        "reinforce_pp": ([0, 0, 1], [1, 0, 0]),
    }
    assert (low, high) == expected[name]


def test_a_ratio_that_is_1_by_construction_is_not_told_as_if_measured() -> None:
    terms = build_algorithm(AlgorithmSpec())(known_tokens(engine=OLD_N, old=OLD_N))
    assert terms.ratio_N is None
    assert not terms.means.keys() & {APPROX_KL, "clip_low_frac"}


def test_the_distance_from_the_reference_is_told_whatever_the_estimator() -> None:
    """K1: logp -1 and reference -1.5 are 0.106531 apart as k3, which estimates KL(policy || reference)."""
    reference_N = LOGP_N - torch.tensor([0.5, -0.5, 0.0])
    for estimator in ("k2", "k3", "k3+"):
        spec = ReferenceSpec(kl_beta=0.1, kl_estimator=estimator)
        algorithm = build_algorithm(AlgorithmSpec(), spec)
        means = algorithm(known_tokens(engine=LOGP_N - 1.0, reference=reference_N)).means
        found = means["reference_kl_nats"].tolist()
        assert found == pytest.approx([0.106531, 0.148721, 0.0], abs=1e-6)
    # Of tokens that another policy drew, weighed by the ratio to it: e times.
    corrected = build_algorithm(AlgorithmSpec(), ReferenceSpec(kl_beta=0.1), TrainSpec(max_staleness=1))
    means = corrected(known_tokens(engine=LOGP_N - 1.0, reference=reference_N)).means
    assert means["reference_kl_nats"][0].item() == pytest.approx(0.106531 * 2.718282, abs=1e-5)


def test_a_penalty_in_the_reward_is_no_term_of_the_loss() -> None:
    algorithm = build_algorithm(AlgorithmSpec(name="reinforce_pp"), ReferenceSpec(kl_beta=0.2))
    assert (algorithm.kl, algorithm.reward_kl_beta, algorithm.needs_reference) == (None, 0.2, True)
    baseline = build_algorithm(AlgorithmSpec(name="reinforce_pp_baseline"), ReferenceSpec(kl_beta=0.2))
    assert baseline.kl is not None
    assert baseline.reward_kl_beta == 0.0
    tokens = known_tokens(engine=LOGP_N, reference=LOGP_N - 0.5)
    assert algorithm(tokens).grad_N.tolist() == (-ADVANTAGE_N).tolist()
    assert algorithm(tokens).means["reference_kl_nats"].tolist() == pytest.approx([0.106531] * 3, abs=1e-6)


def test_an_advantage_of_the_run_replaces_that_of_the_entry() -> None:
    for name, estimator in ADVANTAGES.items():
        built = build_algorithm(AlgorithmSpec.model_validate({"name": "dapo", "advantage": name}))
        assert (built.advantage, built.over_batch, built.is_relative) == (
            estimator.compare,
            estimator.over_batch,
            estimator.is_relative,
        )
        assert built.loss is CLIPPED
        # What is whitened is not zero where a group has no difference.
        assert built.zero_variance == ("keep" if estimator.over_batch == "whiten" else "resample")


def test_settings_of_the_loss_change_it() -> None:
    far = known_tokens(engine=LOGP_N, old=LOGP_N - 2.0)
    plain = build_algorithm(AlgorithmSpec(), train=SEVERAL)
    dual = build_algorithm(AlgorithmSpec(dual_clip=3.0), train=SEVERAL)
    # exp(2) = 7.389056 with A = -1, of a correction capped at exp(-2).
    assert plain(far).grad_N[2].item() > 0.9
    assert dual(far).grad_N[2].item() == 0.0
    with pytest.raises(ConfigError, match=r"algorithm\.dual_clip=3 beside cispo"):
        build_algorithm(AlgorithmSpec(name="cispo", dual_clip=3.0))


def test_an_entropy_bonus_lets_no_rollout_be_skipped() -> None:
    algorithm = build_algorithm(AlgorithmSpec(entropy_weight=0.01))
    assert (algorithm.entropy_weight, algorithm.zero_variance) == (0.01, "keep")
    assert algorithm.acts_on_all_tokens


def test_advantages_of_a_teacher_are_those_of_the_first_step() -> None:
    # A + 0.5 (teacher - old), although the policy has moved since.
    algorithm = replace(DAPO, teacher_weight=0.5, mode="decoupled", clip_high=9.0, clip_low=1.0)
    tokens = known_tokens(engine=OLD_N, old=OLD_N, teacher=OLD_N + 0.4)
    ratio_N = (LOGP_N - OLD_N).exp()
    assert algorithm(tokens).grad_N.tolist() == pytest.approx((-ratio_N * (ADVANTAGE_N + 0.2)).tolist())


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"algorithm": {"clip_high": 0.3}}, "algorithm.clip_high=0.3 stops nothing"),
        ({"algorithm": {"clip_low": 0.1, "dual_clip": 3.0}}, "algorithm.dual_clip=3 stops nothing"),
        ({"algorithm": {"name": "gspo"}}, "algorithm.name='gspo' learns as 'grpo' does"),
        ({"algorithm": {"name": "sapo"}}, "algorithm.name='sapo' learns as 'grpo' does"),
        ({"algorithm": {"name": "cispo"}}, "algorithm.name='cispo' learns as 'grpo' with every token"),
        ({"algorithm": {"mode": "decoupled"}}, "its forward pass is left out"),
    ],
)
def test_what_cannot_matter_is_said_where_it_was_given(sections: dict[str, Any], said: str) -> None:
    found = find_idle_settings(tiny_spec(**sections))
    assert found is not None
    assert said in found
    assert "every probability ratio is 1" in found
    # With several optimizer steps it matters.
    several = {**sections, "train": {"epochs": 2}}
    assert find_idle_settings(tiny_spec(**several)) is None


@pytest.mark.parametrize(
    "sections", [{}, {"algorithm": {"name": "dapo"}}, {"algorithm": {"mode": "bypass", "clip_low": 0.1}}]
)
def test_what_nobody_gave_is_no_news(sections: dict[str, Any]) -> None:
    assert find_idle_settings(tiny_spec(**sections)) is None


def test_importing_the_room_loads_no_torch() -> None:
    program = "import sys, strop.algorithm; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
