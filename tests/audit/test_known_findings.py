"""What is known of graders that others wrote must be found again: reasoning-gym 0.1.25."""

from __future__ import annotations

import asyncio
from importlib.metadata import version as package_version

import pytest

from strop.audit import AuditReport, AuditSettings, ProbeResult, ProbeStatus, Verdict, run_audit
from strop.tasks import build_task
from strop.tasks.generated.reasoning_gym import ReasoningGymSpec

pytest.importorskip("reasoning_gym", reason="the extra 'tasks' is not installed")
pytestmark = [
    pytest.mark.skipif(package_version("reasoning-gym") != "0.1.25", reason="known of 0.1.25"),
    # The package's own, in arc_agi and rearc.
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def audit(dataset: str, *probes: str, num_examples: int = 32) -> AuditReport:
    spec = ReasoningGymSpec(name="reasoning-gym", dataset=dataset, num_train=num_examples, num_held_out=1)
    settings = AuditSettings(num_examples=num_examples, probes=probes)
    return asyncio.run(run_audit(build_task(spec), settings))


def find(dataset: str, probe: str, num_examples: int = 32) -> ProbeResult:
    (result,) = audit(dataset, probe, num_examples=num_examples).probes
    return result


@pytest.mark.parametrize(
    "dataset", ["boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"]
)
def test_rew_4_data_sets_without_an_answer_are_found(dataset: str) -> None:
    report = audit(dataset, "gold", num_examples=8)
    (result,) = report.probes
    assert (result.status, result.value, report.verdict) == (ProbeStatus.FAIL, 0.0, Verdict.RED)
    assert result.detail == "8 examples without any right reply"


@pytest.mark.parametrize(
    ("dataset", "reward"),
    [
        # Every 'False' item: whatever is not 'True' is taken for it.
        ("game_of_life_halting", 1.0),
        ("propositional_logic", 0.25),
        ("spell_backward", 0.14),
        ("figlet_font", 0.1),
    ],
)
def test_rew_4_data_sets_that_pay_for_garbage_are_found(dataset: str, reward: float) -> None:
    result = find(dataset, "garbage", 8 if dataset == "propositional_logic" else 32)
    assert result.status is ProbeStatus.FAIL
    highest = result.evidence[0].reward
    assert highest is not None
    assert highest >= reward


@pytest.mark.parametrize("dataset", ["arc_agi", "rearc", "sentence_reordering"])
def test_rew_4_data_sets_that_pay_for_nothing_are_found(dataset: str) -> None:
    result = find(dataset, "empty", 8)
    assert result.status is ProbeStatus.FAIL
    assert result.value == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("dataset", "status", "highest"),
    [
        # The highest that is known; other examples may be paid more.
        # .3 for as many names as the answer has, and .7 times one right of two.
        ("knights_knaves", ProbeStatus.WARN, 0.65),
        ("rotate_matrix", ProbeStatus.FAIL, 0.29),
        ("number_sequence", ProbeStatus.WARN, 0.08),
    ],
)
def test_rew_4_data_sets_that_pay_for_the_question_are_found(
    dataset: str, status: ProbeStatus, highest: float
) -> None:
    result = find(dataset, "echo", 64)
    reward = result.evidence[0].reward
    assert (result.status, reward is not None and reward >= 0.999 * highest) == (status, True)


def test_rew_1_a_scorer_that_raises_on_words_is_found() -> None:
    """`prime_factorization` raises ValueError on a reply that is no number."""
    report = audit("prime_factorization", "garbage", num_examples=8)
    (result,) = report.probes
    assert (result.status, result.detail) == (ProbeStatus.FAIL, "replies that could not be judged")
    assert {entry.reward for entry in result.evidence} == {None}
    assert all(entry.detail.startswith("task, ValueError: invalid literal") for entry in result.evidence)
    assert report.verdict is Verdict.RED


def test_a_sound_data_set_is_green() -> None:
    assert audit("chain_sum", "noop", "empty", "garbage", "echo", "gold").verdict is Verdict.GREEN
