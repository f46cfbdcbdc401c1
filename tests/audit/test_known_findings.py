"""What is known of graders that others wrote must be found again: reasoning-gym 0.1.25."""

from __future__ import annotations

import asyncio
from importlib.metadata import version as package_version

import pytest

from strop.audit import AuditReport, AuditSettings, ProbeStatus, Verdict, run_audit
from strop.tasks import build_task
from strop.tasks.generated import ReasoningGymSpec

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


FAIL = ProbeStatus.FAIL


@pytest.mark.parametrize(
    ("dataset", "probe", "num_examples", "status", "reward"),
    [
        # The highest that is known; other examples may be paid more. Without any right reply:
        *((one, "gold", 8, FAIL, None) for one in ("boxnet", "graph_color", "propositional_logic")),
        *((one, "gold", 8, FAIL, None) for one in ("rubiks_cube", "rush_hour")),
        # Every 'False' item: whatever is not 'True' is taken for it.
        ("game_of_life_halting", "garbage", 32, FAIL, 1.0),
        ("propositional_logic", "garbage", 8, FAIL, 0.25),
        ("spell_backward", "garbage", 32, FAIL, 0.14),
        ("figlet_font", "garbage", 32, FAIL, 0.1),
        *((one, "empty", 8, FAIL, 0.05) for one in ("arc_agi", "rearc", "sentence_reordering")),
        ("rotate_matrix", "echo", 64, FAIL, 0.29),
    ],
)
def test_rew_4_data_sets_without_an_answer_and_those_that_pay_for_nothing_are_found(
    dataset: str, probe: str, num_examples: int, status: ProbeStatus, reward: float | None
) -> None:
    report = audit(dataset, probe, num_examples=num_examples)
    (result,) = report.probes
    assert result.status is status
    if reward is None:
        assert (result.value, report.verdict) == (0.0, Verdict.RED)
        return
    highest = result.evidence[0].reward
    assert highest is not None
    assert highest >= 0.999 * reward


def test_rew_1_a_scorer_that_raises_on_words_is_found() -> None:
    """`prime_factorization` raises ValueError on a reply that is no number."""
    report = audit("prime_factorization", "garbage", num_examples=8)
    (result,) = report.probes
    assert (result.status, result.detail) == (ProbeStatus.FAIL, "replies that were not judged")
    assert {entry.reward for entry in result.evidence} == {None}
    assert all(entry.detail.startswith("task, ValueError: invalid literal") for entry in result.evidence)
    assert report.verdict is Verdict.RED


def test_a_sound_data_set_is_green() -> None:
    assert audit("chain_sum", "empty", "garbage", "echo", "gold").verdict is Verdict.GREEN
